"""Attention of new tokens over a committed prefix and over each other, by a visibility matrix.

Keys and values of new tokens are read from the cache like those of old ones. So a token in a narrow cache is
seen by the tree it was verified in exactly as by all that comes after it, and nothing depends on how many
tokens a forward takes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import devices
from eaglejax.devices import Attention
from eaglejax.devices import adapter as adapters
from eaglejax.errors import ConfigError
from eaglejax.nn import cache as kv
from eaglejax.nn import kv_codec
from eaglejax.nn.kv_codec import PackedKV, Stored

log = logging.getLogger(__name__)

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
    part = _queries_a_call(q, k)
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


def _queries_a_call(q: jax.Array, k: Stored) -> int:
    """Most queries that one kernel call takes."""
    return max(1, MOST_ROWS // (q.shape[2] // k.shape[1]))


def _refusal(kernel: str, block_kv: int | None, q: jax.Array, k: Stored, slots: int) -> str | None:
    """Why the kernel does not take these arguments for ``slots`` new slots, or None."""
    from kernels_pallas.tree_attention import gpu, tpu

    if isinstance(k, PackedKV) and not k.format.kernel:
        return f"reads arrays of numbers, not the packed codes of a {k.format.name} cache"
    asked = jax.ShapeDtypeStruct(
        (q.shape[0], min(slots, _queries_a_call(q, k)), *q.shape[2:]),
        k.dtype if k.dtype.itemsize > 1 else q.dtype,
    )
    return {"tpu": tpu, "gpu": gpu}[kernel].refusal(asked, _array(k), None, block_kv)


@functools.cache
def _report(adapter: str, shape: str, refusal: str) -> None:
    log.warning("%s: attention of %s runs on XLA: the kernel %s", adapter, shape, refusal)


def _kernel_options(
    requested: Attention | None, q: jax.Array, k: Stored, slots: int
) -> dict[str, Any] | None:
    """Kernel, interpretation and block size, or None for XLA. Raises ConfigError."""
    adapter = None
    choice = requested
    if choice is None:
        adapter = devices.current()
        choice = adapter.attention
    if choice.implementation == "xla":
        return None
    adapter = adapter or devices.current()
    kernel = adapters.resolve_kernel(adapter, choice)
    if requested is not None and requested.interpret is not False:
        adapters.check_runs(adapter, requested)
    rows = min(slots, _queries_a_call(q, k)) * (q.shape[2] // k.shape[1])
    block = choice.block_kv
    if block is None and kernel == "tpu":
        block = adapter.block_kv(head_dim=q.shape[3], dtype=k.dtype.name, rows=rows)
    refusal = _refusal(kernel, block, q, k, slots)
    if refusal is None:
        return {"kernel": kernel, "interpret": choice.interpret, "block_kv": block}
    shape = (
        f"{slots} new tokens x {q.shape[2]} query heads of {q.shape[3]} over {k.shape[2]} slots of {k.dtype}"
    )
    if requested is not None or adapter.forced:
        raise ConfigError(
            f"attention of {shape} was to use the {kernel!r} kernel, which {refusal}; change "
            "that, or use attention 'xla', which takes everything"
        )
    _report(adapter.name, shape, refusal)
    return None


IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {"xla": _attend_xla, "pallas": _attend_pallas}
"""Attention by name. Each takes the arguments of :func:`attend`; the kernels also which, how and in what
blocks."""


def attend(
    q: jax.Array,
    k: Stored,
    v: Stored,
    lengths: jax.Array,
    visible: jax.Array,
    positions: jax.Array,
    *,
    slot_positions: jax.Array | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    implementation: Attention | str | None = None,
) -> jax.Array:
    """Attend with ``q`` [B, N, Hq, d] over ``k``, ``v`` [B, Hkv, S, d]; result [B, N, Hq, d] in q's dtype.

    Keys and values are arrays or ``PackedKV``; those of the new tokens already sit in the cache. Slots [0,
    lengths[b]) are the prefix: their position is their slot and every query sees them (window permitting).
    Slots lengths[b] .. lengths[b]+M-1 are new; ``visible`` [B, N, M] bool says who sees whom and
    ``slot_positions`` [B, M] where they stand (default: ``positions`` [B, N], for M == N). What later slots
    hold has no influence; ``lengths + M <= S`` is the caller's duty. Every query should see itself; one that
    sees nothing yields zeros. Hq must be a multiple of Hkv (grouped-query attention, Ainslie et al. 2023).
    Softmax in f32. ``softcap`` c replaces a score s by ``c tanh(s / c)`` before masking.

    ``implementation``: None takes what the device's adapter chooses, XLA where its kernel refuses the shapes
    (logged once); an ``Attention``, or its name, is taken or refused. The kernels want the N queries' own
    slots to be the last of the M. Raises ConfigError.
    """
    if q.shape[2] % k.shape[1]:
        raise ConfigError(f"{q.shape[2]} query heads are not a multiple of {k.shape[1]} key/value heads")
    if slot_positions is None and visible.shape[2] != positions.shape[1]:
        raise ConfigError(
            f"visible has {visible.shape[2]} new slots for {positions.shape[1]} queries; give slot_positions"
        )
    if visible.shape[2] > k.shape[2]:
        raise ConfigError(f"{visible.shape[2]} new slots do not fit a cache of {k.shape[2]} slots")
    requested = Attention(implementation) if isinstance(implementation, str) else implementation
    options = _kernel_options(requested, q, k, visible.shape[2])
    dtype = q.dtype
    if isinstance(k, PackedKV) and not k.format.direct:
        q = kv_codec.into_codes(k, q)
    # Sums of codes are rounded to the result's dtype after they have become sums of values.
    turned = v if isinstance(v, PackedKV) and not v.format.direct else None
    out = IMPLEMENTATIONS["xla" if options is None else "pallas"](
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
        out_dtype=dtype if turned is None else jnp.float32,
        **(options or {}),
    )
    return out if turned is None else kv_codec.out_of_codes(turned, out).astype(dtype)


def write_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cached_k: Stored,
    cached_v: Stored,
    lengths: jax.Array,
    visible: jax.Array,
    positions: jax.Array,
    **options: Any,
) -> tuple[jax.Array, Stored, Stored]:
    """Put the keys and values of N new tokens into the cache, then ``attend``: (result, keys, values).

    ``q`` [B, N, Hq, d]; ``k``, ``v`` [B, N, Hkv, d] of the new tokens; ``cached_k``, ``cached_v`` [B, Hkv, S,
    d]. They take the last N of the M slots that ``visible`` [B, N, M] covers. ``options``: of ``attend``.

    A token whose key or value is not finite is stored as zeros, and those that see it, itself included, get
    NaN. Left in the cache it would reach its siblings too, for a weight of zero times NaN is NaN.
    """
    n, m = visible.shape[1:]
    # What overflows the cache's own dtype is not finite either.
    k, v = (x if isinstance(c, PackedKV) else x.astype(c.dtype) for x, c in ((k, cached_k), (v, cached_v)))
    sound = (jnp.isfinite(k) & jnp.isfinite(v)).all(axis=(2, 3))
    k, v = (jnp.where(sound[:, :, None, None], x, 0).transpose(0, 2, 1, 3) for x in (k, v))
    cached_k = kv.write(cached_k, k, lengths + (m - n))
    cached_v = kv.write(cached_v, v, lengths + (m - n))
    out = attend(q, cached_k, cached_v, lengths, visible, positions, **options)
    lost = (visible[:, :, m - n :] & ~sound[:, None]).any(axis=2)
    return jnp.where(lost[:, :, None, None], jnp.nan, out), cached_k, cached_v
