"""What specs are made of: rotary numbers, mixtures, trees, dtypes; unknown settings are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from eaglejax.drafts.tree import DynamicTree, StaticTree
from eaglejax.errors import ConfigError
from eaglejax.interop.models.specs import MoeSpec, RopeSpec, TreeSpec
from eaglejax.nn.moe import MoeConfig
from eaglejax.nn.rope import RopeConfig, frequencies


def check_known(config: Any, known: set[str], what: str) -> None:
    """Refuse a setting that is in use and that the torch side has not heard of."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in known and value != field.default:
            raise ConfigError(f"the torch {what} does not compute {field.name}={value!r}")


def rope_spec(rope: RopeConfig, head_dim: int) -> RopeSpec:
    """The numbers of a rotary setting, as ``nn.rope`` computes them."""
    inv_freq, scale = frequencies(rope, head_dim)
    return RopeSpec(tuple(float(x) for x in inv_freq), scale)


def moe_spec(moe: MoeConfig | None) -> MoeSpec | None:
    """How experts are chosen and mixed. Raises ConfigError for what the torch side does not compute."""
    if moe is None:
        return None
    check_known(moe, {"experts", "top_k", "intermediate_size", "scores", "normalize"}, "mixture of experts")
    if moe.scores == "sigmoid":
        raise ConfigError("the torch mixture of experts does not weight by sigmoids")
    return MoeSpec(moe.experts, moe.top_k, moe.scores == "softmax", moe.normalize)


def tree_spec(tree: DynamicTree | StaticTree, *, min_confidence: float = 0.0) -> TreeSpec:
    """The spec of a draft tree."""
    if isinstance(tree, DynamicTree):
        return TreeSpec("dynamic", tree.depth, tree.branching, tree.nodes, min_confidence=min_confidence)
    return TreeSpec("static", tree.depth, tree.branching, tree.nodes, tree.parent, tree.rank, min_confidence)


def cache_dtype(dtype: Any) -> str:
    """The name of a cache's dtype that the torch side holds. Raises ConfigError for narrow formats."""
    name = np.dtype(dtype).name if not isinstance(dtype, str) else dtype
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"the torch side keeps keys and values as floats; it does not know {name!r}")
    return name
