"""Hadamard rotation for TPU: both stages on the matrix unit, one read and one write of x."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.hadamard.reference import stages

_BLOCK_BYTES = 1 << 19  # of float32 a block, beside the stages' matrices in v4's 16 MiB
_LANES = 128
_MAX_MAJOR = 1024


def refusal(x: jax.Array) -> str | None:
    """Why the kernel does not take these arguments, or None."""
    major, _ = stages(x.shape[-1], False)
    if x.dtype == jnp.float16:
        return "takes float32 and bfloat16, not float16"
    if major.shape[0] > _MAX_MAJOR:
        return f"takes sizes whose first stage is at most {_MAX_MAJOR}, got {major.shape[0]}"
    return None


def _kernel(x_ref, major_ref, minor_ref, out_ref, *, scale: float):
    contract = functools.partial(
        lax.dot_general, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    minor_matrix = minor_ref[...].astype(jnp.float32)
    major_matrix = major_ref[...].astype(jnp.float32)
    for row in range(x_ref.shape[0]):
        y = contract(x_ref[row].astype(jnp.float32), minor_matrix, (((1,), (0,)), ((), ())))
        # Contracting the first axis of both: A.T @ y is the major stage of `x @ kron(A, B)`.
        y = contract(major_matrix, y, (((0,), (0,)), ((), ())))
        out_ref[row] = (y * scale).astype(out_ref.dtype)


def hadamard_tpu(x: jax.Array, *, transpose: bool, interpret: Any) -> jax.Array:
    """See `hadamard` in the package."""
    size = x.shape[-1]
    major, minor = (jnp.asarray(m, jnp.bfloat16) for m in stages(size, transpose))
    y = x.reshape(-1, major.shape[0], minor.shape[0])
    rows = max(1, min(y.shape[0], 16, _BLOCK_BYTES // (4 * y.shape[1] * max(y.shape[2], _LANES))))
    block = pl.BlockSpec((rows, *y.shape[1:]), lambda i: (i, 0, 0))
    whole = [pl.BlockSpec(m.shape, lambda i: (0, 0)) for m in (major, minor)]
    out = pl.pallas_call(
        functools.partial(_kernel, scale=size**-0.5),
        grid=(pl.cdiv(y.shape[0], rows),),
        in_specs=[block, *whole],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(y.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=2 * y.size * (y.shape[1] + y.shape[2]), transcendentals=0, bytes_accessed=2 * y.nbytes
        ),
        interpret=interpret,
        name="hadamard",
    )(y, major, minor)
    return out.reshape(x.shape)
