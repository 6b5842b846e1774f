"""Training-time-test attention on TPU: the causal triangle by flash-attention kernels, the diagonals
elementwise.

The backward pass needs no statistics of the triangle alone: from the log-sum-exp and the output of the whole
row, the weights and score gradients of triangle and diagonals follow separately (FlashAttention-2,
arXiv:2307.08691).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.ttt_attention import flash

_LANES = 128
_TARGET_ROWS = 512
_BLOCK_KV = 256


def refusal(q: jax.Array, k: jax.Array, block_q: int | None, block_kv: int | None) -> str | None:
    """Why the kernel does not take these arguments, or None."""
    group = q.shape[2] // k.shape[2]
    if group > _TARGET_ROWS // 16:
        return f"takes at most {_TARGET_ROWS // 16} query heads per key/value head, got {group}"
    if block_kv is not None and block_kv % _LANES:
        return f"takes block_kv as a multiple of {_LANES}, got {block_kv}"
    if block_q is not None and (block_q % 16 or (block_kv or _BLOCK_KV) % block_q):
        return (
            f"takes block_q as a multiple of 16 that divides block_kv {block_kv or _BLOCK_KV}, got {block_q}"
        )
    return None


def ttt_attention_tpu(
    q: jax.Array,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    document_ids: jax.Array,
    *,
    scale: float,
    block_q: int | None,
    block_kv: int | None,
    interpret: Any,
) -> jax.Array:
    """See `ttt_attention` in the package."""
    group = q.shape[2] // keys[0].shape[2]
    block_kv = min(block_kv or _BLOCK_KV, -(-q.shape[1] // _LANES) * _LANES)
    if block_q is None:
        block_q = 16
        while block_q * 2 * group <= _TARGET_ROWS and block_kv % (block_q * 2) == 0:
            block_q *= 2
    tiling = flash.Tiling(block_q=min(block_q, block_kv), block_kv=block_kv, scale=scale, interpret=interpret)
    return _attend(tiling, q, tuple(keys), tuple(values), document_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(tiling, q, keys, values, document_ids):
    return _attend_forward(tiling, q, keys, values, document_ids)[0]


def _attend_forward(tiling, q, keys, values, document_ids):
    out, lse = flash.forward(tiling, q, keys[0], values[0], document_ids)
    if len(keys) > 1:
        scores = jnp.stack([_diagonal_scores(q, k, tiling.scale) for k in keys[1:]], axis=-1)
        total = jnp.logaddexp(lse, jax.nn.logsumexp(scores, axis=-1))
        out *= jnp.exp(lse - total)[..., None]
        for step, value in enumerate(values[1:]):
            out += jnp.exp(scores[..., step] - total)[..., None] * _per_query_head(value, q)
        lse = total
    out = out.astype(q.dtype)
    return out, (q, keys, values, document_ids, out, lse)


def _attend_backward(tiling, residuals, grad):
    q, keys, values, document_ids, out, lse = residuals
    delta = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    grad_q, grad_k, grad_v = flash.backward(tiling, q, keys[0], values[0], document_ids, grad, lse, delta)
    grad_keys, grad_values = [grad_k], [grad_v]
    grad_wide, q_wide = grad.astype(jnp.float32), q.astype(jnp.float32)
    for key, value in zip(keys[1:], values[1:], strict=True):
        weight = jnp.exp(_diagonal_scores(q, key, tiling.scale) - lse)
        slope = weight * (jnp.sum(grad_wide * _per_query_head(value, q), axis=-1) - delta) * tiling.scale
        grad_q += slope[..., None] * _per_query_head(key, q)
        grad_keys.append(_sum_group(slope[..., None] * q_wide, key))
        grad_values.append(_sum_group(weight[..., None] * grad_wide, value))
    return grad_q.astype(q.dtype), tuple(grad_keys), tuple(grad_values), None


_attend.defvjp(_attend_forward, _attend_backward)


def _per_query_head(x: jax.Array, q: jax.Array) -> jax.Array:
    """[B, T, Hkv, D] to float32 [B, T, Hq, D]."""
    return jnp.repeat(x.astype(jnp.float32), q.shape[2] // x.shape[2], axis=2)


def _sum_group(x: jax.Array, like: jax.Array) -> jax.Array:
    """[B, T, Hq, D] summed over the query heads of each key/value head, in the dtype of `like`."""
    return x.reshape(*like.shape[:3], -1, like.shape[3]).sum(3).astype(like.dtype)


def _diagonal_scores(q: jax.Array, k: jax.Array, scale: float) -> jax.Array:
    """float32 [B, T, Hq]: each query against the key at its own token."""
    return lax.reduce_sum(q.astype(jnp.float32) * _per_query_head(k, q), (3,)) * scale
