"""Which problems the TPU kernels take, and their block sizes."""

from collections.abc import Sequence
from typing import Any

import jax

from kernels_pallas.ttt_attention import flash
from kernels_pallas.ttt_attention.join import Triangle, attend

_LANES = 128
_TARGET_ROWS = 512
_BLOCK_KV = 256


def refusal(q: jax.Array, k: jax.Array, block_q: int | None, block_kv: int | None) -> str | None:
    """Why the kernel does not take these arguments, or None."""
    group = q.shape[2] // k.shape[2]
    if group > _TARGET_ROWS // 16:
        return f"takes at most {_TARGET_ROWS // 16} query heads per key/value head, got {group}"
    if block_kv is not None and block_kv % _LANES:
        return f"takes block_kv as a multiple of {_LANES}, got {block_kv}"
    if block_q is not None and (block_q % 16 or (block_kv or _BLOCK_KV) % block_q):
        return (
            f"takes block_q as a multiple of 16 that divides block_kv {block_kv or _BLOCK_KV}, got {block_q}"
        )
    return None


def ttt_attention_tpu(
    q: jax.Array,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    document_ids: jax.Array,
    *,
    scale: float,
    block_q: int | None,
    block_kv: int | None,
    interpret: Any,
) -> jax.Array:
    """See `ttt_attention` in the package."""
    group = q.shape[2] // keys[0].shape[2]
    block_kv = min(block_kv or _BLOCK_KV, -(-q.shape[1] // _LANES) * _LANES)
    if block_q is None:
        block_q = 16
        while block_q * 2 * group <= _TARGET_ROWS and block_kv % (block_q * 2) == 0:
            block_q *= 2
    tiling = flash.Tiling(block_q=min(block_q, block_kv), block_kv=block_kv, scale=scale, interpret=interpret)
    return attend(
        Triangle(flash.forward, flash.backward, tiling), q, tuple(keys), tuple(values), document_ids
    )
