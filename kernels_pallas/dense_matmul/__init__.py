"""Matrix product with unquantised weights, accumulated in float32.

XLA multiplies well on accelerators and for many rows anywhere; for few rows of bfloat16 on a CPU, where a
product is bound by reading its weights, a C++ kernel reads them faster.
"""

import functools
import math

import jax
import jax.numpy as jnp

from kernels_pallas.dense_matmul import cpu
from kernels_pallas.dense_matmul.reference import dense_matmul_reference
from kernels_pallas.dispatch import Implementation, choose
from kernels_pallas.errors import require
from kernels_pallas.foreign import portable_call

__all__ = ["dense_matmul"]

_OP = "dense_matmul"


def dense_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    transposed: bool = False,
    out_dtype: jnp.dtype | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """`x @ w`, or `x @ w.T` when transposed.

    Args:
      x: [..., K] float.
      w: float [K, N]; [N, K] when transposed.
      out_dtype: x's dtype by default.
      implementation: "xla"; the "cpu" kernel, for bfloat16 x and w, which a C++ compiler makes on first use;
        or "auto", which takes the kernel on a single CPU device for few rows (`cpu.MOST_ROWS`), else XLA.

    Returns:
      [..., N] of out_dtype, accumulated in float32. The kernel gives a row the same bits in a call of any
      number of rows.

    Raises:
      KernelError: inconsistent shapes or dtypes, or an implementation that does not take them.
    """
    require(
        x.ndim > 0 and w.ndim == 2, _OP, f"x must be [..., K] and w of rank 2, got {x.shape} and {w.shape}"
    )
    for name, dtype in (("x", x.dtype), ("w", w.dtype)):
        require(jnp.issubdtype(dtype, jnp.floating), _OP, f"{name} is {dtype}, expected float")
    k, n = w.shape[::-1] if transposed else w.shape
    require(x.shape[-1] == k, _OP, f"x has K = {x.shape[-1]}, and w {w.shape} has {k}")
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    rows = x.reshape(math.prod(x.shape[:-1]), k)
    chosen = choose(_OP, implementation, {"xla": None, "cpu": lambda: cpu.refusal(rows, w)})
    reference = functools.partial(dense_matmul_reference, transposed=transposed, out_dtype=out_dtype)
    kernel = functools.partial(cpu.dense_matmul_cpu, transposed=transposed, out_dtype=out_dtype)
    if chosen == "xla" or (implementation == "auto" and not cpu.few(rows.shape[0])):
        out = reference(rows, w)
    elif implementation == "auto":
        # What "auto" traces here may be compiled for a device that is not.
        out = portable_call(kernel, reference, rows, w)
    else:
        out = kernel(rows, w)
    return out.reshape(*x.shape[:-1], n)
