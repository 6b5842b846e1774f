"""Soft cross entropy over a vocabulary, with what else is known once a row has been read.

Training scores every row of every chain step over the draft's vocabulary: tens of megabytes, over which XLA
makes a pass for each sum and for the gradient. On a CPU a C++ kernel reads a row once.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas import native
from kernels_pallas.dispatch import Way, run
from kernels_pallas.errors import require
from kernels_pallas.foreign import Kernel

__all__ = ["KERNEL", "soft_cross_entropy"]

_OP = "soft_cross_entropy"
KERNEL = Kernel(
    op=_OP,
    source=Path(__file__).parent / "native" / "soft_cross_entropy.cc",
    symbols=("SoftCrossEntropy",),
    left="the loss over a vocabulary is left to XLA, which is slower on a CPU",
    levels=native.VECTOR_LEVELS,
)


def soft_cross_entropy(
    logits: jax.Array, log_p: jax.Array, inside: jax.Array, *, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """-sum_v p log q of each row, how often q's draft would be kept, and q's likeliest token.

    Args:
      logits: float32 [R, V], those of q; the one argument that is differentiated.
      log_p: float32 [R, V], logarithms of p, which need not sum to one.
      inside: float32 [R], the factor of p in the second figure.
      dtype: float32 or bfloat16, in which the gradient of a row is kept for the backward pass.

    Returns:
      float32 [R] of -sum p log q; float32 [R] of sum min(inside p, q), without derivative; int32 [R], the
      first of q's largest.

    Raises:
      KernelError: shapes or dtypes that do not fit.
    """
    require(logits.ndim == 2 and logits.shape == log_p.shape, _OP, f"{logits.shape} against {log_p.shape}")
    require(inside.shape == logits.shape[:1], _OP, f"inside must be {logits.shape[:1]}, got {inside.shape}")
    for name, x in (("logits", logits), ("log_p", log_p), ("inside", inside)):
        require(x.dtype == jnp.float32, _OP, f"{name} must be float32, got {x.dtype}")
    return _loss(logits, log_p, inside, jnp.dtype(dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _loss(logits, log_p, inside, dtype):
    return _run(logits, log_p, inside, dtype)[:3]


def _forward(logits, log_p, inside, dtype):
    *figures, gradient = _run(logits, log_p, inside, dtype)
    return tuple(figures), gradient


def _backward(dtype, gradient, changes):
    change = changes[0][:, None]
    # A row that is masked out may hold anything, and zero times a NaN is one.
    by_logits = jnp.where(change == 0, 0.0, gradient.astype(jnp.float32) * change)
    return by_logits, jnp.zeros_like(by_logits), jnp.zeros_like(changes[0])


_loss.defvjp(_forward, _backward)


def _run(logits, log_p, inside, dtype):
    """The three figures, and the gradient of the first by the logits [R, V] in ``dtype``."""
    ways = {
        "xla": Way(functools.partial(_reference, dtype=dtype)),
        "cpu": Way(functools.partial(_native, dtype=dtype), lambda: _refusal(logits)),
    }
    return run(_OP, ways, (logits, log_p, inside))


def _refusal(logits: jax.Array) -> str | None:
    """Why the kernel does not take these rows, or None."""
    if 0 in logits.shape:
        return f"takes no empty arrays, such as {logits.shape}"
    return KERNEL.unavailable()


def _native(logits, log_p, inside, *, dtype):
    rows, size = logits.shape
    figure = jax.ShapeDtypeStruct((rows,), jnp.float32)
    best = jax.ShapeDtypeStruct((rows,), jnp.int32)
    results = (figure, figure, best, jax.ShapeDtypeStruct((rows, size), dtype))
    native = jax.ffi.ffi_call(KERNEL.target("SoftCrossEntropy"), results, vmap_method="sequential")
    return tuple(native(logits, log_p, inside))


def _reference(logits, log_p, inside, *, dtype):
    """The same in plain jnp."""
    log_q = jax.nn.log_softmax(logits, axis=-1)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    entropy = -jnp.sum(p * log_q, axis=-1)
    accept = jnp.sum(jnp.minimum(p * inside[:, None], q), axis=-1)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return entropy, accept, best, (q * jnp.sum(p, axis=-1, keepdims=True) - p).astype(dtype)
