"""Families whose layers are grouped-query attention and one gated MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from eaglejax.models.config import LayerSpec
from eaglejax.models.config_reader import ConfigReader
from eaglejax.models.family import (
    Family,
    alternating,
    kinds_or,
    one_window,
    rotary_layers,
    sliding,
    window_from_layer,
)
from eaglejax.nn import rope as rope_lib
from eaglejax.nn.rope import RopeConfig


def _gemma3_layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    """Every so-manieth layer is full; the others slide, with rotary settings that context extension leaves
    alone."""

    def otherwise() -> tuple[bool, ...]:
        pattern = read.integer("_sliding_window_pattern", read.integer("sliding_window_pattern"))
        return tuple(bool((i + 1) % pattern) for i in range(count))

    flags = kinds_or(read, count, otherwise)
    return sliding(read, flags, rope=_local_rope(read, context))


def _local_rope(read: ConfigReader, context: int | None) -> RopeConfig:
    sections = read.config.get("rope_parameters")
    section = (sections.get("sliding_attention") if isinstance(sections, Mapping) else None) or {}
    return rope_lib.from_hf(
        {
            "rope_parameters": section,
            "rope_theta": read.config.get("rope_local_base_freq"),
            "max_position_embeddings": read.integer("max_position_embeddings"),
        },
        default_theta=read.defaults["rope_local_base_freq"],
        context=context,
    )


def _gemma3_fields(read: ConfigReader) -> dict[str, Any]:
    return {
        "qk_norm": True,
        "norm_offset": True,
        "sandwich_norms": True,
        "attention_softcap": read.number("attn_logit_softcapping"),
        "final_softcap": read.number("final_logit_softcapping"),
        "embed_scale": float(read.integer("hidden_size")) ** 0.5,
    }


_GEMMA = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2B = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def _granite_fields(read: ConfigReader) -> dict[str, Any]:
    residual, logits = read.number("residual_multiplier"), read.number("logits_scaling")
    return {
        "embed_scale": read.number("embedding_multiplier"),
        "query_scale": read.number("attention_multiplier"),
        "residual_scale": None if residual == 1 else residual,
        "logits_scaling": None if logits == 1 else logits,
    }


def _smollm3_layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    """Every so-manieth layer turns nothing by its position."""
    del context
    windows = window_from_layer(read, count, None) or (LayerSpec(),) * count
    return tuple(
        dataclasses.replace(w, rotary=r) for w, r in zip(windows, rotary_layers(read, count), strict=True)
    )


def _olmo3_layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    """Three layers of four slide, with rotary settings that context extension leaves alone."""
    flags = kinds_or(read, count, lambda: tuple(bool((i + 1) % 4) for i in range(count)))
    plain = {"rope_theta": read.get("rope_theta", 500_000.0)}
    sections = read.config.get("rope_parameters")
    if isinstance(sections, Mapping) and isinstance(sections.get("sliding_attention"), Mapping):
        plain = dict(sections["sliding_attention"])
    local = rope_lib.from_hf(
        {
            "rope_parameters": plain,
            "max_position_embeddings": read.integer("max_position_embeddings"),
        },
        context=context,
    )
    return sliding(read, flags, rope=local)


_OLMO = {"attention_bias": False, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0}


def _olmo_fields(read: ConfigReader) -> dict[str, Any]:
    return {"qk_norm": True, "qk_norm_whole": True, "sandwich_norms": True, "pre_norm": False}


HUNYUAN = Family(
    {"attention_bias": False, "rms_norm_eps": 1e-5},
    fields=lambda read: {"qk_norm": True, "qk_norm_last": True},
    fixed_rope=True,
)
"""Hunyuan: queries and keys are normalised behind RoPE."""

_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}

_QWEN2 = Family(
    {**_QWEN_WINDOW, "max_window_layers": 28},
    window_from_layer,
    # Its class has a bias on q, k and v whatever its config says, and none on o.
    lambda read: {"qkv_bias": True, "o_bias": False},
)

FAMILIES: dict[str, Family] = {
    "llama": Family({"attention_bias": False, "mlp_bias": False}),
    "mistral": Family({"sliding_window": 4096}, one_window),
    "qwen2": _QWEN2,
    "mimo": _QWEN2,
    "qwen3": Family(
        {**_QWEN_WINDOW, "max_window_layers": 28, "attention_bias": False, "head_dim": 128},
        window_from_layer,
        lambda read: {"qk_norm": True},
    ),
    "gemma2": Family(
        {
            **_GEMMA,
            **_GEMMA2B,
            "vocab_size": 256_000,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        alternating(2),
        lambda read: {**_gemma3_fields(read), "qk_norm": False},
        activation="hidden_activation",
    ),
    "gemma3_text": Family(
        {
            **_GEMMA,
            **_GEMMA2B,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        _gemma3_layers,
        _gemma3_fields,
        activation="hidden_activation",
        rope_section="full_attention",
    ),
    "phi3": Family({"sliding_window": None, "rms_norm_eps": 1e-5}, one_window),
    "smollm3": Family(
        {
            **_QWEN_WINDOW,
            "max_window_layers": 0,
            "sliding_window": None,
            "attention_bias": False,
            "mlp_bias": False,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        _smollm3_layers,
    ),
    "olmo2": Family(_OLMO, fields=_olmo_fields),
    "olmo3": Family(
        {**_OLMO, "sliding_window": 4096, "rope_theta": 500_000.0},
        _olmo3_layers,
        _olmo_fields,
        rope_section="full_attention",
    ),
    "granite": Family(
        {
            "attention_bias": False,
            "mlp_bias": False,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        fields=_granite_fields,
    ),
    "seed_oss": Family(
        {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "head_dim": 128},
        fields=lambda read: {"o_bias": read.flag("attention_out_bias")},
    ),
    "ernie4_5": Family(
        {
            "use_bias": False,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        },
        fields=lambda read: dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), read.flag("use_bias")),
    ),
    "hunyuan_v1_dense": HUNYUAN,
    "glm4": Family(
        {"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7},
        fields=lambda read: {"o_bias": False, "sandwich_norms": True},
    ),
}
"""By ``model_type``."""
