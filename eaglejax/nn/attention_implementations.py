"""The implementations of attention: XLA's own, the Pallas kernels', and the C++ kernel's of a CPU.

Each takes the arguments of ``nn.attention.attend``, which says what they mean and chooses among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax.errors import ConfigError
from eaglejax.nn import kv_codec
from eaglejax.nn.kv_codec import PackedKV, Stored
from kernels_pallas import cache_attention
from kernels_pallas.foreign import portable_call

MASKED = -1e30
"""Score of an unseen slot: finite, so that no difference of infinities arises."""

MOST_ROWS = 1024
"""Queries x query heads of a key/value head in one kernel call: 2048 overflow the VMEM of v4, v5e and v5p."""


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


def _scale(stored: Stored) -> jax.Array | None:
    """Scale of each token and head [B, Hkv, S] f32, where there are such."""
    return stored.scale if isinstance(stored, PackedKV) else None


def _attend_xla(
    q: jax.Array,
    k: Stored,
    v: Stored,
    lengths: jax.Array,
    visible: jax.Array,
    positions: jax.Array,
    *,
    slot_positions: jax.Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    out_dtype: Any,
) -> jax.Array:
    k_scale, v_scale = _scale(k), _scale(v)
    k, v = (kv_codec.expand(x, q.dtype) if isinstance(x, PackedKV) else x for x in (k, v))
    b, n, hq, d = q.shape
    hkv, capacity = k.shape[1], k.shape[2]
    group = hq // hkv
    seen = visibility(lengths, visible, positions, capacity, slot_positions=slot_positions, window=window)
    # Query heads of one K/V head become rows of one product, so K and V are read once and never repeated.
    rows = q.reshape(b, n, hkv, group, d).transpose(0, 2, 3, 1, 4).reshape(b, hkv, group * n, d)
    scores = (
        jnp.einsum("bhrd,bhsd->bhrs", rows.astype(k.dtype), k, preferred_element_type=jnp.float32) * scale
    )
    if k_scale is not None:
        scores = scores * k_scale[:, :, None]
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
    if v_scale is not None:
        flat = (flat * jnp.where(written[:, None], v_scale, 0)[:, :, None]).astype(v.dtype)
    out = jnp.einsum("bhrs,bhsd->bhrd", flat, v, preferred_element_type=jnp.float32)
    out = out.reshape(b, hkv, group, n, d) / jnp.maximum(total, 1e-30)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, n, hq, d).astype(out_dtype)


def _attend_pallas(
    q: jax.Array,
    k: Stored,
    v: Stored,
    lengths: jax.Array,
    visible: jax.Array,
    positions: jax.Array,
    *,
    slot_positions: jax.Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    out_dtype: Any,
    kernel: str,
    interpret: bool | None,
    block_kv: int | None,
) -> jax.Array:
    # Importing Pallas takes a third of a second, which those who do not use it are spared.
    from kernels_pallas import KernelError
    from kernels_pallas.tree_attention import merge, pack_ancestors, tree_attention

    n, m = visible.shape[1:]
    scales: dict[str, Any] = _kernel_scales(k, v)
    k, v = _array(k), _array(v)
    if k.dtype.itemsize > 1:
        q = q.astype(k.dtype)
    whole = q
    if m > n:
        # The kernel has a query for every new slot: those that were written earlier ask for nothing and see
        # themselves, and their results are dropped.
        earlier = jnp.eye(m, dtype=bool)[: m - n]
        visible = jnp.concatenate([jnp.broadcast_to(earlier, (q.shape[0], *earlier.shape)), visible], axis=1)
        whole = jnp.pad(q, ((0, 0), (m - n, 0), (0, 0), (0, 0)))
    new_positions = _slot_positions(positions, slot_positions)
    words = pack_ancestors(visible)
    part = queries_a_call(q, k)
    shared: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    call: dict[str, Any] = {"block_kv": block_kv, "implementation": kernel, "interpret": interpret}
    call |= shared | scales
    try:
        if m <= part:
            out, _ = tree_attention(
                whole, k, v, words, lengths, positions=new_positions, out_dtype=out_dtype, **call
            )
            return out[:, m - n :]
        # A prompt chunk: the kernel attends to the prefix, part by part, and XLA among the new tokens.
        prefix = [
            tree_attention(
                q[:, i : i + part],
                k,
                v,
                None,
                lengths,
                positions=positions[:, i : i + part],
                out_dtype=jnp.float32,
                **call,
            )
            for i in range(0, n, part)
        ]
        new_scales: dict[str, Any] = {name: _new_slots(x, lengths, m) for name, x in scales.items()}
        among, among_lse = tree_attention(
            whole,
            _new_slots(k, lengths, m),
            _new_slots(v, lengths, m),
            words,
            jnp.zeros_like(lengths),
            positions=new_positions,
            out_dtype=jnp.float32,
            implementation="xla",
            **shared,
            **new_scales,
        )
    except KernelError as error:
        raise ConfigError(str(error)) from error
    outs, lses = (jnp.concatenate(x, axis=1) for x in zip(*prefix, strict=True))
    out, _ = merge(jnp.stack([outs, among[:, m - n :]]), jnp.stack([lses, among_lse[:, m - n :]]))
    return out.astype(out_dtype)


def _attend_native(
    q: jax.Array,
    k: Stored,
    v: Stored,
    lengths: jax.Array,
    visible: jax.Array,
    positions: jax.Array,
    *,
    slot_positions: jax.Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    out_dtype: Any,
) -> jax.Array:
    shared: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "out_dtype": out_dtype}

    def xla(q, k, v, lengths, visible, positions, places):
        return _attend_xla(q, k, v, lengths, visible, positions, slot_positions=places, **shared)

    def native(q, k, v, lengths, visible, positions, places):
        scales = _scale(k), _scale(v)
        return cache_attention.cache_attention(
            q, _array(k), _array(v), lengths, visible, positions, places, *scales, **shared
        )

    # What is traced here may be compiled for a device that is not.
    return portable_call(
        native, xla, q, k, v, lengths, visible, positions, _slot_positions(positions, slot_positions)
    )


def _array(stored: Stored) -> jax.Array:
    """The stored array itself, which a kernel reads."""
    return stored.codes if isinstance(stored, PackedKV) else stored


def _kernel_scales(k: Stored, v: Stored) -> dict[str, jax.Array]:
    """The kernel's scales of each slot; ones where a format has none, as the kernel wants them for int8."""
    return {
        name: jnp.ones(x.shape[:3], jnp.float32) if x.scale is None else x.scale
        for name, x in (("k_scale", k), ("v_scale", v))
        if isinstance(x, PackedKV)
    }


