"""Quantised matrix product for Hopper GPUs: weights are 8 or 4 bits wide until they are in registers.

The product is transposed, out^T = w^T x^T, so that the 64 rows a wgmma instruction wants are output channels
and the rows of x its columns, of which 16 do. K may be split over thread blocks, whose parts XLA adds.

Integers are multiplied as bfloat16. wgmma multiplies int8 too, but wants both operands with K contiguous, and
w has N contiguous; only 16-bit operands may be transposed on the way. Nothing is lost: 8-bit integers are
bfloat16 numbers, and at most 1024 products, each at most 2^14, are added in float32, which stays within 2^24,
where float32 holds every integer; those sums go on in int32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.hopper import MULTIPROCESSORS, load, simulated, swizzled
from kernels_pallas.quant_matmul.gpu import COLUMN_TILES, STEP

_STAGES = 6
_EXACT_TERMS = 1024
_ROW_TILES = (16, 32, 64)


def unit_rows(stored: int, terms_per_row: int) -> int:
    """Rows of stored bytes summed at a time: the most that divide `stored` and stay exact."""
    most = _EXACT_TERMS // terms_per_row
    return next(rows for rows in range(most, 0, -STEP) if stored % rows == 0)


def default_splits(blocks: int, units: int) -> int:
    """Thread blocks that K is split over: as many as make two a multiprocessor, of equal length."""
    wanted = max(1, 2 * MULTIPROCESSORS // blocks)
    return next(s for s in range(min(wanted, units), 0, -1) if units % s == 0)


def quant_matmul_hopper(
    x: jax.Array,
    x_scale: jax.Array | None,
    w: jax.Array,
    w_scale: jax.Array,
    *,
    packed: bool,
    out_dtype: jnp.dtype,
    interpret: Any,
) -> jax.Array:
    """See `quant_matmul` in the package; x is [M, K], x_scale [M] and w_scale [K / group, N]."""
    interpret = simulated("quant_matmul", interpret)
    integer = x_scale is not None
    dtype = jnp.bfloat16 if integer else x.dtype
    m, stored, n = x.shape[0], *w.shape
    groups = w_scale.shape[0]
    grouped = groups > 1
    total_dtype = jnp.int32 if integer and not grouped else jnp.float32
    parts = 2 if packed else 1
    rows = next((t for t in _ROW_TILES if m <= t), _ROW_TILES[-1])
    columns = next(t for t in COLUMN_TILES if n % t == 0 and t * parts <= COLUMN_TILES[0])
    row_tiles, column_tiles = -(-m // rows), n // columns
    unit = unit_rows(stored // groups, parts)
    unit_steps, units = unit // STEP, stored // unit
    splits = default_splits(row_tiles * column_tiles, units)
    split_units = units // splits
    steps = split_units * unit_steps
    w_scale = w_scale.astype(jnp.float32)

    # Rows of w that share a byte meet the even and the odd columns of x.
    x_parts = x.astype(dtype).reshape(m, stored, parts).transpose(2, 0, 1)
    x_parts = jnp.pad(x_parts, ((0, 0), (0, row_tiles * rows - m), (0, 0)))
    operands = [x_parts, w, *([w_scale] if grouped else [])]
    transforms = swizzled(64)

    def body(x_ref, w_ref, *refs, x_tiles, w_tiles, wide, total_tile, barriers):
        *scale_refs, out_ref = refs
        split, column_tile, row_tile = (lax.axis_index(name) for name in ("split", "columns", "rows"))
        channels = pl.ds(column_tile * columns, columns)

        def fetch(step):
            stage = lax.rem(step, _STAGES)
            depth = pl.ds((split * steps + step) * STEP, STEP)
            barrier = barriers.at[stage]
            plgpu.copy_gmem_to_smem(w_ref.at[depth, channels], w_tiles.at[stage], barrier)
            for part in range(parts):
                source = x_ref.at[part, pl.ds(row_tile * rows, rows), depth]
                plgpu.copy_gmem_to_smem(source, x_tiles.at[stage, part], barrier)

        def widen(tile):
            if not packed:
                return (tile.astype(dtype),)
            # Of 8-bit numbers the GPU has bitwise operations alone: a nibble with its sign flipped is 8 more
            # than its value, and the high nibble in place is 16 times its value.
            low = ((tile & 15) ^ 8).astype(dtype) - 8
            return low, (tile & -16).astype(dtype) * 0.0625

        def multiply(acc_ref, step):
            stage, slot = lax.rem(step, _STAGES), lax.rem(step, 2)
            plgpu.barrier_wait(barriers.at[stage])
            # The products of the step before may still run; those of the one before it are done, in all four
            # warps, so that its buffers may be filled anew.
            plgpu.wgmma_wait(parts)
            plgpu.commit_smem()
            pl.when(step + _STAGES - 2 < steps)(lambda: fetch(step + _STAGES - 2))
            tile = load(w_tiles.at[stage], plgpu.Layout.WGMMA, True)
            for part, values in enumerate(widen(tile)):
                wide[slot, part] = values
            plgpu.commit_smem()
            for part in range(parts):
                plgpu.wgmma(
                    acc_ref,
                    plgpu.transpose_ref(wide.at[slot, part], (1, 0)),
                    plgpu.transpose_ref(x_tiles.at[stage, part], (1, 0)),
                )

        def add_unit(index, total):
            # Asked for ahead of the products, used after them.
            group = lax.div((split * split_units + index) * unit, stored // groups)
            scales = [
                load(ref.at[group, channels], plgpu.Layout.WGMMA.reduce(1), False) for ref in scale_refs
            ]

            def sum_unit(acc_ref):
                first = index * unit_steps
                lax.fori_loop(first, first + unit_steps, lambda step, _: multiply(acc_ref, step), None)
                return acc_ref[...]

            product = pl.run_scoped(sum_unit, plgpu.ACC((columns, rows), jnp.float32))
            for scale in scales:
                product *= lax.broadcast_in_dim(scale, product.shape, [0])
            return total + product.astype(total_dtype)

        for step in range(min(_STAGES - 2, steps)):
            fetch(jnp.int32(step))
        total = plgpu.layout_cast(jnp.zeros((columns, rows), total_dtype), plgpu.Layout.WGMMA)
        total_tile[...] = lax.fori_loop(0, split_units, add_unit, total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(total_tile, out_ref.at[split, channels, pl.ds(row_tile * rows, rows)])
        plgpu.wait_smem_to_gmem(0)

    totals = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((splits, n, row_tiles * rows), total_dtype),
        grid=(splits, column_tiles, row_tiles),
        grid_names=("split", "columns", "rows"),
        scratch_types={
            "x_tiles": plgpu.SMEM((_STAGES, parts, rows, STEP), dtype, transforms=transforms),
            "w_tiles": plgpu.SMEM((_STAGES, STEP, columns), w.dtype, transforms=swizzled(64, 1)),
            "wide": plgpu.SMEM((2, parts, STEP, columns), dtype, transforms=transforms),
            "total_tile": plgpu.SMEM((columns, rows), total_dtype),
            "barriers": plgpu.Barrier(num_arrivals=1 + parts, num_barriers=_STAGES),
        },
        interpret=interpret,
    )(*operands)
    out = functools.reduce(jnp.add, totals).astype(jnp.float32)
    if not grouped:
        out *= w_scale[0][:, None]
    out = out.T[:m]
    return (out if x_scale is None else out * x_scale[:, None]).astype(out_dtype)
