"""A target in words and numbers, from its configuration alone."""

from __future__ import annotations

from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.models import memory
from eaglejax.models.config import LayerSpec, ModelConfig
from eaglejax.nn.latent import LatentAttention
from eaglejax.nn.recurrent import GatedDelta

BFLOAT16 = 2
"""Bytes of a number in the dtype that weights are counted in."""


def attention_of(layer: LayerSpec) -> str:
    """How the tokens of a layer meet."""
    if isinstance(layer.mixer, LatentAttention):
        return "latent (MLA)" if layer.mixer.indexer is None else "latent in chosen slots (DSA)"
    if isinstance(layer.mixer, GatedDelta):
        return "gated delta rule"
    words = ["grouped-query"]
    words += ["in a window"] * (layer.window is not None) + ["in its chunk"] * (layer.chunk is not None)
    words += ["without RoPE"] * (not layer.rotary)
    return " ".join(words)


def feed_of(layer: LayerSpec) -> str:
    """A layer's feed-forward block."""
    moe = layer.moe
    if moe is None:
        return "dense"
    scores = {"softmax": "softmax", "of chosen": "softmax of the chosen", "sigmoid": "sigmoid"}[moe.scores]
    words = [f"experts by {scores}"]
    words += ["in groups"] * (moe.groups > 1) + ["with correction"] * moe.correction
    words += ["and a shared one"] * bool(moe.shared)
    return " ".join(words)


def else_of(config: ModelConfig) -> str:
    """What else tells a model from a plain Llama, "-" for nothing."""
    parts = {
        "q/k norm": config.qk_norm,
        "q/k norm without weights": config.qk_norm_bare,
        "temperature by position": config.temperature is not None,
        "sinks": config.attention_sinks,
        "gated attention": config.attention_gate,
        "softcaps": config.attention_softcap is not None or config.final_softcap is not None,
        "norms around parts": config.sandwich_norms and config.pre_norm,
        "norms behind parts only": not config.pre_norm,
        "multipliers": config.residual_scale is not None,
        "partial RoPE": config.rope.rotary_fraction < 1,
        "clamped gates": config.activation == "swiglu_clamped",
    }
    return ", ".join(name for name, there in parts.items() if there) or "-"


def support_of(config: ModelConfig) -> str:
    """Which of rotation and quantisation the model takes."""
    try:
        config.require_grouped("a rotation")
    except ConfigError:
        return "refused"
    return "norms behind parts: quantisation alone" if not config.pre_norm else "both"


def kinds_of(config: ModelConfig, of: Any) -> str:
    """``attention_of`` or ``feed_of`` of all layers, each kind once."""
    return ", ".join(dict.fromkeys(of(layer) for layer in config.layers or (LayerSpec(),)))


def described(config: ModelConfig) -> dict[str, Any]:
    """Plain values for a report: shape, kinds of layers, and bytes in bfloat16."""
    chosen = {layer.moe.top_k: layer.moe.experts for layer in config.layers if layer.moe is not None}
    return {
        "family": config.family,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "max_position": config.max_position,
        "attention": kinds_of(config, attention_of),
        "feed_forward": kinds_of(config, feed_of),
        "experts": [f"{top_k} of {experts}" for top_k, experts in chosen.items()],
        "else": else_of(config),
        "rotation_quantisation": support_of(config),
        "parameters": (count := memory.parameter_count(config)),
        "weight_bytes": BFLOAT16 * count,
        "cache_bytes_per_token": memory.cache_bytes_per_token(config, "bfloat16"),
        "cache_bytes_per_row": memory.cache_row_bytes(config, "bfloat16"),
    }
