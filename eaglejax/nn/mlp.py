"""Gated feed-forward block (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax.errors import ConfigError
from eaglejax.nn.linear import linear

_CLAMP, _SHARPNESS = 7.0, 1.702
"""Of the clamped SwiGLU (gpt-oss)."""

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "swiglu_clamped": lambda x: (y := jnp.minimum(x, _CLAMP)) * jax.nn.sigmoid(_SHARPNESS * y),
}
"""Activations by name; a config's spelling is translated where it is read."""


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """The activation called ``name``; raises ConfigError with the known names otherwise."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not known; use one of {sorted(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def gated(gate: jax.Array, up: jax.Array, act: str) -> jax.Array:
    """``act(gate) * up`` of one shape; "swiglu_clamped" bounds ``up`` too, and adds one to it."""
    if act == "swiglu_clamped":
        up = jnp.clip(up, -_CLAMP, _CLAMP) + 1
    return activation(act)(gate) * up


def gated_mlp(x: jax.Array, params: dict[str, Any], act: str) -> jax.Array:
    """``down(act(gate(x)) * up(x))`` for ``x`` [..., H].

    ``params``: gate, up [H, F], down [F, H], and gate_bias, up_bias, down_bias where the model has them.
    """
    gate = linear(x, params["gate"], params.get("gate_bias"))
    up = linear(x, params["up"], params.get("up_bias"))
    return linear(gated(gate, up, act), params["down"], params.get("down_bias"))
