"""The implementations of attention: XLA's (``attention_xla``), the Pallas kernels', a CPU's C++ kernel's.

Each takes the arguments of ``nn.attention.attend``, which says what they mean and chooses among them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax.nn.attention_xla import attend_xla, default_positions, scale_of
from eaglejax.nn.kv_codec import PackedKV, Stored
from eaglejax.nn.visible import Visible
from kernels_pallas import cache_attention
from kernels_pallas.foreign import portable_call

MOST_ROWS = 1024
"""Queries x query heads of a key/value head in one kernel call: 2048 overflow the VMEM of v4, v5e and v5p."""


@dataclasses.dataclass(frozen=True)
class Wants:
    """What a call of attention asks beyond the plain one, and kernels may lack.

    ``lse``: the log-sum-exps; ``parts``: pages, or a cache that begins at another slot; ``selected``: slots
    of the prefix that each query sees alone.
    """

    lse: bool = False
    parts: bool = False
    selected: bool = False


def _attend_pallas(
    q: jax.Array,
    k: Stored,
    v: Stored,
    lengths: jax.Array,
    visible: Visible,
    positions: jax.Array,
    *,
    slot_positions: jax.Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    slot_offset: jax.Array | int,
    block_tables: jax.Array | None,
    out_dtype: Any,
    kernel: str,
    interpret: bool | None,
    block_kv: int | None,
) -> tuple[jax.Array, jax.Array]:
    # Importing Pallas takes a third of a second, which those who do not use it are spared.
    from kernels_pallas.tree_attention import merge, pack_ancestors, tree_attention

    n = q.shape[1]
    m = visible.slots(n)
    among = visible.new(n, lengths)
    scales: dict[str, Any] = _kernel_scales(k, v)
    k, v = _array(k), _array(v)
    if k.dtype.itemsize > 1:
        q = q.astype(k.dtype)
    whole = q
    if m > n:
        # The kernel has a query for every new slot: those that were written earlier ask for nothing and see
        # themselves, and their results are dropped.
        earlier = jnp.eye(m, dtype=bool)[: m - n]
        among = jnp.concatenate([jnp.broadcast_to(earlier, (q.shape[0], *earlier.shape)), among], axis=1)
        whole = jnp.pad(q, ((0, 0), (m - n, 0), (0, 0), (0, 0)))
    new_positions = default_positions(positions, slot_positions)
    words = pack_ancestors(among)
    part = queries_a_call(q, k)
    shared: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    call: dict[str, Any] = {"block_kv": block_kv, "implementation": kernel, "interpret": interpret}
    call |= {"slot_offset": slot_offset, "block_tables": block_tables} | shared | scales
    if m <= part:
        out, lse = tree_attention(
            whole, k, v, words, lengths, positions=new_positions, out_dtype=out_dtype, **call
        )
        return out[:, m - n :], lse[:, m - n :]
    # A prompt chunk: the kernel attends to the prefix, part by part, and XLA among the new tokens.
    prefix = [
        tree_attention(
            q[:, i : i + part],
            k,
            v,
            None,
            lengths,
            positions=positions[:, i : i + part],
            out_dtype=jnp.float32,
            **call,
        )
        for i in range(0, n, part)
    ]
    new_scales: dict[str, Any] = {name: _new_slots(x, lengths, m) for name, x in scales.items()}
    own, own_lse = tree_attention(
        whole,
        _new_slots(k, lengths, m),
        _new_slots(v, lengths, m),
        words,
        jnp.zeros_like(lengths),
        positions=new_positions,
        out_dtype=jnp.float32,
        implementation="xla",
        **shared,
        **new_scales,
    )
    outs, lses = (jnp.concatenate(x, axis=1) for x in zip(*prefix, strict=True))
    out, lse = merge(jnp.stack([outs, own[:, m - n :]]), jnp.stack([lses, own_lse[:, m - n :]]))
    return out.astype(out_dtype), lse


def _attend_cpu(
    q: jax.Array,
    k: Stored,
    v: Stored,
    lengths: jax.Array,
    visible: Visible,
    positions: jax.Array,
    *,
    slot_positions: jax.Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    slot_offset: jax.Array | int,
    block_tables: jax.Array | None,
    out_dtype: Any,
) -> tuple[jax.Array, None]:
    shared: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "out_dtype": out_dtype}
    parts: dict[str, Any] = {"slot_offset": slot_offset, "block_tables": block_tables}

    def xla(q, k, v, lengths, visible, positions, places):
        return attend_xla(q, k, v, lengths, visible, positions, slot_positions=places, **parts, **shared)[0]

    def kernel(q, k, v, lengths, visible, positions, places):
        scales = scale_of(k), scale_of(v)
        return cache_attention.cache_attention(
            q,
            _array(k),
            _array(v),
            lengths,
            visible.new(q.shape[1], lengths),
            positions,
            places,
            *scales,
            **shared,
        )

    # What is traced here may be compiled for a device that is not.
    return portable_call(
        kernel, xla, q, k, v, lengths, visible, positions, default_positions(positions, slot_positions)
    ), None


def _array(stored: Stored) -> jax.Array:
    """The stored array itself, which a kernel reads."""
    return stored.codes if isinstance(stored, PackedKV) else stored


def _kernel_scales(k: Stored, v: Stored) -> dict[str, jax.Array]:
    """The kernel's scales of each slot; ones where a format has none, as the kernel wants them for int8."""
    return {
        name: jnp.ones(x.shape[:3], jnp.float32) if x.scale is None else x.scale
        for name, x in (("k_scale", k), ("v_scale", v))
        if isinstance(x, PackedKV)
    }


