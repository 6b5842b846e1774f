"""Key/value cache with a length per row.

Slot s of a row holds the keys and values of the token at position s: committed tokens are always contiguous.
A forward over N new tokens writes slots ``[length, length + N)`` without moving the length; ``advance``
keeps a prefix of them and ``commit`` keeps one path of a tree. What lies behind the length is never read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.nn.gather import take


@pytree.dataclass
class KVCache:
    """Keys and values of every layer.

    ``k``, ``v``: one array a layer, [B, Hkv, S, head_dim]. ``lengths``: [B] int32, committed tokens of each
    row. The caller guarantees ``lengths + N <= S`` before each forward (see ``generate``'s capacity rule).
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    lengths: jax.Array

    @property
    def capacity(self) -> int:
        """Slots a row (S)."""
        return self.k[0].shape[2]


def init_cache(
    *, layers: int, batch: int, capacity: int, kv_heads: int, head_dim: int, dtype: Any = jnp.float32
) -> KVCache:
    """An empty cache of ``layers`` arrays [batch, kv_heads, capacity, head_dim]."""
    shape = (batch, kv_heads, capacity, head_dim)
    return KVCache(
        k=tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
        v=tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
        lengths=jnp.zeros((batch,), jnp.int32),
    )


def write(cached: jax.Array, new: jax.Array, lengths: jax.Array) -> jax.Array:
    """Put ``new`` [B, Hkv, N, d] into ``cached`` [B, Hkv, S, d] at slots ``lengths[b] + (0..N-1)``.

    One update a row instead of a batched one: XLA turns a vmapped dynamic_update_slice into a scatter, which
    on CPU walks element by element.
    """
    new = new.astype(cached.dtype)
    for b in range(cached.shape[0]):
        cached = jax.lax.dynamic_update_slice(cached, new[b : b + 1], (b, 0, lengths[b], 0))
    return cached


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

    def gather(cached: jax.Array) -> jax.Array:
        for b in range(cached.shape[0]):
            kept = take(cached[b], cache.lengths[b] + path[b], axis=1)
            cached = jax.lax.dynamic_update_slice(cached, kept[None], (b, 0, cache.lengths[b], 0))
        return cached

    return KVCache(
        k=tuple(gather(k) for k in cache.k),
        v=tuple(gather(v) for v in cache.v),
        lengths=cache.lengths + accepted + 1,
    )
