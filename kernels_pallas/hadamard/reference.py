"""Hadamard rotation in plain jnp, and how a size is split into two stages."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.hadamard.matrices import factor, hadamard_matrix

_MINOR = 128  # one vector register of lanes, one edge of the smallest matrix unit


def stages(size: int, transpose: bool) -> tuple[np.ndarray, np.ndarray]:
    """Matrices A [a, a] and B [b, b] of +-1 whose Kronecker product is the matrix of order size = a * b.

    B is the Sylvester matrix of the largest power of two up to 128 in the size, so `x @ kron(A, B)` is a
    product with B over the minor axis of x viewed as [..., a, b] and one with A over the major.
    """
    minor = min(factor(size)[1], _MINOR)
    major = hadamard_matrix(size // minor)
    # The Sylvester factor is symmetric.
    return (major.T if transpose else major), hadamard_matrix(minor)


def hadamard_reference(x: jax.Array, *, transpose: bool) -> jax.Array:
    """See `hadamard` in the package."""
    size = x.shape[-1]
    major, minor = (jnp.asarray(m, jnp.float32) for m in stages(size, transpose))
    y = x.astype(jnp.float32).reshape(*x.shape[:-1], major.shape[0], minor.shape[0])
    y = jnp.einsum("...ab,bc->...ac", y, minor, precision=lax.Precision.HIGHEST)
    y = jnp.einsum("...ac,ad->...dc", y, major, precision=lax.Precision.HIGHEST)
    return (y.reshape(x.shape) * size**-0.5).astype(x.dtype)
