"""Hadamard rotation for Hopper GPUs: both stages on tensor cores, one read and one write of x.

A row is a matrix x [a, b], and `kron(A, B)` rotates it to A^T x B. The transpose is computed, y = B x^T and
then out^T = y A, so that the 64 rows a wgmma instruction wants are minor coordinates, of which there are 64
or 128 whatever the size. Tensor cores multiply 16-bit numbers: A and B hold +-1, and y is the sum of two
bfloat16 numbers, which carry 16 of its bits, more than the result keeps.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.hadamard.gpu import CHUNK
from kernels_pallas.hadamard.reference import stages
from kernels_pallas.hopper import MULTIPROCESSORS, simulated, swizzled


def hadamard_hopper(x: jax.Array, *, transpose: bool, interpret: Any) -> jax.Array:
    """See `hadamard` in the package."""
    interpret = simulated("hadamard", interpret)
    size = x.shape[-1]
    major, minor = stages(size, transpose)
    a, b = major.shape[0], minor.shape[0]
    copied = -(-a // 8) * 8  # shared memory is tiled by 8 rows
    padded = -(-a // CHUNK) * CHUNK
    chunks = padded // CHUNK
    matrix = jnp.pad(jnp.asarray(major, jnp.bfloat16), ((0, padded - a),) * 2)
    matrix = matrix.reshape(padded, chunks, CHUNK).transpose(1, 0, 2)
    rows = jnp.pad(x.reshape(-1, a, b), ((0, 0), (0, copied - a), (0, 0)))
    count = rows.shape[0]
    blocks = min(count, 2 * MULTIPROCESSORS)
    transforms = swizzled(CHUNK)

    def body(x_ref, major_ref, minor_ref, out_ref, *, x_tile, major_tile, minor_tile, high, low, barriers):
        block = lax.axis_index("block")
        plgpu.copy_gmem_to_smem(major_ref, major_tile, barriers.at[1])
        plgpu.copy_gmem_to_smem(minor_ref, minor_tile, barriers.at[2])
        plgpu.barrier_wait(barriers.at[1])
        plgpu.barrier_wait(barriers.at[2])

        def rotate(step, carry):
            row = block + step * blocks
            tile = x_tile.at[pl.ds(0, copied)]
            plgpu.copy_gmem_to_smem(x_ref.at[row], tile, barriers.at[0])
            plgpu.barrier_wait(barriers.at[0])
            for chunk in range(chunks):
                columns = pl.ds(chunk * CHUNK, CHUNK)

                def first(acc_ref, columns=columns):
                    plgpu.wgmma(acc_ref, minor_tile, plgpu.transpose_ref(x_tile.at[columns], (1, 0)))
                    return acc_ref[...]

                # Scaled here, where float16 still has its range ahead of it.
                y = pl.run_scoped(first, plgpu.ACC((b, CHUNK), jnp.float32)) * size**-0.5
                column = plgpu.broadcasted_iota(jnp.int32, y.shape, 1, layout=plgpu.Layout.WGMMA)
                # Past what was copied the tile may hold anything, and 0 * nan is nan.
                y = jnp.where(chunk * CHUNK + column < copied, y, jnp.zeros_like(y))
                rounded = y.astype(jnp.bfloat16)
                high[:, columns] = rounded
                low[:, columns] = (y - rounded.astype(jnp.float32)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            for chunk in range(chunks):

                def second(acc_ref, chunk=chunk):
                    plgpu.wgmma(acc_ref, high, major_tile.at[chunk])
                    plgpu.wgmma(acc_ref, low, major_tile.at[chunk])
                    return acc_ref[...]

                out = pl.run_scoped(second, plgpu.ACC((b, CHUNK), jnp.float32)).astype(x.dtype)
                target = plgpu.transpose_ref(x_tile.at[pl.ds(chunk * CHUNK, CHUNK)], (1, 0))
                target[...] = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, out_ref.at[row])
            plgpu.wait_smem_to_gmem(0)
            return carry

        lax.fori_loop(0, lax.div(count - block + blocks - 1, blocks), rotate, None)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(rows.shape, x.dtype),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types={
            "x_tile": plgpu.SMEM((padded, b), x.dtype, transforms=transforms),
            "major_tile": plgpu.SMEM((chunks, padded, CHUNK), jnp.bfloat16, transforms=transforms),
            "minor_tile": plgpu.SMEM((b, b), x.dtype, transforms=transforms),
            "high": plgpu.SMEM((b, padded), jnp.bfloat16, transforms=transforms),
            "low": plgpu.SMEM((b, padded), jnp.bfloat16, transforms=transforms),
            "barriers": plgpu.Barrier(num_barriers=3),
        },
        interpret=interpret,
    )(rows, matrix, jnp.asarray(minor, x.dtype))
    return out[:, :a].reshape(x.shape)
