"""Product with unquantised weights for few rows on a CPU: a C++ kernel that XLA calls, compiled on first use.

Weights are read from memory once, as they are stored, and every row's result is the same to the bit however
many rows there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from kernels_pallas import native
from kernels_pallas.foreign import Kernel

KERNEL = Kernel(
    op="dense_matmul",
    source=Path(__file__).parent / "native" / "dense_matmul.cc",
    symbols=("DenseMatmul", "DenseMatmulTransposed"),
    left="products with unquantised weights are left to XLA, which is slower for few rows",
    levels=native.VECTOR_LEVELS,
)

MOST_ROWS = {
    "avx512-bf16": {"bfloat16": 512, "float32": 16},
    "avx512-vnni": {"bfloat16": 16, "float32": 16},
    "avx512": {"bfloat16": 16, "float32": 16},
    "avx-vnni": {"bfloat16": 64, "float32": 32},
    "avx2": {"bfloat16": 64, "float32": 32},
    "dotprod": {"bfloat16": 16, "float32": 16},
    "neon": {"bfloat16": 16, "float32": 16},
}
"""Most rows for which "auto" takes the kernel, by level and dtype."""


def refusal(x: jax.Array, w: jax.Array) -> str | None:
    """Why the kernel does not take x [M, K] and w, or None."""
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"takes bfloat16 or float32, activations and weights alike, not {x.dtype} and {w.dtype}"
    if 0 in (*x.shape, *w.shape):
        return f"takes no empty arrays, such as {x.shape} and {w.shape}"
    return KERNEL.refusal()


def serves(rows: int, dtype: jnp.dtype, *, turned: bool) -> bool:
    """Whether "auto" takes the kernel for so many rows of `dtype`.

    `turned`: of a transpose. XLA:CPU multiplies it in float32, so that at the one level with bfloat16
    arithmetic the kernel is faster for any number. "auto" does not take it where jax has several
    CPU devices: XLA splits its own product over a mesh, and not this call.
    """
    level, _ = KERNEL.status()
    if level is None or KERNEL.unavailable():
        return False
    most = MOST_ROWS[level].get(jnp.dtype(dtype).name, 0)
    return rows <= most or (turned and level == "avx512-bf16" and dtype == jnp.bfloat16)


def dense_matmul_cpu(x: jax.Array, w: jax.Array, *, transposed: bool, out_dtype: jnp.dtype) -> jax.Array:
    """See `dense_matmul` in the package; x is [M, K].

    Has no derivative of its own. Under vmap rows of x that share their weights become rows of one call;
    batched weights are multiplied one after the other.
    """
    wide = out_dtype if out_dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)
    target = KERNEL.target("DenseMatmulTransposed" if transposed else "DenseMatmul")
    return _product(target, transposed, wide)(x, w).astype(out_dtype)


@functools.cache
def _product(target: str, transposed: bool, out_dtype: jnp.dtype) -> Callable[..., jax.Array]:
    """The call as a batchable function of (x, w)."""

    @jax.custom_batching.custom_vmap
    def run(x, w):
        shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[0 if transposed else 1]), out_dtype)
        return jax.ffi.ffi_call(target, shape)(x, w)

    @run.def_vmap
    def run_batched(size: int, batched: list[bool], x, w):
        if not batched[1]:
            out = run(x.reshape(-1, x.shape[-1]), w)
            return out.reshape(size, -1, out.shape[-1]), True
        if batched[0]:
            return jax.lax.map(lambda pair: run(*pair), (x, w)), True
        return jax.lax.map(lambda one: run(x, one), w), True

    return run
