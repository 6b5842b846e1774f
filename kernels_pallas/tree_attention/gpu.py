"""Which problems the Hopper kernel takes, known without importing it."""

import jax
import jax.numpy as jnp

BLOCK = 64  # slots a step: the rows of one wgmma


def refusal(q: jax.Array, k: jax.Array, block_tables: jax.Array | None, block_kv: int | None) -> str | None:
    """Why the kernel does not take these arguments, or None."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16 queries, not {q.dtype}"
    if jnp.dtype(k.dtype).itemsize > 1 and k.dtype != q.dtype:
        return f"takes a cache of the query's dtype or of 8 bits, not {k.dtype} with {q.dtype}"
    if q.shape[3] % 64:
        return f"takes head sizes of a multiple of 64, not {q.shape[3]}"
    if q.shape[3] > 256:
        return f"takes head sizes up to 256, not {q.shape[3]}"
    if k.shape[2] % BLOCK:
        kind = "caches" if block_tables is None else "pages"
        return f"takes {kind} of a multiple of {BLOCK} slots, not {k.shape[2]}"
    if block_kv not in (None, BLOCK):
        return f"handles {BLOCK} slots at a time, not block_kv {block_kv}"
    return None
