"""Matrix product with unquantised weights, accumulated in float32.

XLA multiplies well on accelerators and for many rows anywhere; for few rows on a CPU, where a product is
bound by reading its weights, a C++ kernel reads them faster.
"""

import functools
import math

import jax
import jax.numpy as jnp

from kernels_pallas.dense_matmul import cpu
from kernels_pallas.dense_matmul.reference import dense_matmul_reference
from kernels_pallas.dispatch import Implementation, Way, run
from kernels_pallas.errors import require

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

    Its gradients are products of the same kind: what comes back is rounded to the wider dtype of x and w, and
    sums are in float32. There is no forward-mode derivative.

    Args:
      x: [..., K] float.
      w: float [K, N]; [N, K] when transposed.
      out_dtype: x's dtype by default.
      implementation: "xla"; the "cpu" kernel, for x and w both bfloat16 or both float32, which a C++ compiler
        makes on first use;
        or "auto", which takes the kernel on a single CPU device for few rows (`cpu.serves`), else XLA.

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
    return _product(rows, w, transposed, out_dtype, implementation).reshape(*x.shape[:-1], n)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _product(
    x: jax.Array, w: jax.Array, transposed: bool, out_dtype: jnp.dtype, implementation: Implementation
) -> jax.Array:
    return _multiply(x, w, transposed, out_dtype, implementation)


def _forward(x, w, transposed, out_dtype, implementation):
    return _product(x, w, transposed, out_dtype, implementation), (x, w)


def _backward(transposed, out_dtype, implementation, kept, change):
    # jax's own rule would multiply what comes back, in float32, with operands widened from bfloat16. Rounded
    # to their dtype it takes their rate; sums stay in float32.
    x, w = kept
    change = change.astype(jnp.promote_types(x.dtype, w.dtype))
    by_x = _multiply(change, w, not transposed, x.dtype, implementation)
    left, right = (change, x) if transposed else (x, change)
    return by_x, _multiply(left.T, right, False, w.dtype, implementation, turned=True)


_product.defvjp(_forward, _backward)


def _multiply(
    x: jax.Array,
    w: jax.Array,
    transposed: bool,
    out_dtype: jnp.dtype,
    implementation: Implementation,
    *,
    turned: bool = False,
) -> jax.Array:
    """The product by what ``implementation`` names; ``turned``: x is a transpose (a gradient by weights)."""
    reference = functools.partial(dense_matmul_reference, transposed=transposed, out_dtype=out_dtype)
    kernel = functools.partial(cpu.dense_matmul_cpu, transposed=transposed, out_dtype=out_dtype)

    def unasked() -> str | None:
        return (
            None if cpu.serves(x.shape[0], x.dtype, turned=turned) else "is the slower one for so many rows"
        )

    ways = {"xla": Way(reference), "cpu": Way(kernel, lambda: cpu.refusal(x, w), unasked)}
    out: jax.Array = run(_OP, ways, (x, w), implementation)
    return out
