"""Which rotations the Hopper kernel takes, known without importing it."""

import jax
import jax.numpy as jnp

from kernels_pallas.hadamard.reference import stages

CHUNK = 32  # major coordinates a product yields at a time
_MINORS = (64, 128)
_MAX_MAJOR = 160  # with x, two halves of the first stage and both matrices in shared memory


def refusal(x: jax.Array) -> str | None:
    """Why the kernel does not take these arguments, or None."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, not {x.dtype}"
    major, minor = (m.shape[0] for m in stages(x.shape[-1], False))
    if minor not in _MINORS:
        return f"takes sizes with a power of two of at least {_MINORS[0]} beside the base order, got {minor}"
    if major > _MAX_MAJOR:
        return f"takes sizes whose first stage is at most {_MAX_MAJOR}, got {major}"
    return None
