"""Families whose layers alternate between attention and a recurrent state: Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.models.config import LayerSpec
from eaglejax.models.config_reader import ConfigReader
from eaglejax.models.family import Family, every_so_many, with_mixture
from eaglejax.models.mixtures import qwen_mixture
from eaglejax.nn.recurrent import GatedDelta


def _kinds(read: ConfigReader, count: int) -> tuple[LayerSpec, ...]:
    """Every so-manieth layer attends, the others keep a state."""
    types = read.kinds(count)
    if types is None:
        every = read.integer("full_attention_interval")
        types = tuple("linear_attention" if (i + 1) % every else "full_attention" for i in range(count))
    unknown = set(types) - {"full_attention", "linear_attention"}
    if unknown:
        raise ConfigError(
            f"layer_types holds {sorted(unknown)}; known are full_attention and linear_attention"
        )
    state = LayerSpec(
        mixer=GatedDelta(
            key_heads=read.integer("linear_num_key_heads"),
            heads=read.integer("linear_num_value_heads"),
            key_dim=read.integer("linear_key_head_dim"),
            value_dim=read.integer("linear_value_head_dim"),
            kernel=read.integer("linear_conv_kernel_dim"),
        )
    )
    return tuple(state if kind == "linear_attention" else LayerSpec() for kind in types)


def _dense_layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    del context
    return _kinds(read, count)


def _next_layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    del context
    return with_mixture(_kinds(read, count), qwen_mixture(read), every_so_many(read, count))


def _moe_layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    del context
    return with_mixture(_kinds(read, count), qwen_mixture(read), (True,) * count)


def _fields(read: ConfigReader) -> dict[str, Any]:
    if not read.flag("attn_output_gate", True):
        raise ConfigError(f"attn_output_gate is false; {read.family} models gate what attention yields")
    return {"qk_norm": True, "norm_offset": True, "attention_gate": True}


_HYBRID = {
    "attention_bias": False,
    "attn_output_gate": True,
    "partial_rotary_factor": 0.25,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MIXTURE = {"shared_expert_intermediate_size": 512, "norm_topk_prob": True}

FAMILIES: dict[str, Family] = {
    "qwen3_next": Family(
        {**_HYBRID, **_MIXTURE, "decoder_sparse_step": 1, "mlp_only_layers": None},
        _next_layers,
        _fields,
    ),
    "qwen3_5_text": Family(_HYBRID, _dense_layers, _fields),
    "qwen3_5_moe_text": Family({**_HYBRID, **_MIXTURE}, _moe_layers, _fields),
}
"""By ``model_type``."""
