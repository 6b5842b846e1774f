"""The running softmax of attention kernels that meet their keys block by block (Milakov, Gimelshein 2018)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30
"""A score that counts for nothing: finite, so that the running maximum never yields inf - inf."""


def update(scores: jax.Array, visible: jax.Array | None, peak_ref, total_ref) -> tuple[jax.Array, jax.Array]:
    """Take one block of keys in.

    Args:
      scores: float32 [rows, block].
      visible: bool [rows, block]; None when all are.
      peak_ref, total_ref: float32 [rows, lanes], each lane the same: the largest score so far (at first
        ``MASKED``), and the sum of weights relative to it (at first 0). Both are updated.

    Returns:
      The block's weights [rows, block] relative to the new peak, and the factor [rows, 1] by which what was
      summed relative to the old one shrinks.
    """
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)
    last_peak = peak_ref[:, :1]
    peak = jnp.maximum(last_peak, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - peak)
    if visible is not None:
        # A row that sees nothing yet has the peak MASKED, and weights of 1.
        weights = jnp.where(visible, weights, 0.0)
    decay = jnp.exp(last_peak - peak)
    total = decay * total_ref[:, :1] + jnp.sum(weights, axis=1, keepdims=True)
    total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
    peak_ref[...] = jnp.broadcast_to(peak, peak_ref.shape)
    return weights, decay
