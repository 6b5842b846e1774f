"""Online Hadamard rotation of the last axis (QuaRot, arXiv:2404.00456), for sizes 2^k times a Paley order."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.dispatch import Implementation, Interpret, Way, run
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
    ways = {
        "xla": Way(functools.partial(hadamard_reference, transpose=transpose)),
        "tpu": Way(functools.partial(tpu.hadamard_tpu, transpose=transpose), tpu.refusal(x)),
        "gpu": Way(functools.partial(_gpu, transpose=transpose), gpu.refusal(x)),
    }
    return run(_OP, ways, (x,), implementation, interpret)


def _gpu(x: jax.Array, **options: Any) -> jax.Array:
    # Imported here for the reason that kernels_pallas.hopper gives.
    from kernels_pallas.hadamard.hopper import hadamard_hopper

    return hadamard_hopper(x, **options)
