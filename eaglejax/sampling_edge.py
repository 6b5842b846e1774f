"""Sums over a vocabulary, and the edge at which a filter cuts a distribution: what ``sampling`` computes
distributions with."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

LANES = 128
"""Width of the blocks in which a vocabulary is summed, lest 1e5 small terms get lost beside a large one."""


def blocks_of(x: jax.Array, fill: float) -> jax.Array:
    """[..., V] -> [..., V / LANES, LANES], the last block filled up; a smaller V is one block."""
    lanes = min(LANES, x.shape[-1])
    short = -x.shape[-1] % lanes
    if short:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)], constant_values=fill)
    return x.reshape(*x.shape[:-1], -1, lanes)


def mass(weights: jax.Array) -> jax.Array:
    """Sum over the last axis, in blocks: adding 1e5 small terms to one large f32 would lose them."""
    return jnp.sum(jnp.sum(blocks_of(weights, 0.0), axis=-2), axis=-1)


def edge_of(
    logits: jax.Array,
    weight: Callable[[jax.Array], jax.Array],
    budget: jax.Array,
    floor: jax.Array,
    on: jax.Array,
    ranked: jax.Array | None,
) -> jax.Array:
    """Smallest logit z >= ``floor`` [...] such that the logits above z weigh less than ``budget`` [...].

    Distributions not ``on`` [...] keep their floor. ``ranked`` [..., K]: the largest logits in falling
    order, where most distributions end; the others are searched by bisection over the bit patterns of f32,
    which sort like integers. Either is exact and finds the same, however many logits tie; nothing of size V
    is sorted.
    """
    peak = jnp.max(logits, axis=-1)
    if ranked is None:
        start, open_ = peak, on
    else:
        own = weight(ranked)
        kept = jnp.cumsum(own, axis=-1) - own < budget[..., None]
        start = jnp.min(jnp.where(kept, ranked, jnp.inf), axis=-1)
        open_ = on & kept[..., -1]
    weights = weight(logits)

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = state
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        above = logits > _from_sort_key(middle)[..., None]
        enough = mass(jnp.where(above, weights, 0.0)) >= budget
        # A distribution that has been settled waits for the others.
        apart = high > low + 1
        return jnp.where(apart & enough, middle, low), jnp.where(apart & ~enough, middle, high)

    def unsettled(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(open_ & (state[1] > state[0] + 1))

    # Everything up to ``low`` is dropped, ``high`` and what is above it kept.
    _, high = jax.lax.while_loop(unsettled, step, (_sort_key(floor) - 1, _sort_key(start)))
    edge = jnp.where(open_, _from_sort_key(high), start)
    return jnp.where(on, jnp.maximum(edge, floor), floor)


def _sort_key(x: jax.Array) -> jax.Array:
    """int32 that sorts as f32 does (-0 as 0); undone by :func:`_from_sort_key`."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _from_sort_key(key: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(jnp.where(key < 0, key ^ jnp.int32(0x7FFFFFFF), key), jnp.float32)
