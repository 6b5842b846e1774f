"""Attention as XLA computes it: the definition, which takes every cache, every ``Visible`` and every size."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from eaglejax.nn import kv_codec
from eaglejax.nn.kv_codec import PackedKV, Stored
from eaglejax.nn.visible import Selected, Visible

MASKED = -1e30
"""Score of an unseen slot: finite, so that no difference of infinities arises."""


def visibility(
    lengths: jax.Array,
    visible: Visible,
    positions: jax.Array,
    slots: jax.Array,
    *,
    slot_positions: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Which of the row's ``slots`` [B, S] int32 each query sees, [B, N, S] bool; arguments as in ``attend``.

    A window of W lets a query at position i see positions i-W+1 .. i.
    """
    seen = visible.sees(positions.shape[1], slots, lengths)
    if window is None:
        return seen
    at = _position(slots, lengths, default_positions(positions, slot_positions))
    return seen & (positions[:, :, None] - at[:, None, :] < window)


def _position(slots: jax.Array, lengths: jax.Array, slot_positions: jax.Array) -> jax.Array:
    """Positions [B, S] of ``slots`` [B, S]: their number in the prefix, else ``slot_positions`` [B, M]."""
    node = slots - lengths[:, None]
    last = slot_positions.shape[1] - 1
    new = jnp.take_along_axis(slot_positions, jnp.clip(node, 0, last), axis=1, mode="promise_in_bounds")
    return jnp.where(node < 0, slots, new)


def default_positions(positions: jax.Array, slot_positions: jax.Array | None) -> jax.Array:
    return positions if slot_positions is None else slot_positions


def scale_of(stored: Stored) -> jax.Array | None:
    """Scale of each token and head [B, Hkv, S] f32, where there are such."""
    return stored.scale if isinstance(stored, PackedKV) else None


