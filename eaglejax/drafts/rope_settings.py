"""Rotary settings of a draft as config.json spells them."""

from __future__ import annotations

from typing import Any

from eaglejax.nn.rope import RopeConfig


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` (None for plain RoPE) as config.json spells them."""
    fields: dict[str, tuple[str, ...]] = {
        "default": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "yarn": (
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
    }
    out: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    if rope.kind != "default":
        scaling: dict[str, Any] = {"rope_type": rope.kind}
        scaling |= {name: value for name in fields[rope.kind] if (value := getattr(rope, name)) is not None}
        if rope.original_max_position:
            scaling["original_max_position_embeddings"] = rope.original_max_position
        out["rope_scaling"] = scaling
    if rope.rotary_fraction != 1.0:
        out["partial_rotary_factor"] = rope.rotary_fraction
    return out