def _new_slots(cached: jax.Array, lengths: jax.Array, count: int) -> jax.Array:
    """The ``count`` slots behind each row's prefix, [B, Hkv, count, ...]."""
    heads, rest = cached.shape[1], cached.shape[3:]
    rows = [
        jax.lax.dynamic_slice(cached, (b, 0, lengths[b], *[0] * len(rest)), (1, heads, count, *rest))
        for b in range(cached.shape[0])
    ]
    return jnp.concatenate(rows)


def queries_a_call(q: jax.Array, k: Stored) -> int:
    """Most queries that one kernel call takes."""
    return max(1, MOST_ROWS // (q.shape[2] // k.shape[1]))


def pallas_refusal(kernel: str, block_kv: int | None, q: jax.Array, k: Stored, slots: int) -> str | None:
    """Why the kernel does not take these arguments for ``slots`` new slots, or None."""
    from kernels_pallas.tree_attention import gpu, tpu

    if isinstance(k, PackedKV) and not k.format.kernel:
        return f"reads arrays of numbers, not the packed codes of a {k.format.name} cache"
    asked = jax.ShapeDtypeStruct(
        (q.shape[0], min(slots, queries_a_call(q, k)), *q.shape[2:]),
        k.dtype if k.dtype.itemsize > 1 else q.dtype,
    )
    return {"tpu": tpu, "gpu": gpu}[kernel].refusal(asked, _array(k), None, block_kv)


def native_refusal(q: jax.Array, k: Stored) -> str | None:
    """Why the C++ kernel does not take these arguments, or None."""
    if isinstance(k, PackedKV) and not k.format.kernel:
        return f"reads arrays of numbers, not the packed codes of a {k.format.name} cache"
    return cache_attention.refusal(q, _array(k))


IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "xla": _attend_xla,
    "pallas": _attend_pallas,
    "native": _attend_native,
}
"""Attention by name. Each takes the arguments of :func:`attend`; the Pallas kernels also which, how and in
what blocks."""
