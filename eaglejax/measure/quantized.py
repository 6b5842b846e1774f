"""A quantised target beside the one it was made of: how far outputs moved, and what became of the weights."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.checkpoint.quantized.own.marker import is_packed, packed_leaves
from eaglejax.checkpoint.quantized.parts import kind_of
from eaglejax.checkpoint.quantized.read import label
from eaglejax.models import decoder
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target
from eaglejax.nn.visible import Causal
from eaglejax.quant.array import QuantArray


@functools.partial(jax.jit, static_argnames="config")
def _outputs(params: Any, config: ModelConfig, tokens: jax.Array, cache: Any) -> tuple[jax.Array, jax.Array]:
    """(outputs of all layers [N, L, H] f32, logits [N, V]) of one prompt."""
    n, layers = tokens.shape[1], tuple(range(1, config.num_layers + 1))
    positions = jnp.arange(n, dtype=jnp.int32)[None]
    out = decoder.forward(params, config, tokens, positions, cache, Causal(), aux=layers)
    assert out.aux is not None
    return out.aux[0].astype(jnp.float32), decoder.unembed(params, config, out.hidden)[0]


def layer_errors(before: Target, after: Target, prompt: Sequence[int]) -> dict[str, Any]:
    """How far the layers' outputs moved on ``prompt``: ``layers``, one number each, and ``logits``.

    Each is the root mean square over tokens of |difference| / |output before|, so that no token of large
    magnitude speaks for all. Both targets are in the same basis.
    """
    tokens = jnp.asarray([list(prompt)], jnp.int32)

    def outputs(target: Target) -> tuple[np.ndarray, np.ndarray]:
        cache = decoder.init_cache(target.config, 1, tokens.shape[1], target.dtype)
        return jax.device_get(_outputs(target.params, target.config, tokens, cache))

    (x, logits), (y, moved) = outputs(before), outputs(after)

    def relative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        size = np.maximum(np.sum(a * a, axis=-1), 1e-30)
        return np.sqrt(np.mean(np.sum((a - b) ** 2, axis=-1) / size, axis=0))

    centred = [z - z.mean(-1, keepdims=True) for z in (logits, moved)]
    return {
        "layers": [round(float(e), 6) for e in relative(x, y)],
        "logits": round(float(relative(*centred)), 6),
    }


def matrix_report(before: Target, after: Target) -> dict[str, Any]:
    """``matrices``: one object a kind of weight (``layers.*.gate``) with its scheme, number and bytes before
    and after; ``excluded``: kinds of matrices that stayed as they were, with their number."""
    old, excluded = packed_leaves(before.params), Counter[str]()
    kinds: dict[tuple[str, str], dict[str, int]] = {}
    for path, value in packed_leaves(after.params).items():
        name = re.sub(r"\.\d+\.", ".*.", path)
        inner = value
        while is_packed(inner) and not isinstance(inner, QuantArray):
            inner = inner.inner
        if not isinstance(inner, QuantArray):
            if len(value.shape) > 1:
                excluded[name] += 1
            continue
        row = kinds.setdefault(
            (name, label([kind_of(inner)])), {"count": 0, "bytes_before": 0, "bytes_after": 0}
        )
        row["count"] += 1
        row["bytes_before"] += sum(leaf.nbytes for leaf in jax.tree.leaves(old[path]))
        row["bytes_after"] += sum(leaf.nbytes for leaf in jax.tree.leaves(value))
    matrices = [{"weights": name, "scheme": scheme, **row} for (name, scheme), row in kinds.items()]
    return {"matrices": matrices, "excluded": dict(excluded)}
