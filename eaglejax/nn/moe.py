"""Mixture of experts without capacity limits: no token is dropped, so none depends on its batch mates."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax.errors import ConfigError
from eaglejax.nn.linear import grouped_linear, linear
from eaglejax.nn.mlp import activation


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """``experts`` E of width ``intermediate_size``, ``top_k`` of them a token.

    ``softmax_first``: weights are the softmax over all experts, of which the chosen are kept (Qwen);
    otherwise the softmax over the chosen logits alone (Mixtral). ``normalize``: the chosen weights are
    divided by their sum (has no effect on the second kind, whose weights sum to one already).
    """

    experts: int
    top_k: int
    intermediate_size: int
    softmax_first: bool
    normalize: bool

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise ConfigError(f"{self.top_k} experts a token of {self.experts}; give 1 to {self.experts}")


def route(logits: jax.Array, moe: MoeConfig) -> tuple[jax.Array, jax.Array]:
    """Router ``logits`` [T, E] f32 -> (weights [T, k] f32, experts [T, k] int32)."""
    if moe.softmax_first:
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), moe.top_k)
        if moe.normalize:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    else:
        picked, chosen = jax.lax.top_k(logits, moe.top_k)
        weights = jax.nn.softmax(picked, axis=-1)
    return weights, chosen


def router_logits(x: jax.Array, router: Any) -> jax.Array:
    """Router logits [..., E] f32 for ``x`` [..., H]; in f32 throughout where the router is."""
    if isinstance(router, jax.Array) and router.dtype == jnp.float32:
        x = x.astype(jnp.float32)
    return linear(x, router, dtype=jnp.float32)


def moe_mlp(x: jax.Array, params: dict[str, Any], moe: MoeConfig, act: str) -> jax.Array:
    """Weighted sum of the chosen experts' gated MLPs for ``x`` [..., H].

    ``params``: router [H, E] and experts {gate, up [E, H, F], down [E, F, H]}. Tokens are sorted by expert
    and each expert multiplies its own run of rows, however long.
    """
    rows = x.reshape(-1, x.shape[-1])
    weights, chosen = route(router_logits(rows, params["router"]), moe)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.zeros((moe.experts,), jnp.int32).at[chosen.reshape(-1)].add(1)
    experts = params["experts"]
    inner = jnp.take(rows, order // moe.top_k, axis=0)
    gate = grouped_linear(inner, experts["gate"], sizes)
    up = grouped_linear(inner, experts["up"], sizes)
    out = grouped_linear(activation(act)(gate) * up, experts["down"], sizes)
    # Back to token order by the inverse permutation: a gather, so that the sum's order is the router's own.
    out = jnp.take(out, jnp.argsort(order), axis=0).reshape(*chosen.shape, -1)
    mixed = jnp.sum(out.astype(jnp.float32) * weights[..., None], axis=1)
    return mixed.astype(x.dtype).reshape(x.shape)
