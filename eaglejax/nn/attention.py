"""Attention of new tokens over a committed prefix and over each other, by a visibility matrix.

Keys and values of new tokens are read from the cache like those of old ones. So a token in a narrow cache is
seen by the tree it was verified in exactly as by all that comes after it, and nothing depends on how many
tokens a forward takes.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import devices
from eaglejax.devices import Attention
from eaglejax.devices import adapter as adapters
from eaglejax.errors import ConfigError
from eaglejax.nn import cache as kv
from eaglejax.nn import kv_codec
from eaglejax.nn.attention_implementations import (
    IMPLEMENTATIONS,
    native_refusal,
    pallas_refusal,
    queries_a_call,
)
from eaglejax.nn.kv_codec import PackedKV, Stored
from eaglejax.tap import tap

log = logging.getLogger(__name__)


@functools.cache
def _report(adapter: str, shape: str, refusal: str) -> None:
    log.warning("%s: attention of %s runs on XLA: the kernel %s", adapter, shape, refusal)


def _choose(requested: Attention | None, q: jax.Array, k: Stored, slots: int) -> tuple[str, dict[str, Any]]:
    """Name of the implementation, and what it is told besides attend's arguments. Raises ConfigError."""
    adapter = None
    choice = requested
    if choice is None:
        adapter = devices.current()
        choice = adapter.attention
    options: dict[str, Any] = {}
    if choice.implementation == "xla":
        return "xla", options
    adapter = adapter or devices.current()
    kernel = "native"
    if choice.implementation == "native":
        refusal = native_refusal(q, k)
    else:
        kernel = adapters.resolve_kernel(adapter, choice)
        if requested is not None and requested.interpret is not False:
            adapters.check_runs(adapter, requested)
        rows = min(slots, queries_a_call(q, k)) * (q.shape[2] // k.shape[1])
        block = choice.block_kv
        if block is None and kernel == "tpu":
            block = adapter.block_kv(head_dim=q.shape[3], dtype=k.dtype.name, rows=rows)
        refusal = pallas_refusal(kernel, block, q, k, slots)
        options = {"kernel": kernel, "interpret": choice.interpret, "block_kv": block}
    if refusal is None:
        return choice.implementation, options
    shape = (
        f"{slots} new tokens x {q.shape[2]} query heads of {q.shape[3]} over {k.shape[2]} slots of {k.dtype}"
    )
    if requested is not None or adapter.forced:
        raise ConfigError(
            f"attention of {shape} was to use the {kernel!r} kernel, which {refusal}; change "
            "that, or use attention 'xla', which takes everything"
        )
    _report(adapter.name, shape, refusal)
    return "xla", {}


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
    name, options = _choose(requested, q, k, visible.shape[2])
    dtype = q.dtype
    if isinstance(k, PackedKV) and not k.format.direct:
        q = kv_codec.into_codes(k, q)
    # Sums of codes are rounded to the result's dtype after they have become sums of values.
    turned = v if isinstance(v, PackedKV) and not v.format.direct else None
    out = IMPLEMENTATIONS[name](
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
        **options,
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
    for name, value in (("q", q), ("k", k), ("v", v)):
        tap(name, value)
    n, m = visible.shape[1:]
    # What overflows the cache's own dtype is not finite either.
    k, v = (x if isinstance(c, PackedKV) else x.astype(c.dtype) for x, c in ((k, cached_k), (v, cached_v)))
    sound = (jnp.isfinite(k) & jnp.isfinite(v)).all(axis=(2, 3))
    k, v = (jnp.where(sound[:, :, None, None], x, 0).transpose(0, 2, 1, 3) for x in (k, v))
    cached_k = kv.write(cached_k, k, lengths + (m - n))
    cached_v = kv.write(cached_v, v, lengths + (m - n))
    out = attend(q, cached_k, cached_v, lengths, visible, positions, **options)
    lost = (visible[:, :, m - n :] & ~sound[:, None]).any(axis=2)
    out = jnp.where(lost[:, :, None, None], jnp.nan, out)
    tap("attention", out)
    return out, cached_k, cached_v
