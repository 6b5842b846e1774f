"""Tree attention for Hopper GPUs: the cache is split over thread blocks, whose parts are merged by
log-sum-exp.

The products are swapped, scores^T = K Q^T and out^T = V^T P, so that the 64 rows a wgmma instruction wants
are cache slots and head channels, and the nodes x query heads are its columns, of which 16 do. Eight-bit
caches are copied as they are and widened in shared memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import online_softmax
from kernels_pallas.hopper import MULTIPROCESSORS, load, simulated, swizzled
from kernels_pallas.tree_attention.gpu import BLOCK

_STAGES = 4
_STAGE_BYTES = 128 << 10  # of shared memory for the blocks in flight
_COLUMN_TILES = (16, 32, 64)
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)
_ROWS = plgpu.Layout.WGMMA.reduce(1)


def column_tile(rows: int, dim: int) -> int:
    """Nodes x query heads a thread block takes: registers hold two float32 accumulators [dim, columns]."""
    allowed = [c for c in _COLUMN_TILES if c * dim <= _COLUMN_TILES[-1] * 128]
    return next((c for c in allowed if rows <= c), allowed[-1])


def default_splits(batch: int, kv_heads: int, tiles: int, slots: int) -> int:
    """Thread blocks a cache is split over: two a multiprocessor, of at least 4 steps each."""
    return max(1, min(2 * MULTIPROCESSORS // (batch * kv_heads * tiles), slots // (4 * BLOCK)))


def tree_attention_hopper(
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
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Parts of the attention, to be merged over their first axis.

    See `tree_attention` in the package; `lengths` and `floor` count from the cache's first slot.

    Returns:
      float32 [splits, B, N, Hq, D] outputs and float32 [splits, B, N, Hq] log-sum-exps.
    """
    interpret = simulated("tree_attention", interpret)
    batch, nodes, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    rows = nodes * group
    columns = column_tile(rows, dim)
    tiles = -(-rows // columns)
    padding = tiles * columns - rows
    paged = block_tables is not None
    page = k.shape[2]
    slots = page * (block_tables.shape[1] if block_tables is not None else 1)
    tree_nodes = 0 if words is None else nodes
    splits = default_splits(batch, kv_heads, tiles, slots)
    dtype = q.dtype
    narrow = jnp.dtype(k.dtype).itemsize == 1
    stages = min(_STAGES, _STAGE_BYTES // (2 * BLOCK * dim * jnp.dtype(k.dtype).itemsize))
    scaled = k_scale is not None

    packed = q.reshape(batch, nodes, kv_heads, group, dim).transpose(0, 2, 4, 1, 3)
    packed = jnp.pad(packed.reshape(batch, kv_heads, dim, rows), ((0, 0), (0, 0), (0, 0), (0, padding)))
    packed = packed.reshape(batch, kv_heads, dim, tiles, columns).transpose(0, 1, 3, 2, 4)
    mask = (
        floor[:, None]
        if words is None
        else jnp.concatenate([words.transpose(0, 2, 1), floor[:, None]], axis=1)
    )
    mask = jnp.pad(jnp.repeat(mask, group, axis=2), ((0, 0), (0, 0), (0, padding)))
    mask = mask.reshape(batch, -1, tiles, columns).transpose(0, 2, 1, 3)

    # The tree sits behind the prefix, whatever the window hides of the prefix.
    first = jnp.clip(jnp.minimum(jnp.min(floor, axis=1), lengths), 0, slots) // BLOCK
    end = -(-jnp.clip(lengths + tree_nodes, 0, slots) // BLOCK)
    steps = -(-jnp.maximum(end - first, 0) // splits)
    starts = first[:, None] + steps[:, None] * jnp.arange(splits)
    counts = jnp.clip(end[:, None] - starts, 0, steps[:, None])
    plan = jnp.stack([jnp.broadcast_to(lengths[:, None], starts.shape), starts, counts], axis=-1)
    operands = [packed, mask, plan.astype(jnp.int32), k, v]
    if block_tables is not None:
        operands.append(block_tables)
    if k_scale is not None and v_scale is not None:
        operands += [k_scale.astype(jnp.float32), v_scale.astype(jnp.float32)]

    transforms = swizzled(columns)
    stored = swizzled(64, 1) if narrow else transforms
    scratch: dict[str, Any] = {
        "q": plgpu.SMEM((dim, columns), dtype, transforms=transforms),
        "weights": plgpu.SMEM((BLOCK, columns), dtype, transforms=transforms),
        "k": plgpu.SMEM((stages, BLOCK, dim), k.dtype, transforms=stored),
        "v": plgpu.SMEM((stages, BLOCK, dim), v.dtype, transforms=stored),
        "out": plgpu.SMEM((dim, columns), jnp.float32),
        "lse": plgpu.SMEM((columns,), jnp.float32),
        "q_barrier": plgpu.Barrier(),
        "barriers": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    }
    if narrow:
        scratch["wide"] = plgpu.SMEM((BLOCK, dim), dtype, transforms=transforms)

    def body(*refs, **scratch_refs):
        inputs, (out_ref, lse_ref) = refs[: len(operands)], refs[len(operands) :]
        q_ref, mask_ref, plan_ref, k_ref, v_ref = inputs[:5]
        tables_ref = inputs[5] if paged else None
        k_scale_ref, v_scale_ref = inputs[-2:] if scaled else (None, None)
        split, tile = lax.axis_index("split"), lax.axis_index("tile")
        head, row = lax.axis_index("head"), lax.axis_index("row")
        length, start, count = (plan_ref[row, split, i] for i in range(3))
        limit = jnp.minimum(length + tree_nodes, slots)

        def place(step):
            """Leading index and first slot, in the cache arrays, of a step's block."""
            slot = (start + step) * BLOCK
            if tables_ref is None:
                return row, slot
            return tables_ref[row, lax.div(slot, page)], lax.rem(slot, page)

        def fetch(step):
            stage = lax.rem(step, stages)
            outer, slot = place(step)
            for name, source in (("k", k_ref), ("v", v_ref)):
                plgpu.copy_gmem_to_smem(
                    source.at[outer, head, pl.ds(slot, BLOCK)],
                    scratch_refs[name].at[stage],
                    scratch_refs["barriers"].at[stage],
                )

        plgpu.copy_gmem_to_smem(q_ref.at[row, head, tile], scratch_refs["q"], scratch_refs["q_barrier"])
        for step in range(stages - 1):
            pl.when(step < count)(functools.partial(fetch, jnp.int32(step)))
        plgpu.barrier_wait(scratch_refs["q_barrier"])
        row_mask = [load(mask_ref.at[row, tile, word], _COLUMNS, False) for word in range(mask_ref.shape[2])]

        def widen(name, stage, written=None):
            """An 8-bit block as a wgmma operand; slots outside `written` become 0."""
            # Hopper converts 8-bit floats to float16 and float32, not to bfloat16.
            tile = load(scratch_refs[name].at[stage], plgpu.Layout.WGMMA, True).astype(jnp.float32)
            if written is not None:
                tile = jnp.where(lax.broadcast_in_dim(written, tile.shape, [0]), tile, jnp.zeros_like(tile))
            scratch_refs["wide"][...] = tile.astype(dtype)
            plgpu.commit_smem()
            return scratch_refs["wide"]

        def clear_unwritten(block, written):
            tile = load(block, plgpu.Layout.WGMMA, True)
            block[...] = jnp.where(lax.broadcast_in_dim(written, tile.shape, [0]), tile, jnp.zeros_like(tile))
            plgpu.commit_smem()

        def step_body(step, carry):
            acc, peak, total = carry
            stage = lax.rem(step, stages)
            plgpu.barrier_wait(scratch_refs["barriers"].at[stage])
            # All four warps must be past the last step before its buffers are filled anew.
            plgpu.commit_smem()
            pl.when(step + stages - 1 < count)(lambda: fetch(step + stages - 1))
            first_slot = (start + step) * BLOCK
            keys = widen("k", stage) if narrow else scratch_refs["k"].at[stage]

            def scores_body(acc_ref):
                plgpu.wgmma(acc_ref, keys, scratch_refs["q"])
                return acc_ref[...]

            scores = pl.run_scoped(scores_body, plgpu.ACC((BLOCK, columns), jnp.float32)) * scale
            outer, slot_in_page = place(step)
            if scaled:
                k_scales = load(k_scale_ref.at[outer, head, pl.ds(slot_in_page, BLOCK)], _ROWS, False)
                scores *= lax.broadcast_in_dim(k_scales, scores.shape, [0])
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            slot = first_slot + plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
            spread = functools.partial(lax.broadcast_in_dim, shape=scores.shape, broadcast_dimensions=[1])
            visible = (slot < length) & (slot >= spread(row_mask[-1]))
            if tree_nodes:
                node = slot - length
                bits = jnp.zeros_like(node)
                for word, values in enumerate(row_mask[:-1]):
                    bits = jnp.where(
                        node >> 5 == word, lax.shift_right_logical(spread(values), node & 31), bits
                    )
                visible |= (node >= 0) & (node < tree_nodes) & (bits & 1 == 1)
            visible &= slot < limit
            scores = jnp.where(visible, scores, online_softmax.MASKED)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=0))
            weights = jnp.where(visible, jnp.exp(scores - spread(new_peak)), 0.0)
            decay = jnp.exp(peak - new_peak)
            total = total * decay + jnp.sum(weights, axis=0)
            # Unwritten slots may hold anything, and 0 * nan is nan.
            written = first_slot + plgpu.layout_cast(lax.iota(jnp.int32, BLOCK), _ROWS) < limit
            if scaled:
                v_scales = load(v_scale_ref.at[outer, head, pl.ds(slot_in_page, BLOCK)], _ROWS, False)
                v_scales = jnp.where(written, v_scales, 0.0)
                weights *= lax.broadcast_in_dim(v_scales, scores.shape, [0])
            scratch_refs["weights"][...] = weights.astype(dtype)
            plgpu.commit_smem()
            values = widen("v", stage, written) if narrow else scratch_refs["v"].at[stage]
            if not narrow:
                pl.when(first_slot + BLOCK > limit)(functools.partial(clear_unwritten, values, written))

            # A fresh accumulator: the GPU simulator knows none that starts from a value.
            def values_body(acc_ref):
                plgpu.wgmma(acc_ref, plgpu.transpose_ref(values, (1, 0)), scratch_refs["weights"])
                return acc_ref[...]

            update = pl.run_scoped(values_body, plgpu.ACC((dim, columns), jnp.float32))
            acc = acc * lax.broadcast_in_dim(decay, acc.shape, [1]) + update
            return acc, new_peak, total

        acc = plgpu.layout_cast(jnp.zeros((dim, columns), jnp.float32), plgpu.Layout.WGMMA)
        peak = plgpu.layout_cast(jnp.full((columns,), online_softmax.MASKED, jnp.float32), _COLUMNS)
        total = plgpu.layout_cast(jnp.zeros((columns,), jnp.float32), _COLUMNS)
        acc, peak, total = lax.fori_loop(0, count, step_body, (acc, peak, total))
        safe = jnp.where(total == 0, 1.0, total)
        scratch_refs["out"][...] = acc / lax.broadcast_in_dim(safe, acc.shape, [1])
        scratch_refs["lse"][...] = jnp.where(total == 0, -jnp.inf, peak + jnp.log(safe))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch_refs["out"], out_ref.at[split, row, head, tile])
        plgpu.copy_smem_to_gmem(scratch_refs["lse"], lse_ref.at[split, row, head, tile])
        plgpu.wait_smem_to_gmem(0)

    out, lse = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((splits, batch, kv_heads, tiles, dim, columns), jnp.float32),
            jax.ShapeDtypeStruct((splits, batch, kv_heads, tiles, columns), jnp.float32),
        ],
        grid=(splits, tiles, kv_heads, batch),
        grid_names=("split", "tile", "head", "row"),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*operands)

    def unpack(x: jax.Array) -> jax.Array:
        # [splits, B, Hkv, tiles, X, columns] to [splits, B, N, Hq, X]
        x = x.transpose(0, 1, 2, 3, 5, 4).reshape(splits, batch, kv_heads, tiles * columns, -1)
        x = x[:, :, :, :rows].reshape(splits, batch, kv_heads, nodes, group, -1).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(splits, batch, nodes, heads, -1)

    return unpack(out), unpack(lse[..., None, :])[..., 0]
