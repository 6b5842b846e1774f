"""Which cache slots a tree node sees, as all implementations take it: ancestor words and slot floors."""

import jax
import jax.numpy as jnp
from jax import lax


def pack_ancestors(ancestors: jax.Array) -> jax.Array:
    """Pack an ancestor matrix into 32-bit words.

    Args:
      ancestors: bool [..., N, N]; `ancestors[..., i, j]` says that node i sees node j (itself included).

    Returns:
      int32 [..., N, ceil(N / 32)]; node j is bit `j % 32` of word `j // 32`.
    """
    nodes = ancestors.shape[-1]
    words = -(-nodes // 32)
    padding = [(0, 0)] * (ancestors.ndim - 1) + [(0, words * 32 - nodes)]
    bits = jnp.pad(ancestors.astype(jnp.uint32), padding).reshape(*ancestors.shape[:-1], words, 32)
    # Distinct powers of two: the sum is their bitwise or.
    packed = jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(packed, jnp.int32)


def unpack_ancestors(words: jax.Array, nodes: int) -> jax.Array:
    """Inverse of `pack_ancestors`: int32 [..., N, W] to bool [..., N, nodes]."""
    unsigned = lax.bitcast_convert_type(words, jnp.uint32)
    bits = (unsigned[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :nodes].astype(bool)


def node_positions(words: jax.Array, lengths: jax.Array) -> jax.Array:
    """Positions int32 [B, N] of tree nodes: `lengths` plus the number of proper ancestors."""
    depth = jnp.sum(lax.population_count(words), axis=-1) - 1
    return lengths[:, None] + jnp.maximum(depth, 0)


def apply_window(
    words: jax.Array | None, positions: jax.Array, window: int | None
) -> tuple[jax.Array | None, jax.Array]:
    """Turn a sliding window over positions into ancestor words and a lowest visible prefix slot.

    A query at position p sees keys at positions above `p - window`. Prefix slot s has position s, so the
    window is a floor on slots; among tree nodes it clears bits, so kernels compare no positions.

    Args:
      words: int32 [B, N, W] or None.
      positions: int32 [B, N], of queries and of tree keys alike.
      window: number of positions seen, the query's own included; None for all.

    Returns:
      The words with bits outside the window cleared, and int32 [B, N] floors (0 without a window).
    """
    if window is None:
        return words, jnp.zeros_like(positions)
    floor = positions - window + 1
    if words is not None:
        inside = positions[:, None, :] >= floor[:, :, None]
        words = pack_ancestors(unpack_ancestors(words, positions.shape[1]) & inside)
    return words, jnp.maximum(floor, 0)
