"""Training-time-test attention by kernels: theirs is the causal triangle, the diagonals are elementwise.

The backward pass needs no statistics of the triangle alone: from the log-sum-exp and the output of the whole
row, the weights and score gradients of triangle and diagonals follow separately (FlashAttention-2,
arXiv:2307.08691).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Triangle(NamedTuple):
    """Flash attention of one device; hashable, a compile-time constant.

    `forward(tiling, q, k, v, document_ids)` gives float32 [B, T, Hq, D] and log-sum-exp [B, T, Hq], and
    `backward(tiling, q, k, v, document_ids, grad, lse, delta)` the gradients of q (float32), k and v; see
    `flash`. `tiling` has the `scale` of the scores.
    """

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    tiling: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    triangle: Triangle,
    q: jax.Array,
    keys: tuple[jax.Array, ...],
    values: tuple[jax.Array, ...],
    document_ids: jax.Array,
) -> jax.Array:
    """See `ttt_attention` in the package; differentiable in q, keys and values."""
    return _forward(triangle, q, keys, values, document_ids)[0]


def _forward(triangle, q, keys, values, document_ids):
    out, lse = triangle.forward(triangle.tiling, q, keys[0], values[0], document_ids)
    if len(keys) > 1:
        scores = jnp.stack([_diagonal_scores(q, k, triangle.tiling.scale) for k in keys[1:]], axis=-1)
        total = jnp.logaddexp(lse, jax.nn.logsumexp(scores, axis=-1))
        out *= jnp.exp(lse - total)[..., None]
        for step, value in enumerate(values[1:]):
            out += jnp.exp(scores[..., step] - total)[..., None] * _per_query_head(value, q)
        lse = total
    out = out.astype(q.dtype)
    return out, (q, keys, values, document_ids, out, lse)


def _backward(triangle, residuals, grad):
    q, keys, values, document_ids, out, lse = residuals
    delta = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    grad_q, grad_k, grad_v = triangle.backward(
        triangle.tiling, q, keys[0], values[0], document_ids, grad, lse, delta
    )
    grad_keys, grad_values = [grad_k], [grad_v]
    grad_wide, q_wide = grad.astype(jnp.float32), q.astype(jnp.float32)
    for key, value in zip(keys[1:], values[1:], strict=True):
        weight = jnp.exp(_diagonal_scores(q, key, triangle.tiling.scale) - lse)
        slope = (
            weight * (jnp.sum(grad_wide * _per_query_head(value, q), axis=-1) - delta) * triangle.tiling.scale
        )
        grad_q += slope[..., None] * _per_query_head(key, q)
        grad_keys.append(_sum_group(slope[..., None] * q_wide, key))
        grad_values.append(_sum_group(weight[..., None] * grad_wide, value))
    return grad_q.astype(q.dtype), tuple(grad_keys), tuple(grad_values), None


attend.defvjp(_forward, _backward)


def _per_query_head(x: jax.Array, q: jax.Array) -> jax.Array:
    """[B, T, Hkv, D] to float32 [B, T, Hq, D]."""
    return jnp.repeat(x.astype(jnp.float32), q.shape[2] // x.shape[2], axis=2)


def _sum_group(x: jax.Array, like: jax.Array) -> jax.Array:
    """[B, T, Hq, D] summed over the query heads of each key/value head, in the dtype of `like`."""
    return x.reshape(*like.shape[:3], -1, like.shape[3]).sum(3).astype(like.dtype)


def _diagonal_scores(q: jax.Array, k: jax.Array, scale: float) -> jax.Array:
    """float32 [B, T, Hq]: each query against the key at its own token."""
    return lax.reduce_sum(q.astype(jnp.float32) * _per_query_head(k, q), (3,)) * scale
