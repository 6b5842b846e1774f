"""Which problems the Hopper kernels take, and the way to them."""

from collections.abc import Sequence
from typing import Any

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


def ttt_attention_gpu(
    q: jax.Array,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    document_ids: jax.Array,
    *,
    scale: float,
    interpret: Any,
) -> jax.Array:
    """See `ttt_attention` in the package."""
    # Imported here for the reason that kernels_pallas.hopper gives.
    from kernels_pallas.hopper import simulated
    from kernels_pallas.ttt_attention import hopper
    from kernels_pallas.ttt_attention.join import Triangle, attend

    tiling = hopper.Tiling(scale=scale, interpret=simulated("ttt_attention", interpret))
    return attend(
        Triangle(hopper.forward, hopper.backward, tiling), q, tuple(keys), tuple(values), document_ids
    )
