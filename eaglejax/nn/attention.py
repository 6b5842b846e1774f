"""Attention of new tokens over a committed prefix and over each other, by a visibility matrix."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from eaglejax.errors import ConfigError

MASKED = -1e30
"""Score of an unseen slot: finite, so that no difference of infinities arises."""


def visibility(
    lengths: jax.Array,
    visible: jax.Array,
    positions: jax.Array,
    capacity: int,
    *,
    slot_positions: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Which cache slots each query sees, [B, N, S] bool; arguments as in :func:`attend`.

    A window of W lets a query at position i see positions i-W+1 .. i.
    """
    slots = jnp.arange(capacity, dtype=jnp.int32)
    b, n, _ = visible.shape
    prefix = jnp.broadcast_to(slots[None, None, :] < lengths[:, None, None], (b, n, capacity))
    seen = _overlay(prefix, visible, lengths)
    if window is not None:
        at = _overlay(
            jnp.broadcast_to(slots, (b, capacity)), _slot_positions(positions, slot_positions), lengths
        )
        seen = seen & (positions[:, :, None] - at[:, None, :] < window)
    return seen


def _slot_positions(positions: jax.Array, slot_positions: jax.Array | None) -> jax.Array:
    return positions if slot_positions is None else slot_positions


def _overlay(base: jax.Array, new: jax.Array, lengths: jax.Array) -> jax.Array:
    """``base`` [B, ..., S] with ``new`` [B, ..., M] from slot ``lengths[b]`` on (a block copy a row)."""
    for b in range(base.shape[0]):
        start: list[int | jax.Array] = [b, *([0] * (base.ndim - 2)), lengths[b]]
        base = jax.lax.dynamic_update_slice(base, new[b : b + 1].astype(base.dtype), start)
    return base


def _attend_xla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    visible: jax.Array,
    positions: jax.Array,
    *,
    slot_positions: jax.Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    b, n, hq, d = q.shape
    hkv, capacity = k.shape[1], k.shape[2]
    group = hq // hkv
    seen = visibility(lengths, visible, positions, capacity, slot_positions=slot_positions, window=window)
    # Query heads of one K/V head become rows of one product, so K and V are read once and never repeated.
    rows = q.reshape(b, n, hkv, group, d).transpose(0, 2, 3, 1, 4).reshape(b, hkv, group * n, d)
    scores = (
        jnp.einsum("bhrd,bhsd->bhrs", rows.astype(k.dtype), k, preferred_element_type=jnp.float32) * scale
    )
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = scores.reshape(b, hkv, group, n, capacity)
    seen = seen[:, None, None]
    scores = jnp.where(seen, scores, MASKED)
    top = jnp.max(scores, axis=-1, keepdims=True)
    # The barrier keeps XLA from computing the exponentials twice, for the sum and for the product. Both read
    # the same rounded weights, so that these sum to one.
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0).astype(v.dtype)
    weights = jax.lax.optimization_barrier(weights)
    total = jnp.sum(weights, axis=-1, keepdims=True, dtype=jnp.float32)
    # Zero times a stale NaN is NaN: what lies behind the written slots must not reach the product.
    written = jnp.arange(capacity)[None, :] < (lengths + visible.shape[2])[:, None]
    v = jnp.where(written[:, None, :, None], v, jnp.zeros((), v.dtype))
    flat = weights.reshape(b, hkv, group * n, capacity)
    out = jnp.einsum("bhrs,bhsd->bhrd", flat, v, preferred_element_type=jnp.float32)
    out = out.reshape(b, hkv, group, n, d) / jnp.maximum(total, 1e-30)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, n, hq, d).astype(q.dtype)


IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {"xla": _attend_xla}
"""Attention kernels by name; each has the signature of :func:`attend` without ``implementation``."""


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    visible: jax.Array,
    positions: jax.Array,
    *,
    slot_positions: jax.Array | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """Attend with ``q`` [B, N, Hq, d] over ``k``, ``v`` [B, Hkv, S, d]; result [B, N, Hq, d] in q's dtype.

    Keys and values of the new tokens already sit in the cache. Slots [0, lengths[b]) are the prefix: their
    position is their slot and every query sees them (window permitting). Slots lengths[b] .. lengths[b]+M-1
    are new; ``visible`` [B, N, M] bool says who sees whom and ``slot_positions`` [B, M] where they stand
    (default: ``positions`` [B, N], for M == N). What later slots hold has no influence; ``lengths + M <=
    S`` is the caller's duty. Every query should see itself; one that sees nothing yields zeros. Hq must be
    a multiple of Hkv (grouped-query attention, Ainslie et al. 2023). Softmax in f32. ``softcap`` c replaces
    a score s by ``c tanh(s / c)`` before masking.
    """
    if q.shape[2] % k.shape[1]:
        raise ConfigError(f"{q.shape[2]} query heads are not a multiple of {k.shape[1]} key/value heads")
    if slot_positions is None and visible.shape[2] != positions.shape[1]:
        raise ConfigError(
            f"visible has {visible.shape[2]} new slots for {positions.shape[1]} queries; give slot_positions"
        )
    if visible.shape[2] > k.shape[2]:
        raise ConfigError(f"{visible.shape[2]} new slots do not fit a cache of {k.shape[2]} slots")
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(f"attention {implementation!r} is not known; use one of {sorted(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[implementation](
        q,
        k,
        v,
        lengths,
        visible,
        positions,
        slot_positions=slot_positions,
        scale=scale,
        window=window,
        softcap=softcap,
    )
