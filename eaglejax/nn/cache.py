"""Key/value cache with a length per row.

Slot s of a row holds the keys and values of the token at position s: committed tokens are always contiguous.
A forward over N new tokens writes slots ``[length, length + N)`` without moving the length; ``advance``
keeps a prefix of them and ``commit`` keeps one path of a tree. What lies behind the length is never read.
A token's scales, where the format has them, sit in its slot and move with it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.errors import ConfigError
from eaglejax.nn import kv_codec
from eaglejax.nn.gather import take
from eaglejax.nn.kv_codec import PackedKV, Stored
from eaglejax.nn.kv_format import kv_format
from kernels_pallas import cache_attention
from kernels_pallas.foreign import portable_call


@pytree.dataclass
class KVCache:
    """Keys and values of every layer.

    ``k``, ``v``: one a layer, [B, Hkv, S, head_dim]: arrays, or ``PackedKV`` in a narrow format. ``lengths``:
    [B] int32, committed tokens of each row. The caller guarantees ``lengths + N <= S`` before each forward
    (see ``generate``'s capacity rule).
    """

    k: tuple[Stored, ...]
    v: tuple[Stored, ...]
    lengths: jax.Array

    @property
    def capacity(self) -> int:
        """Slots a row (S)."""
        return self.k[0].shape[2]


@pytree.dataclass
class CacheScales:
    """Calibrated scales of an int8-static cache: ``k``, ``v``, one a layer, [Hkv, head_dim] f32, positive.

    A channel's number x is stored as x / scale, rounded and cut to [-127, 127].
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]


def init_cache(
    *,
    layers: int,
    batch: int,
    capacity: int,
    kv_heads: int,
    head_dim: int,
    format: Any = "float32",
    scales: CacheScales | None = None,
    centred: bool = False,
) -> KVCache:
    """An empty cache of ``layers`` times [batch, kv_heads, capacity, head_dim].

    ``format``: see ``kv_format``; int8-static needs ``scales``, and no other takes them. ``centred``: where
    keys get a scale as they come, they are stored as differences from the row's first one (see ``kv_codec``),
    which attention without a softcap does not notice. Raises ConfigError.
    """
    format = kv_format(format)
    if format.static != (scales is not None):
        raise ConfigError(
            "an int8-static cache needs calibrated scales (quant.kv.calibrate_cache); 'int8' needs none"
            if format.static
            else f"calibrated scales are for an int8-static cache, not for {format.name!r}"
        )
    shape = (batch, kv_heads, capacity, head_dim)

    def sides(channels: tuple[jax.Array, ...] | None, centred: bool = False) -> tuple[Stored, ...]:
        if channels is None:
            return tuple(kv_codec.empty(format, shape, None, centred=centred) for _ in range(layers))
        if [c.shape for c in channels] != [(kv_heads, head_dim)] * layers:
            raise ConfigError(
                f"cache scales must be {layers} arrays of shape {(kv_heads, head_dim)}; they are "
                f"{[c.shape for c in channels]}"
            )
        return tuple(kv_codec.empty(format, shape, c) for c in channels)

    return KVCache(
        k=sides(None if scales is None else scales.k, centred),
        v=sides(None if scales is None else scales.v),
        lengths=jnp.zeros((batch,), jnp.int32),
    )


def write(cached: Stored, new: jax.Array, lengths: jax.Array) -> Stored:
    """Put ``new`` [B, Hkv, N, d] into ``cached`` [B, Hkv, S, d] at slots ``lengths[b] + (0..N-1)``."""
    ready = (
        kv_codec.encode(cached, new, lengths) if isinstance(cached, PackedKV) else new.astype(cached.dtype)
    )
    return kv_codec.each(lambda old, fresh: _put(old, fresh, lengths), cached, ready)


def _put(cached: jax.Array, fresh: jax.Array, lengths: jax.Array) -> jax.Array:
    """``cached`` [B, Hkv, S, ...] with ``fresh`` [B, Hkv, N, ...] from slot ``lengths[b]`` on, in place.

    XLA:CPU computes updates of a bfloat16 buffer in float32, and so makes B passes over all of it for B rows;
    a call of our own moves the bytes.
    """
    if cache_attention.WRITE_KERNEL.unavailable() is None:
        return portable_call(cache_attention.cache_write, _put_xla, cached, fresh, lengths)
    return _put_xla(cached, fresh, lengths)


def _put_xla(cached: jax.Array, fresh: jax.Array, lengths: jax.Array) -> jax.Array:
    """One update a row: XLA turns a vmapped dynamic_update_slice into a scatter, which on CPU walks element
    by element."""
    for b in range(cached.shape[0]):
        cached = jax.lax.dynamic_update_slice(cached, fresh[b : b + 1], _slot(cached, b, lengths))
    return cached


def _slot(cached: jax.Array, row: int, lengths: jax.Array) -> list[int | jax.Array]:
    """Where slot ``lengths[row]`` of a row begins in ``cached`` [B, Hkv, S, ...]."""
    return [row, 0, lengths[row], *[0] * (cached.ndim - 3)]


def advance(cache: KVCache, count: jax.Array) -> KVCache:
    """Commit the first ``count[b]`` of the tokens written last."""
    return dataclasses.replace(cache, lengths=cache.lengths + count)


def commit(cache: KVCache, path: jax.Array, accepted: jax.Array, *, chain: bool = False) -> KVCache:
    """Keep one root-to-leaf path of the tree written last and move it next to the committed tokens.

    ``path`` [B, D+1] int32: node index at each depth, ``path[:, 0] == 0``; entries beyond ``accepted`` [B]
    are ignored (but must be valid indices). The row grows by ``accepted + 1``: the root and the accepted
    drafts. ``chain`` says that node i always sits at depth i, so that nothing has to move.
    """
    if chain:
        return advance(cache, accepted + 1)

    slots = cache.lengths[:, None] + path

    def gather(cached: jax.Array) -> jax.Array:
        kept = [take(row, at, axis=1) for row, at in zip(cached, slots, strict=True)]
        return _put(cached, jnp.stack(kept), cache.lengths)

    return KVCache(
        k=tuple(kv_codec.each(gather, k) for k in cache.k),
        v=tuple(kv_codec.each(gather, v) for v in cache.v),
        lengths=cache.lengths + accepted + 1,
    )
