"""Attention over a cache and writes into it on a CPU: C++ kernels that XLA calls, compiled on first use.

XLA:CPU computes attention over every slot of the cache, and turns writes of several rows into a bfloat16
cache into one pass over all of it for each row. These read what is written and write what is new.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import native
from kernels_pallas.foreign import Kernel

_NATIVE = Path(__file__).parent / "native"
KERNEL = Kernel(
    op="cache_attention",
    source=_NATIVE / "cache_attention.cc",
    symbols=("CacheAttention",),
    left="attention is left to XLA, which is slower on a CPU",
    levels=native.VECTOR_LEVELS,
)
WRITE_KERNEL = Kernel(
    op="cache_write",
    source=_NATIVE / "cache_write.cc",
    symbols=("CacheWrite",),
    left="writes into a cache are left to XLA, which is slower on a CPU",
)
__all__ = ["KERNEL", "WRITE_KERNEL", "cache_attention", "cache_write", "refusal"]

LANES = 16
"""Head sizes must be a multiple of this: numbers in the widest register."""


def refusal(q: jax.Array, k: jax.Array) -> str | None:
    """Why the attention kernel does not take queries q [B, N, Hq, D] and keys k [B, Hkv, S, D], or None."""
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"takes float32 and bfloat16 queries, not {q.dtype}"
    if k.dtype not in (jnp.float32, jnp.bfloat16, jnp.int8):
        return f"takes a cache of float32, bfloat16 or int8, not {k.dtype}"
    if q.shape[3] % LANES:
        return f"takes head sizes of a multiple of {LANES}, not {q.shape[3]}"
    return KERNEL.unavailable()


def cache_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    visible: jax.Array,
    positions: jax.Array,
    slot_positions: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    out_dtype: Any,
) -> jax.Array:
    """Attend with q [B, N, Hq, D] over k, v [B, Hkv, S, D] -> [B, N, Hq, D] in `out_dtype`.

    Slots below lengths [B] are seen by all; of the M behind them, visible [B, N, M] says which.
    `positions` [B, N] and `slot_positions` [B, M] count for a `window` alone. k_scale, v_scale: float32
    [B, Hkv, S] or None. A query that sees nothing yields zeros. Scores, softmax and sums are float32. A
    query's result has the same bits whatever else the call holds. Under vmap one call follows the other;
    there are no derivatives.
    """
    none = jnp.zeros((0,), jnp.float32)
    call = jax.ffi.ffi_call(
        KERNEL.target("CacheAttention"), jax.ShapeDtypeStruct(q.shape, out_dtype), vmap_method="sequential"
    )
    return call(
        q,
        k,
        v,
        lengths.astype(jnp.int32),
        visible,
        positions.astype(jnp.int32),
        slot_positions.astype(jnp.int32),
        none if k_scale is None else k_scale,
        none if v_scale is None else v_scale,
        scale=np.float32(scale),
        softcap=np.float32(softcap or 0),
        window=np.int64(window or 0),
    )


def cache_write(cached: jax.Array, fresh: jax.Array, starts: jax.Array) -> jax.Array:
    """`cached` [B, H, S, ...] with `fresh` [B, H, N, ...], of its dtype, at slots `starts[b]` + (0 .. N-1).

    In place where `cached` is not used again, else in a copy. A start that leaves no room is moved back, as
    `dynamic_update_slice` does. Under vmap one call follows the other; there are no derivatives.
    """
    call = jax.ffi.ffi_call(
        WRITE_KERNEL.target("CacheWrite"),
        jax.ShapeDtypeStruct(cached.shape, cached.dtype),
        vmap_method="sequential",
        input_output_aliases={0: 0},
    )
    return call(cached, fresh, starts.astype(jnp.int32))
