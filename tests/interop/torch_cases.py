"""Tiny targets and drafts of every kind that the torch side follows, with random weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import pytree
from eaglejax.drafts.base import Bound
from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.load import bind
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.models import decoder
from eaglejax.models.config import LayerSpec, ModelConfig
from eaglejax.models.target import Target
from eaglejax.nn.moe import MoeConfig
from eaglejax.nn.rope import RopeConfig

LLAMA = ModelConfig(
    family="llama",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    rope=RopeConfig(),
    query_scale=8**-0.5,
)
LLAMA3_ROPE = RopeConfig("llama3", 500.0, 64, factor=4.0, original_max_position=16)
YARN = RopeConfig("yarn", 100.0, 64, factor=4.0, original_max_position=16)
LONG = RopeConfig(
    "longrope", 100.0, 64, original_max_position=16, short_factor=(1.0,) * 4, long_factor=(1.0, 2.0, 3.0, 4.0)
)

CONFIGS: dict[str, ModelConfig] = {
    name: dataclasses.replace(LLAMA, **changes)
    for name, changes in {
        "llama3": {"rope": LLAMA3_ROPE, "tie_embeddings": True},
        "llama_biased": {
            "qkv_bias": True,
            "o_bias": True,
            "mlp_bias": True,
            "rope": dataclasses.replace(YARN, rotary_fraction=0.5),
            "layers": (LayerSpec(), LayerSpec(window=5)),
        },
        "mistral": {"layers": (LayerSpec(window=5),) * 2, "rope": LONG},
        "mixtral": {"layers": (LayerSpec(moe=MoeConfig(4, 2, 20, scores="of chosen", normalize=False)),) * 2},
        "qwen2": {"qkv_bias": True, "layers": (LayerSpec(), LayerSpec(window=5))},
        "qwen3": {"qk_norm": True, "rope": RopeConfig("dynamic", max_position=32, context=64, factor=2.0)},
        "qwen3_moe": {
            "qk_norm": True,
            "layers": (LayerSpec(), LayerSpec(moe=MoeConfig(5, 3, 20, scores="softmax", normalize=True))),
        },
        "gemma3": {
            "qk_norm": True,
            "norm_offset": True,
            "sandwich_norms": True,
            "activation": "gelu_tanh",
            "layers": (LayerSpec(window=5, rope=RopeConfig()), LayerSpec()),
            "rope": RopeConfig("linear", 1e6, factor=8.0),
            "embed_scale": 4.0,
            "attention_softcap": 3.0,
            "final_softcap": 4.0,
            "tie_embeddings": True,
        },
        "yarn": {"rope": YARN, "activation": "gelu"},
        "rotated": {"qk_rotation": True, "post_rotation": True, "sandwich_norms": True},
    }.items()
}


def randomize(table: Any, seed: int, scale: float) -> Any:
    """Weights far from zero, norms around one (around zero for those stored as an offset)."""
    leaves, tree = jax.tree.flatten(table, is_leaf=pytree.is_info)
    rng = np.random.default_rng(seed)

    def one(info: pytree.ArrayInfo) -> jax.Array:
        if len(info.shape) == 1:
            around = np.asarray(info.init(None, info.shape, np.float32))
            return jnp.asarray(around + rng.normal(0, 0.2, info.shape), info.dtype)
        return jnp.asarray(rng.normal(0, scale * info.shape[-2] ** -0.5, info.shape), info.dtype)

    return jax.tree.unflatten(tree, [one(x) for x in leaves])


def target(config: ModelConfig = LLAMA, seed: int = 0, scale: float = 2.0, dtype: Any = "float32") -> Target:
    params = randomize(decoder.param_table(config, jnp.dtype(dtype)), seed, scale)
    return Target(config=config, params=params, dtype=np.dtype(jnp.dtype(dtype)), context=config.max_position)


def draft_config(of: ModelConfig, version: int, **changes: Any) -> EagleConfig:
    third: dict[str, Any] = {"num_aux": 3, "aux": (0, 1, 2), "head_norm": True, "own_head": True}
    config = EagleConfig(
        version=version,
        vocab_size=of.vocab_size,
        draft_vocab_size=of.vocab_size,
        hidden_size=of.hidden_size,
        target_hidden_size=of.hidden_size,
        intermediate_size=20,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        **(third if version == 3 else {}),
    )
    return dataclasses.replace(config, **changes)


def draft(
    of: Target, tree: Any, config: EagleConfig, seed: int = 1, scale: float = 2.0, **settings: Any
) -> Bound:
    """A bound random draft; a reduced vocabulary takes every other token."""
    weights = randomize(eagle_model.param_table(config), seed, scale)
    ids = np.arange(config.vocab_size)[::2][: config.draft_vocab_size] if config.reduced else None
    return Bound(Eagle(config, tree, **settings), bind(config, weights, of, ids))
