"""What the Hopper kernels of the training-time test share: tiles and their steps, the division of labour in a
thread block, masks and products."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.hopper import load
from kernels_pallas.ttt_attention.gpu import BLOCK

WARPGROUPS = 2  # that compute
TILE = WARPGROUPS * BLOCK
_PADDING_DOCUMENT = jnp.iinfo(jnp.int32).min
_COMPUTE_REGISTERS, _COPY_REGISTERS = 232, 40  # a thread; three warpgroups share 512
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)


class Tiling(NamedTuple):
    """Static choices."""

    scale: float
    interpret: Any


class Problem:
    """Sizes, padded documents, and which steps each tile has to take."""

    def __init__(self, q: jax.Array, k: jax.Array, document_ids: jax.Array):
        self.batch, self.length, self.heads, self.dim = q.shape
        self.kv_heads = k.shape[2]
        self.group = self.heads // self.kv_heads
        self.padded = -(-self.length // TILE) * TILE
        self.tiles = self.padded // TILE
        padding = ((0, 0), (0, self.padded - self.length))
        self.documents = jnp.pad(document_ids, padding, constant_values=_PADDING_DOCUMENT)
        tiles, blocks = (self.documents.reshape(self.batch, -1, size) for size in (TILE, BLOCK))
        low, high = tiles.min(2)[:, :, None], tiles.max(2)[:, :, None]
        block_low, block_high = blocks.min(2)[:, None], blocks.max(2)[:, None]
        overlap = (low <= block_high) & (block_low <= high)
        one_document = (low == high) & (block_low == block_high) & overlap
        tile = jnp.arange(self.tiles)[:, None]
        block = jnp.arange(self.padded // BLOCK)[None]
        # Queries see blocks up to their tile's end; keys are seen by blocks from their tile's start.
        self.query_plan = _plan(
            overlap & (block < WARPGROUPS * (tile + 1)), one_document & (block < WARPGROUPS * tile)
        )
        self.key_plan = _plan(
            overlap & (block >= WARPGROUPS * tile), one_document & (block >= WARPGROUPS * (tile + 1))
        )

    def pad(self, x: jax.Array) -> jax.Array:
        """[B, T, ...] to [B, padded T, ...]."""
        return jnp.pad(x, ((0, 0), (0, self.padded - self.length)) + ((0, 0),) * (x.ndim - 2))

    def statistic(self, x: jax.Array) -> jax.Array:
        """float32 [B, T, Hq] to [B, Hq, padded T]: tokens are copied, so they come last."""
        return jnp.swapaxes(self.pad(x), 1, 2)


def _plan(live: jax.Array, whole: jax.Array) -> jax.Array:
    """Per tile, where its steps begin, where they need no mask, where they do again, and where they end.

    Args:
      live, whole: bool [B, tiles, blocks]: a pair of tokens may see each other; all do.

    Returns:
      int32 [B, tiles, 4], non-decreasing; steps outside [first, last) are dead.
    """
    blocks = live.shape[2]
    first = jnp.argmax(live, axis=2)
    end = blocks - jnp.argmax(live[:, :, ::-1], axis=2)
    start_whole = jnp.where(whole.any(2), jnp.argmax(whole, axis=2), end)
    broken = ~whole & (jnp.arange(blocks) >= start_whole[:, :, None])
    end_whole = jnp.where(broken.any(2), jnp.argmax(broken, axis=2), blocks)
    return jnp.stack([first, start_whole, jnp.clip(end_whole, start_whole, end), end], axis=2).astype(
        jnp.int32
    )


def over_steps(plan: Sequence[jax.Array], body: Callable, carry: Any) -> Any:
    """Fold `body(block, carry, masked)` over a tile's blocks."""
    for masked, start, stop in zip((True, False, True), plan[:-1], plan[1:], strict=True):
        carry = lax.fori_loop(start, stop, functools.partial(body, masked=masked), carry)
    return carry


class Ring:
    """Buffers by which one warpgroup hands blocks to the others; `copies(step)` lists (source, buffers)."""

    def __init__(self, copies: Callable, filled: Any, consumed: Any, stages: int):
        self.copies, self.filled, self.consumed, self.stages = copies, filled, consumed, stages

    def fill(self, steps: jax.Array) -> None:
        def body(step, _):
            slot = lax.rem(step, self.stages)
            pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(self.consumed.at[slot]))
            for source, buffers in self.copies(step):
                plgpu.copy_gmem_to_smem(source, buffers.at[slot], self.filled.at[slot])

        lax.fori_loop(0, steps, body, None)

    def wait(self, step: jax.Array) -> jax.Array:
        """The slot that holds this step's blocks, when they are there."""
        slot = lax.rem(step, self.stages)
        plgpu.barrier_wait(self.filled.at[slot])
        return slot

    def release(self, slot: jax.Array) -> None:
        """This warpgroup has read the slot."""
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.consumed.at[slot])


def roles(compute: Callable, copy: Callable) -> None:
    """`compute(warpgroup)` on those that compute, `copy()` on the one that streams to them."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        compute(warpgroup)

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
        copy()


def visible_pairs(
    documents_ref, row: jax.Array, queries: jax.Array, keys: jax.Array, query_axis: int
) -> jax.Array:
    """bool [64, 64] for the queries and the keys from these tokens on; queries along `query_axis`."""
    layouts = (ROWS, COLUMNS) if query_axis == 0 else (COLUMNS, ROWS)
    shape = (BLOCK, BLOCK)
    tokens, documents = [], []
    for start, axis, layout in zip((queries, keys), (query_axis, 1 - query_axis), layouts, strict=True):
        tokens.append(start + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA))
        ids = load(documents_ref.at[row, pl.ds(start, BLOCK)], layout, False)
        documents.append(lax.broadcast_in_dim(ids, shape, [axis]))
    return (tokens[1] <= tokens[0]) & (documents[0] == documents[1])


def product(a: Any, b: Any, columns: int) -> jax.Array:
    """float32 [64, columns]."""

    def body(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(body, plgpu.ACC((BLOCK, columns), jnp.float32))


def call(
    tiling: Tiling, body: Callable, out_type: Any, heads: int, problem: Problem, scratch: Any, operands: Any
) -> Any:
    """Run `body` once a head, tile and row."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(heads, problem.tiles, problem.batch),
        grid_names=("head", "tile", "row"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=tiling.interpret,
    )(*operands)


def transposed(ref: Any) -> Any:
    """The [columns, rows] view of a buffer [rows, columns]."""
    return plgpu.transpose_ref(ref, (1, 0))
