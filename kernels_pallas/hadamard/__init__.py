"""Online Hadamard rotation of the last axis (QuaRot, arXiv:2404.00456), for sizes 2^k times a Paley order."""

import jax
import jax.numpy as jnp

from kernels_pallas.dispatch import Implementation, Interpret, choose, resolve_interpret
from kernels_pallas.errors import require
from kernels_pallas.hadamard import gpu, tpu
from kernels_pallas.hadamard.matrices import factor, hadamard_matrix
from kernels_pallas.hadamard.reference import hadamard_reference

__all__ = ["factor", "hadamard", "hadamard_matrix"]

_OP = "hadamard"


def hadamard(
    x: jax.Array,
    *,
    transpose: bool = False,
    implementation: Implementation = "auto",
    interpret: Interpret = None,
) -> jax.Array:
    """Multiply the last axis by the orthonormal Hadamard matrix: `x @ hadamard_matrix(n) / sqrt(n)`.

    The product is taken in two stages of about sqrt(n) each, in float32 whatever the dtype of x; of the first
    one's result the GPU kernel hands on 16 bits.

    Args:
      x: [..., n] float32, bfloat16 or float16; n must have a matrix, see `factor`.
      transpose: multiply by the transpose, which is the inverse.
      implementation: "xla" everywhere, the "tpu" and "gpu" (Hopper) kernels, or "auto", see `choose`.
      interpret: see `kernels_pallas.dispatch.resolve_interpret`.

    Returns:
      [..., n] of x's dtype.

    Raises:
      KernelError: no matrix for n is known here, or x is not floating.
    """
    require(x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating), _OP, f"x is {x.dtype} {x.shape}, not float")
    factor(x.shape[-1])
    chosen = choose(_OP, implementation, {"xla": None, "tpu": tpu.refusal(x), "gpu": gpu.refusal(x)})
    interpret = resolve_interpret(_OP, chosen, interpret)
    if chosen == "xla":
        return hadamard_reference(x, transpose=transpose)
    if chosen == "gpu":
        return gpu.hadamard_gpu(x, transpose=transpose, interpret=interpret)
    return tpu.hadamard_tpu(x, transpose=transpose, interpret=interpret)