def _new_slots(cached: jax.Array, lengths: jax.Array, count: int) -> jax.Array:
    """The ``count`` slots behind each row's prefix, [B, Hkv, count, ...]."""
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, count, axis=1))(cached, lengths)


def queries_a_call(q: jax.Array, k: Stored) -> int:
    """Most queries that one kernel call takes."""
    return max(1, MOST_ROWS // (q.shape[2] // k.shape[1]))


def _common_refusal(q: jax.Array, k: Stored, v: Stored, wants: Wants) -> str | None:
    """What no kernel takes."""
    if wants.selected:
        return "reads a prefix whole, not slots chosen for each query"
    if k.shape[3] != v.shape[3]:
        return f"takes keys and values of one size, not {k.shape[3]} and {v.shape[3]}"
    if isinstance(k, PackedKV) and not k.format.kernel:
        return f"reads arrays of numbers, not the packed codes of a {k.format.name} cache"
    return None


def pallas_refusal(
    kernel: str,
    block_kv: int | None,
    q: jax.Array,
    k: Stored,
    v: Stored,
    slots: int,
    wants: Wants,
    block_tables: jax.Array | None,
) -> str | None:
    """Why the kernel does not take these arguments for ``slots`` new slots, or None."""
    from kernels_pallas.tree_attention import gpu, tpu

    refusal = _common_refusal(q, k, v, wants)
    if refusal is None and wants.parts and slots > queries_a_call(q, k):
        refusal = f"takes at most {queries_a_call(q, k)} new tokens over pages or a part of a cache"
    if refusal:
        return refusal
    asked = jax.ShapeDtypeStruct(
        (q.shape[0], min(slots, queries_a_call(q, k)), *q.shape[2:]),
        k.dtype if k.dtype.itemsize > 1 else q.dtype,
    )
    return {"tpu": tpu, "gpu": gpu}[kernel].refusal(asked, _array(k), block_tables, block_kv)


def cpu_refusal(q: jax.Array, k: Stored, v: Stored, wants: Wants) -> str | None:
    """Why the C++ kernel does not take these arguments, or None."""
    if wants.lse:
        return "yields no log-sum-exp"
    if wants.parts:
        return "reads whole rows of a cache, not pages or parts"
    return _common_refusal(q, k, v, wants) or cache_attention.refusal(q, _array(k))


IMPLEMENTATIONS: dict[str, Callable[..., tuple[jax.Array, jax.Array | None]]] = {
    "xla": attend_xla,
    "tpu": functools.partial(_attend_pallas, kernel="tpu"),
    "gpu": functools.partial(_attend_pallas, kernel="gpu"),
    "cpu": _attend_cpu,
}
"""Attention by name. Each takes the arguments of :func:`attend`; the Pallas kernels also how and in what
blocks."""
