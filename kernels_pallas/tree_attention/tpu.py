"""Tree attention for TPU: online softmax over cache blocks, all query rows of a key/value head against each
block.

One pass over the cache serves N nodes x G query heads, so a verify reads the cache once, as one
autoregressive step does. The grid's last extent is the largest number of live blocks of any row, so a cache's
unused tail costs nothing.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import online_softmax
from kernels_pallas.tree_attention.reference import compute_dtype

_LANES = 128
_ROW_ALIGNMENT = 16  # sublanes of a packed bfloat16 tile
_MAX_ROWS = 2048
_SCORE_BYTES = 1 << 20  # of float32 scores held at a time; about four such temporaries fit v4's 16 MiB


def refusal(q: jax.Array, k: jax.Array, block_tables: jax.Array | None, block_kv: int | None) -> str | None:
    """Why the kernel does not take these arguments, or None."""
    rows = q.shape[1] * (q.shape[2] // k.shape[1])
    if rows > _MAX_ROWS:
        return f"takes at most {_MAX_ROWS} rows of nodes x query heads per key/value head, got {rows}"
    if q.dtype == jnp.float16 or k.dtype == jnp.float16:
        return "takes float32 and bfloat16, not float16"
    if block_tables is not None:
        if block_kv not in (None, k.shape[2]):
            return f"handles a page of {k.shape[2]} slots at a time, not block_kv {block_kv}"
        if k.shape[2] % 8:
            return f"takes pages of a multiple of 8 slots, got {k.shape[2]}"
    elif block_kv is not None and block_kv % _LANES and block_kv < k.shape[2]:
        return f"takes block_kv as a multiple of {_LANES} or the whole cache, got {block_kv}"
    return None


def default_block(rows: int, slots: int) -> int:
    """Slots a block: 512, to hide a grid step behind its copy; fewer when the scores would not fit."""
    block = min(512, max(_LANES, _SCORE_BYTES // (4 * rows) // _LANES * _LANES))
    return min(block, slots)


def _kernel(
    length_ref,
    first_ref,
    live_ref,
    _tables_ref,
    q_ref,
    mask_ref,
    k_ref,
    v_ref,
    *refs,
    block: int,
    slots: int,
    nodes: int,
    scale: float,
    softcap: float | None,
    windowed: bool,
    quantised: bool,
    dtype: jnp.dtype,
):
    k_scale_ref, v_scale_ref = refs[:2] if quantised else (None, None)
    out_ref, lse_ref, acc_ref, peak_ref, total_ref = refs[-5:]
    row, step = pl.program_id(0), pl.program_id(2)
    length = length_ref[row]
    start = (first_ref[row] + step) * block
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None

    @pl.when(step == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)
        total_ref[...] = jnp.zeros_like(total_ref)
        peak_ref[...] = jnp.full_like(peak_ref, online_softmax.MASKED)

    def attend(whole: bool):
        values = v_ref[...].reshape(block, -1).astype(dtype)
        scores = lax.dot_general(
            q_ref[0, 0].astype(dtype),
            k_ref[...].reshape(block, -1).astype(dtype),
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
            precision=precision,
        )
        scores *= scale
        if quantised:
            scores *= k_scale_ref[...].reshape(1, block).astype(jnp.float32)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        written = None
        visible = None
        if not whole:
            slot = start + lax.broadcasted_iota(jnp.int32, (1, block), 1)
            written = slot < jnp.minimum(length + nodes, slots)
            prefix = (slot < length) & written
            visible = jnp.broadcast_to(prefix, scores.shape)
            if nodes:
                visible |= _tree_visible(mask_ref, slot - length, scores.shape, nodes) & written
            row_slot = start + lax.broadcasted_iota(jnp.int32, (block, 1), 0)
            # Unwritten slots may hold anything, and 0 * nan is nan.
            values = jnp.where(row_slot < jnp.minimum(length + nodes, slots), values, jnp.zeros_like(values))
        if windowed:
            words = mask_ref.shape[2] - 1
            slot = start + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            above = (slot >= mask_ref[0, :, words:]) | (slot >= length)
            visible = above if visible is None else visible & above
        weights, decay = online_softmax.update(scores, visible, peak_ref, total_ref)
        if quantised:
            v_scale = v_scale_ref[...].reshape(1, block).astype(jnp.float32)
            weights *= v_scale if written is None else jnp.where(written, v_scale, 0.0)
        acc_ref[...] = decay * acc_ref[...] + lax.dot_general(
            weights.astype(dtype),
            values,
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
            precision=precision,
        )

    alive = step < live_ref[row]
    inside = start + block <= jnp.minimum(length, slots)
    pl.when(alive & inside)(functools.partial(attend, whole=True))
    pl.when(alive & ~inside)(functools.partial(attend, whole=False))

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        total = total_ref[:, :1]
        empty = total == 0
        out_ref[0, 0] = (acc_ref[...] / jnp.where(empty, 1.0, total)).astype(out_ref.dtype)
        lse_ref[0, 0] = jnp.where(empty, -jnp.inf, peak_ref[:, :1] + jnp.log(jnp.where(empty, 1.0, total)))


def _tree_visible(mask_ref, node: jax.Array, shape: tuple[int, ...], nodes: int) -> jax.Array:
    """bool `shape`: the ancestor bit of node number `node` [1, block] in each query row's words."""
    bits = jnp.zeros(shape, jnp.int32)
    for word in range(-(-nodes // 32)):
        # The shift is logical: bit 31 is a node like any other, not a sign.
        shifted = lax.shift_right_logical(
            jnp.broadcast_to(mask_ref[0, :, word : word + 1], shape), jnp.broadcast_to(node & 31, shape)
        )
        bits = jnp.where(node >> 5 == word, shifted, bits)
    return (bits & 1 == 1) & (node >= 0) & (node < nodes)


def tree_attention_tpu(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    words: jax.Array | None,
    lengths: jax.Array,
    floor: jax.Array,
    *,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    block_tables: jax.Array | None,
    scale: float,
    softcap: float | None,
    out_dtype: jnp.dtype,
    windowed: bool,
    block_kv: int | None,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """See `tree_attention` in the package; `lengths` and `floor` count from the cache's first slot."""
    batch, nodes, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    rows = nodes * group
    padded = -(-rows // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    paged = block_tables is not None
    slots = k.shape[2] * (block_tables.shape[1] if block_tables is not None else 1)
    block = k.shape[2] if paged else min(block_kv or default_block(padded, slots), slots)
    tree_nodes = 0 if words is None else nodes

    packed = q.reshape(batch, nodes, kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
    packed = jnp.pad(packed.reshape(batch, kv_heads, rows, dim), ((0, 0), (0, 0), (0, padded - rows), (0, 0)))
    mask = floor[..., None] if words is None else jnp.concatenate([words, floor[..., None]], axis=-1)
    mask = jnp.pad(jnp.repeat(mask, group, axis=1), ((0, 0), (0, padded - rows), (0, 0)))

    # The tree sits behind the prefix, whatever the window hides of the prefix.
    first = jnp.clip(jnp.minimum(jnp.min(floor, axis=1), lengths), 0, slots) // block
    end = -(-jnp.clip(lengths + tree_nodes, 0, slots) // block)
    live = jnp.maximum(end - first, 0)
    tables = block_tables if block_tables is not None else jnp.zeros((1, 1), jnp.int32)

    def cache_block(b, step, first, live, tables):
        # A dead step names the last live block again, which Pallas does not copy twice.
        index = first[b] + jnp.clip(step, 0, jnp.maximum(live[b] - 1, 0))
        index = jnp.minimum(index, pl.cdiv(slots, block) - 1)
        if paged:
            return jnp.where(live[b] > 0, tables[b, index], 0), 0
        return b, index

    def cache_map(b, h, step, _lengths, first, live, tables):
        outer, index = cache_block(b, step, first, live, tables)
        return outer, h, index, 0

    def scale_map(b, h, step, _lengths, first, live, tables):
        outer, index = cache_block(b, step, first, live, tables)
        return outer, h, 0, index

    def row_map(b, h, step, *_):
        return b, h, 0, 0

    in_specs = [
        pl.BlockSpec((1, 1, padded, dim), row_map),
        pl.BlockSpec((1, padded, mask.shape[2]), lambda b, h, step, *_: (b, 0, 0)),
        pl.BlockSpec((1, 1, block, dim), cache_map),
        pl.BlockSpec((1, 1, block, dim), cache_map),
    ]
    operands = [packed, mask, k, v]
    if k_scale is not None and v_scale is not None:
        in_specs += [pl.BlockSpec((1, 1, 1, block), scale_map)] * 2
        operands += [k_scale[:, :, None], v_scale[:, :, None]]

    if interpret is False:
        # Or else XLA may copy a whole cache to VMEM before the call, its unused part included (seen for
        # TPU7x).
        operands[2:] = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in operands[2:]]

    out, lse = pl.pallas_call(
        functools.partial(
            _kernel,
            block=block,
            slots=slots,
            nodes=tree_nodes,
            scale=scale,
            softcap=softcap,
            windowed=windowed,
            quantised=k_scale is not None,
            dtype=compute_dtype(q, k),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, kv_heads, jnp.maximum(jnp.max(live), 1)),
            in_specs=in_specs,
            out_specs=[pl.BlockSpec((1, 1, padded, dim), row_map), pl.BlockSpec((1, 1, padded, 1), row_map)],
            scratch_shapes=[
                pltpu.VMEM((padded, dim), jnp.float32),
                pltpu.VMEM((padded, _LANES), jnp.float32),
                pltpu.VMEM((padded, _LANES), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, kv_heads, padded, dim), out_dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, padded, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        # For a full cache: how much of it is in use is not known before the call.
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * kv_heads * padded * slots * dim,
            transcendentals=batch * kv_heads * padded * slots,
            bytes_accessed=2
            * batch
            * kv_heads
            * slots
            * (dim * k.dtype.itemsize + (4 if k_scale is not None else 0))
            + packed.nbytes
            + packed.size * out_dtype.itemsize,
        ),
        interpret=interpret,
        name="tree_attention",
    )(lengths, first, live, tables, *operands)

    def unpack(x: jax.Array) -> jax.Array:
        x = x[:, :, :rows].reshape(batch, kv_heads, nodes, group, -1).transpose(0, 2, 1, 3, 4)
        return x.reshape(batch, nodes, heads, -1)

    return unpack(out), unpack(lse)[..., 0]
