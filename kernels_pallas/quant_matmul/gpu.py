"""Which products the Hopper kernel takes, known without importing it."""

import jax
import jax.numpy as jnp

STEP = 64  # rows of stored bytes a step: the depth of one swizzled operand
COLUMN_TILES = (128, 64)  # output channels a thread block takes: the rows of its products


def refusal(x: jax.Array, w: jax.Array, w_scale: jax.Array) -> str | None:
    """Why the kernel does not take these arguments, or None. x is [M, K], w_scale [K / group, N]."""
    if x.dtype not in (jnp.int8, jnp.bfloat16, jnp.float16):
        return f"takes int8, bfloat16 and float16 activations, not {x.dtype}"
    stored, columns = w.shape
    bits = 8 * stored // x.shape[1]
    group = stored // w_scale.shape[0]
    if group % STEP:
        smallest = STEP * 8 // bits
        return f"takes {bits}-bit groups of a multiple of {smallest} rows, got {group * 8 // bits}"
    if columns % COLUMN_TILES[-1]:
        return f"takes N as a multiple of {COLUMN_TILES[-1]}, got {columns}"
    return None
