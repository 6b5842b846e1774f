"""Root-mean-square normalisation whose rows do not depend on each other's number.

XLA:CPU sums the squares of a row in another order from 8 rows on. The last bit that this changes moves an
int8 activation by one now and then, and so a token's logits would depend on how many are verified with it.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.dispatch import Way, run
from kernels_pallas.foreign import Kernel

__all__ = ["KERNEL", "MOST_ROWS", "rms_norm"]

KERNEL = Kernel(
    op="rms_norm",
    source=Path(__file__).parent / "native" / "rms_norm.cc",
    symbols=("RmsNorm",),
    left="normalisation is left to XLA, whose last bits depend on the number of rows",
)
MOST_ROWS = 512
"""Rows beyond which XLA's, which joins it with its neighbours, is taken: prompts and training."""


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x` [..., H] over the root of its mean square, times `weight` [H] float32; in x's dtype.

    Computed in float32. On a single CPU device a C++ kernel takes up to `MOST_ROWS` rows of float32 or
    bfloat16, each with the same bits in a call of any number of them; everything else is XLA's.
    """
    ways = {
        "xla": Way(functools.partial(_reference, eps=eps)),
        "cpu": Way(functools.partial(_native, eps=eps), lambda: _refusal(x)),
    }
    out: jax.Array = run(KERNEL.op, ways, (x, weight))
    return out


def _refusal(x: jax.Array) -> str | None:
    """Why the kernel does not take x, or None."""
    rows = math.prod(x.shape[:-1])
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return f"takes float32 and bfloat16, not {x.dtype}"
    if not 0 < rows <= MOST_ROWS:
        return f"takes 1 to {MOST_ROWS} rows, not {rows}"
    return KERNEL.unavailable()


def _native(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call(KERNEL.target("RmsNorm"), shape, vmap_method="sequential")
    return call(x, weight, eps=np.float32(eps))


def _reference(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * weight).astype(x.dtype)
