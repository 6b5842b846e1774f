"""Which problems the Hopper kernels take, known without importing them."""

import jax
import jax.numpy as jnp

BLOCK = 64  # tokens of a warpgroup's tile and of a step: the rows of one wgmma
_HEAD_SIZES = (64, 128)  # larger ones leave no shared memory for blocks in flight


def refusal(q: jax.Array, block_q: int | None, block_kv: int | None) -> str | None:
    """Why the kernels do not take these arguments, or None."""
    if q.dtype != jnp.bfloat16:
        return f"takes bfloat16, not {q.dtype}"
    if q.shape[3] not in _HEAD_SIZES:
        return f"takes head sizes {' and '.join(map(str, _HEAD_SIZES))}, not {q.shape[3]}"
    if {block_q, block_kv} - {None, BLOCK}:
        return f"handles {BLOCK} tokens at a time, not block_q {block_q}, block_kv {block_kv}"
    return None