def attend_xla(
    q: jax.Array,
    k: Stored,
    v: Stored,
    lengths: jax.Array,
    visible: Visible,
    positions: jax.Array,
    *,
    slot_positions: jax.Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    slot_offset: jax.Array | int,
    block_tables: jax.Array | None,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    b, n = q.shape[:2]
    if block_tables is None and isinstance(slot_offset, int) and slot_offset == 0:
        # A length that leaves no room for the new slots is cut, as writes are.
        lengths = jnp.clip(lengths, 0, k.shape[2] - visible.slots(n))
    if block_tables is not None:
        k, v = (kv_codec.each(lambda x: _lay_out(x, block_tables), side) for side in (k, v))
    offset = jnp.broadcast_to(jnp.asarray(slot_offset, jnp.int32), (b,))[:, None]
    slots = offset + jnp.arange(k.shape[2], dtype=jnp.int32)
    if isinstance(visible, Selected):
        return _attend_selected(
            q,
            k,
            v,
            visible.chosen - offset[:, :, None],
            _window_floor(visible, lengths, positions, slot_positions, window),
            scale=scale,
            softcap=softcap,
            out_dtype=out_dtype,
        )
    seen = visibility(lengths, visible, positions, slots, slot_positions=slot_positions, window=window)
    # Zero times a stale NaN is NaN: what lies behind the written slots must not reach the product.
    written = slots < (lengths + visible.slots(n))[:, None]
    k_scale, v_scale = scale_of(k), scale_of(v)
    k, v = (kv_codec.expand(x, q.dtype) if isinstance(x, PackedKV) else x for x in (k, v))
    hq, d = q.shape[2:]
    hkv, capacity = k.shape[1], k.shape[2]
    group = hq // hkv
    # Query heads of one K/V head become rows of one product, so K and V are read once and never repeated.
    rows = q.reshape(b, n, hkv, group, d).transpose(0, 2, 3, 1, 4).reshape(b, hkv, group * n, d)
    scores = (
        jnp.einsum("bhrd,bhsd->bhrs", rows.astype(k.dtype), k, preferred_element_type=jnp.float32) * scale
    )
    if k_scale is not None:
        scores = scores * k_scale[:, :, None]
    scores = scores.reshape(b, hkv, group, n, capacity)
    weights, total, lse = _weigh(scores, seen[:, None, None], softcap, v.dtype)
    v = jnp.where(written[:, None, :, None], v, jnp.zeros((), v.dtype))
    flat = weights.reshape(b, hkv, group * n, capacity)
    if v_scale is not None:
        flat = (flat * jnp.where(written[:, None], v_scale, 0)[:, :, None]).astype(v.dtype)
    out = jnp.einsum("bhrs,bhsd->bhrd", flat, v, preferred_element_type=jnp.float32)
    out = out.reshape(b, hkv, group, n, v.shape[3]) / total
    out = out.transpose(0, 3, 1, 2, 4).reshape(b, n, hq, v.shape[3]).astype(out_dtype)
    return out, lse.transpose(0, 3, 1, 2).reshape(b, n, hq)


def _weigh(
    scores: jax.Array, seen: jax.Array, softcap: float | None, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Softmax weights [..., S] in ``dtype``, not yet divided by their sum [..., 1] f32, and the log-sum-exp
    [...] of ``scores`` [..., S] f32 where ``seen``."""
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen, scores, MASKED)
    top = jnp.max(scores, axis=-1, keepdims=True)
    # The barrier keeps XLA from computing the exponentials twice, for the sum and for the product. Both read
    # the same rounded weights, so that these sum to one.
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0).astype(dtype)
    weights = jax.lax.optimization_barrier(weights)
    total = jnp.sum(weights, axis=-1, keepdims=True, dtype=jnp.float32)
    return weights, jnp.maximum(total, 1e-30), (top + jnp.log(total))[..., 0]


def _lay_out(pages: jax.Array, block_tables: jax.Array) -> jax.Array:
    """``pages`` [P, H, block, ...] of the rows' ``block_tables`` [B, nblocks] as [B, H, nblocks * block,
    ...].

    Entries of blocks not in use may hold anything.
    """
    rows = jnp.swapaxes(pages[jnp.clip(block_tables, 0, pages.shape[0] - 1)], 1, 2)
    return rows.reshape(*rows.shape[:2], -1, *rows.shape[4:])


def _window_floor(
    visible: Selected,
    lengths: jax.Array,
    positions: jax.Array,
    slot_positions: jax.Array | None,
    window: int | None,
) -> jax.Array:
    """Which of the chosen slots are within the window, [B, N, K] bool."""
    chosen = visible.chosen
    if window is None:
        return jnp.ones(chosen.shape, bool)
    at = _position(chosen.reshape(chosen.shape[0], -1), lengths, default_positions(positions, slot_positions))
    return positions[:, :, None] - at.reshape(chosen.shape) < window


def _attend_selected(
    q: jax.Array,
    k: Stored,
    v: Stored,
    chosen: jax.Array,
    inside: jax.Array,
    *,
    scale: float,
    softcap: float | None,
    out_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attention of each query to its own slots ``chosen`` [B, N, K] of the arrays, where they are ``inside``.

    Only those are read: the cost is that of N * K slots, whatever the cache's size.
    """
    b, n, hq, d = q.shape
    hkv, capacity, count = k.shape[1], k.shape[2], chosen.shape[2]
    seen = (inside & (chosen >= 0) & (chosen < capacity))[:, None, :, None]
    at = jnp.clip(chosen, 0, capacity - 1).reshape(b, n * count)

    def gather(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda row, ids: jnp.take(row, ids, axis=1, mode="clip"))(x, at)

    k, v = kv_codec.each(gather, k), kv_codec.each(gather, v)
    scales = [None if x is None else x.reshape(b, hkv, n, 1, count) for x in (scale_of(k), scale_of(v))]
    k, v = (kv_codec.expand(x, q.dtype) if isinstance(x, PackedKV) else x for x in (k, v))
    k, v = (x.reshape(b, hkv, n, count, x.shape[3]) for x in (k, v))
    rows = q.reshape(b, n, hkv, hq // hkv, d).transpose(0, 2, 1, 3, 4).astype(k.dtype)
    scores = jnp.einsum("bhngd,bhnkd->bhngk", rows, k, preferred_element_type=jnp.float32) * scale
    if scales[0] is not None:
        scores = scores * scales[0]
    weights, total, lse = _weigh(scores, seen, softcap, v.dtype)
    if scales[1] is not None:
        weights = (weights * jnp.where(seen, scales[1], 0)).astype(v.dtype)
    v = jnp.where(seen.swapaxes(3, 4), v, jnp.zeros((), v.dtype))
    out = jnp.einsum("bhngk,bhnkd->bhngd", weights, v, preferred_element_type=jnp.float32) / total
    out = out.transpose(0, 2, 1, 3, 4).reshape(b, n, hq, v.shape[4]).astype(out_dtype)
    return out, lse.transpose(0, 2, 1, 3).reshape(b, n, hq)
