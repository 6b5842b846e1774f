"""Attention of EAGLE-3's training-time test (arXiv:2503.01840, section 3.2), forward and backward.

In step j of the training-time test the draft at token t sees what it will see when it drafts: true features
up to t (the keys of step 0, causally) and its own outputs of steps 1..j at the same t. The mask is a causal
triangle and j diagonals; the triangle is a flash-attention kernel, the diagonals are elementwise and join it
by log-sum-exp.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.dispatch import Implementation, Interpret, Way, run
from kernels_pallas.errors import require
from kernels_pallas.ttt_attention import gpu, tpu
from kernels_pallas.ttt_attention.reference import ttt_attention_reference

__all__ = ["ttt_attention"]

_OP = "ttt_attention"
_XLA_QUERY_CHUNK = 512


def ttt_attention(
    q: jax.Array,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    *,
    document_ids: jax.Array | None = None,
    scale: float | None = None,
    block_q: int | None = None,
    block_kv: int | None = None,
    implementation: Implementation = "auto",
    interpret: Interpret = None,
) -> jax.Array:
    """Attend from the queries of step j = len(keys) - 1 to its visible keys. Differentiable in q, keys and
    values.

    Query t sees step 0's keys s <= t of its own document and, of each later step, the key at t. Memory is
    linear in T in both passes.

    Args:
      q: [B, T, Hq, D] float32 or bfloat16.
      keys, values: j + 1 arrays [B, T, Hkv, D] of q's dtype, step 0 first; Hkv divides Hq.
      document_ids: int32 [B, T] for packed documents, None for one document a row. Padding is a document of
        its own.
      scale: multiplies the scores; D ** -0.5 by default.
      block_q, block_kv: tokens the kernel handles at a time; chosen by heuristic when None.
      implementation: "xla" everywhere, the "tpu" and "gpu" (Hopper) kernels, or "auto", see `choose`.
      interpret: see `kernels_pallas.dispatch.resolve_interpret`.

    Returns:
      [B, T, Hq, D] of q's dtype.

    Raises:
      KernelError: inconsistent shapes or dtypes, or an implementation that does not take them.
    """
    _check(q, keys, values, document_ids)
    if document_ids is None:
        document_ids = jnp.zeros(q.shape[:2], jnp.int32)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    chunk = block_q or _XLA_QUERY_CHUNK
    ways = {
        "xla": Way(functools.partial(ttt_attention_reference, scale=scale, query_chunk=chunk)),
        "tpu": Way(
            functools.partial(tpu.ttt_attention_tpu, scale=scale, block_q=block_q, block_kv=block_kv),
            tpu.refusal(q, keys[0], block_q, block_kv),
        ),
        "gpu": Way(functools.partial(_gpu, scale=scale), gpu.refusal(q, block_q, block_kv)),
    }
    return run(_OP, ways, (q, keys, values, document_ids), implementation, interpret)


def _gpu(*arguments: Any, **options: Any) -> jax.Array:
    # Imported here for the reason that kernels_pallas.hopper gives.
    from kernels_pallas.ttt_attention.hopper import ttt_attention_hopper

    return ttt_attention_hopper(*arguments, **options)


def _check(q, keys, values, document_ids) -> None:
    require(q.ndim == 4, _OP, f"q must be [B, T, Hq, D], got {q.shape}")
    require(q.dtype.name in ("float32", "bfloat16"), _OP, f"q is {q.dtype}, expected float32 or bfloat16")
    require(
        len(keys) == len(values) and len(keys) > 0,
        _OP,
        f"keys and values hold one array a step, step 0 first; got {len(keys)} and {len(values)}",
    )
    batch, length, heads, dim = q.shape
    expected = (batch, length, keys[0].shape[2] if keys[0].ndim == 4 else "Hkv", dim)
    for name, arrays in (("keys", keys), ("values", values)):
        for step, x in enumerate(arrays):
            require(
                x.shape == expected and x.dtype == q.dtype,
                _OP,
                f"{name}[{step}] must be {q.dtype} {expected}, got {x.dtype} {x.shape}",
            )
    require(
        heads % keys[0].shape[2] == 0, _OP, f"{heads} query heads are not a multiple of {keys[0].shape[2]}"
    )
    if document_ids is not None:
        require(
            document_ids.shape == (batch, length) and document_ids.dtype == jnp.int32,
            _OP,
            f"document_ids must be int32 {(batch, length)}, got {document_ids.dtype} {document_ids.shape}",
        )
