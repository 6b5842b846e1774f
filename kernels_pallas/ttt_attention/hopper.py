"""Causal flash attention within documents for Hopper GPUs: forward with log-sum-exp, and backward kernels.

A thread block is three warpgroups: two compute, 64 tokens each, and the third streams the other side's blocks
to both through a ring of buffers (the division of labour of FlashAttention-3, arXiv:2407.08608). Sums without
rescaling, the gradients, stay in their accumulators over all steps.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import online_softmax
from kernels_pallas.hopper import load, swizzled
from kernels_pallas.ttt_attention.gpu import BLOCK

_WARPGROUPS = 2  # that compute
_TILE = _WARPGROUPS * BLOCK
_PADDING_DOCUMENT = jnp.iinfo(jnp.int32).min
_COMPUTE_REGISTERS, _COPY_REGISTERS = 232, 40  # a thread; three warpgroups share 512
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)
_WIDE = swizzled(64)


class Tiling(NamedTuple):
    """Static choices."""

    scale: float
    interpret: Any


class _Problem:
    """Sizes, padded documents, and which steps each tile has to take."""

    def __init__(self, q: jax.Array, k: jax.Array, document_ids: jax.Array):
        self.batch, self.length, self.heads, self.dim = q.shape
        self.kv_heads = k.shape[2]
        self.group = self.heads // self.kv_heads
        self.padded = -(-self.length // _TILE) * _TILE
        self.tiles = self.padded // _TILE
        padding = ((0, 0), (0, self.padded - self.length))
        self.documents = jnp.pad(document_ids, padding, constant_values=_PADDING_DOCUMENT)
        tiles, blocks = (self.documents.reshape(self.batch, -1, size) for size in (_TILE, BLOCK))
        low, high = tiles.min(2)[:, :, None], tiles.max(2)[:, :, None]
        block_low, block_high = blocks.min(2)[:, None], blocks.max(2)[:, None]
        overlap = (low <= block_high) & (block_low <= high)
        one_document = (low == high) & (block_low == block_high) & overlap
        tile = jnp.arange(self.tiles)[:, None]
        block = jnp.arange(self.padded // BLOCK)[None]
        # Queries see blocks up to their tile's end; keys are seen by blocks from their tile's start.
        self.query_plan = _plan(
            overlap & (block < _WARPGROUPS * (tile + 1)), one_document & (block < _WARPGROUPS * tile)
        )
        self.key_plan = _plan(
            overlap & (block >= _WARPGROUPS * tile), one_document & (block >= _WARPGROUPS * (tile + 1))
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


def _over_steps(plan: Sequence[jax.Array], body: Callable, carry: Any) -> Any:
    """Fold `body(block, carry, masked)` over a tile's blocks."""
    for masked, start, stop in zip((True, False, True), plan[:-1], plan[1:], strict=True):
        carry = lax.fori_loop(start, stop, functools.partial(body, masked=masked), carry)
    return carry


class _Ring:
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


def _roles(compute: Callable, copy: Callable) -> None:
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < _WARPGROUPS)
    def _():
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        compute(warpgroup)

    @pl.when(warpgroup == _WARPGROUPS)
    def _():
        plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
        copy()


def _visible(
    documents_ref, row: jax.Array, queries: jax.Array, keys: jax.Array, query_axis: int
) -> jax.Array:
    """bool [64, 64] for the queries and the keys from these tokens on; queries along `query_axis`."""
    layouts = (_ROWS, _COLUMNS) if query_axis == 0 else (_COLUMNS, _ROWS)
    shape = (BLOCK, BLOCK)
    tokens, documents = [], []
    for start, axis, layout in zip((queries, keys), (query_axis, 1 - query_axis), layouts, strict=True):
        tokens.append(start + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA))
        ids = load(documents_ref.at[row, pl.ds(start, BLOCK)], layout, False)
        documents.append(lax.broadcast_in_dim(ids, shape, [axis]))
    return (tokens[1] <= tokens[0]) & (documents[0] == documents[1])


def _product(a: Any, b: Any, columns: int) -> jax.Array:
    """float32 [64, columns]."""

    def body(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(body, plgpu.ACC((BLOCK, columns), jnp.float32))


def _call(tiling, body, out_type, heads, problem, scratch, operands):
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(heads, problem.tiles, problem.batch),
        grid_names=("head", "tile", "row"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=tiling.interpret,
    )(*operands)


def _transposed(ref: Any) -> Any:
    return plgpu.transpose_ref(ref, (1, 0))


def forward(
    tiling: Tiling, q: jax.Array, k: jax.Array, v: jax.Array, document_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """float32 output [B, T, Hq, D] and log-sum-exp [B, T, Hq] of causal attention within documents."""
    problem = _Problem(q, k, document_ids)
    dim, stages = problem.dim, 3

    def body(q_ref, k_ref, v_ref, documents_ref, plan_ref, out_ref, lse_ref, **scratch):
        head, tile, row = (lax.axis_index(name) for name in ("head", "tile", "row"))
        kv_head = lax.div(head, problem.group)
        plan = [plan_ref[row, tile, i] for i in range(4)]

        def copies(step):
            block = (row, pl.ds((plan[0] + step) * BLOCK, BLOCK), kv_head)
            return (k_ref.at[block], scratch["k"]), (v_ref.at[block], scratch["v"])

        ring = _Ring(copies, scratch["filled"], scratch["consumed"], stages)

        def compute(warpgroup):
            first = tile * _TILE + warpgroup * BLOCK
            mine = (row, pl.ds(first, BLOCK), head)
            q_tile, weights_tile = scratch["q"].at[warpgroup], scratch["weights"].at[warpgroup]
            plgpu.copy_gmem_to_smem(q_ref.at[mine], q_tile, scratch["own"].at[warpgroup])
            plgpu.barrier_wait(scratch["own"].at[warpgroup])

            def step_body(block, carry, masked):
                acc, peak, total = carry
                slot = ring.wait(block - plan[0])
                scores = _product(q_tile, _transposed(scratch["k"].at[slot]), BLOCK) * tiling.scale
                visible = _visible(documents_ref, row, first, block * BLOCK, 0) if masked else None
                if visible is not None:
                    scores = jnp.where(visible, scores, online_softmax.MASKED)
                new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
                weights = jnp.exp(scores - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
                if visible is not None:
                    weights = jnp.where(visible, weights, 0.0)
                decay = jnp.exp(peak - new_peak)
                total = total * decay + jnp.sum(weights, axis=1)
                weights_tile[...] = weights.astype(q.dtype)
                plgpu.commit_smem()
                # A fresh accumulator: the GPU simulator knows none that starts from a value.
                update = _product(weights_tile, scratch["v"].at[slot], dim)
                ring.release(slot)
                return acc * lax.broadcast_in_dim(decay, acc.shape, [0]) + update, new_peak, total

            acc = plgpu.layout_cast(jnp.zeros((BLOCK, dim), jnp.float32), plgpu.Layout.WGMMA)
            peak = plgpu.layout_cast(jnp.full((BLOCK,), online_softmax.MASKED, jnp.float32), _ROWS)
            total = plgpu.layout_cast(jnp.zeros((BLOCK,), jnp.float32), _ROWS)
            acc, peak, total = _over_steps(plan, step_body, (acc, peak, total))
            # Every token sees itself, so the total is positive.
            scratch["out"].at[warpgroup][...] = acc / lax.broadcast_in_dim(total, acc.shape, [0])
            scratch["lse"].at[warpgroup][...] = peak + jnp.log(total)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(scratch["out"].at[warpgroup], out_ref.at[mine])
            plgpu.copy_smem_to_gmem(scratch["lse"].at[warpgroup], lse_ref.at[row, head, pl.ds(first, BLOCK)])
            plgpu.wait_smem_to_gmem(0)

        _roles(compute, lambda: ring.fill(plan[3] - plan[0]))

    out, lse = _call(
        tiling,
        body,
        [
            jax.ShapeDtypeStruct((problem.batch, problem.padded, problem.heads, dim), jnp.float32),
            jax.ShapeDtypeStruct((problem.batch, problem.heads, problem.padded), jnp.float32),
        ],
        problem.heads,
        problem,
        {
            "q": plgpu.SMEM((_WARPGROUPS, BLOCK, dim), q.dtype, transforms=_WIDE),
            "weights": plgpu.SMEM((_WARPGROUPS, BLOCK, BLOCK), q.dtype, transforms=_WIDE),
            "k": plgpu.SMEM((stages, BLOCK, dim), q.dtype, transforms=_WIDE),
            "v": plgpu.SMEM((stages, BLOCK, dim), q.dtype, transforms=_WIDE),
            "out": plgpu.SMEM((_WARPGROUPS, BLOCK, dim), jnp.float32),
            "lse": plgpu.SMEM((_WARPGROUPS, BLOCK), jnp.float32),
            "own": plgpu.Barrier(num_barriers=_WARPGROUPS),
            "filled": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "consumed": plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages),
        },
        (problem.pad(q), problem.pad(k), problem.pad(v), problem.documents, problem.query_plan),
    )
    return out[:, : problem.length], jnp.swapaxes(lse, 1, 2)[:, : problem.length]


def backward(
    tiling: Tiling,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    document_ids: jax.Array,
    grad: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the triangle's q (float32), k and v.

    Args:
      grad: [B, T, Hq, D] gradient of the whole attention's output.
      lse, delta: float32 [B, T, Hq], the whole row's log-sum-exp and its inner product of output and
        gradient.
    """
    problem = _Problem(q, k, document_ids)
    operands = (
        *(problem.pad(x) for x in (q, k, v, grad)),
        *(problem.statistic(x) for x in (lse, delta)),
        problem.documents,
    )
    grad_q = _query_gradient(tiling, problem, q.dtype, (*operands, problem.query_plan))
    grad_k, grad_v = _key_gradients(tiling, problem, q.dtype, (*operands, problem.key_plan))
    return tuple(x[:, : problem.length] for x in (grad_q, grad_k, grad_v))  # type: ignore[return-value]


def _query_gradient(tiling, problem, dtype, operands):
    dim, stages = problem.dim, 2

    def body(q_ref, k_ref, v_ref, grad_ref, lse_ref, delta_ref, documents_ref, plan_ref, out_ref, **scratch):
        head, tile, row = (lax.axis_index(name) for name in ("head", "tile", "row"))
        kv_head = lax.div(head, problem.group)
        plan = [plan_ref[row, tile, i] for i in range(4)]

        def copies(step):
            block = (row, pl.ds((plan[0] + step) * BLOCK, BLOCK), kv_head)
            return (k_ref.at[block], scratch["k"]), (v_ref.at[block], scratch["v"])

        ring = _Ring(copies, scratch["filled"], scratch["consumed"], stages)

        def compute(warpgroup):
            first = tile * _TILE + warpgroup * BLOCK
            mine = (row, pl.ds(first, BLOCK), head)
            q_tile, grad_tile, slopes_tile = (scratch[n].at[warpgroup] for n in ("q", "grad", "slopes"))
            for source, target in ((q_ref, q_tile), (grad_ref, grad_tile)):
                plgpu.copy_gmem_to_smem(source.at[mine], target, scratch["own"].at[warpgroup])
            lse, delta = (
                lax.broadcast_in_dim(
                    load(ref.at[row, head, pl.ds(first, BLOCK)], _ROWS, False), (BLOCK, BLOCK), [0]
                )
                for ref in (lse_ref, delta_ref)
            )
            plgpu.barrier_wait(scratch["own"].at[warpgroup])

            def sum_blocks(acc_ref):
                def step_body(block, _, masked):
                    slot = ring.wait(block - plan[0])
                    scores = _product(q_tile, _transposed(scratch["k"].at[slot]), BLOCK) * tiling.scale
                    weights = jnp.exp(scores - lse)
                    if masked:
                        visible = _visible(documents_ref, row, first, block * BLOCK, 0)
                        weights = jnp.where(visible, weights, 0.0)
                    slopes = _product(grad_tile, _transposed(scratch["v"].at[slot]), BLOCK) - delta
                    slopes_tile[...] = (weights * slopes * tiling.scale).astype(dtype)
                    plgpu.commit_smem()
                    plgpu.wgmma(acc_ref, slopes_tile, scratch["k"].at[slot])
                    ring.release(slot)

                _over_steps(plan, step_body, None)
                return acc_ref[...]

            scratch["out"].at[warpgroup][...] = pl.run_scoped(
                sum_blocks, plgpu.ACC((BLOCK, dim), jnp.float32)
            )
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(scratch["out"].at[warpgroup], out_ref.at[mine])
            plgpu.wait_smem_to_gmem(0)

        _roles(compute, lambda: ring.fill(plan[3] - plan[0]))

    return _call(
        tiling,
        body,
        jax.ShapeDtypeStruct((problem.batch, problem.padded, problem.heads, dim), jnp.float32),
        problem.heads,
        problem,
        {
            "q": plgpu.SMEM((_WARPGROUPS, BLOCK, dim), dtype, transforms=_WIDE),
            "grad": plgpu.SMEM((_WARPGROUPS, BLOCK, dim), dtype, transforms=_WIDE),
            "slopes": plgpu.SMEM((_WARPGROUPS, BLOCK, BLOCK), dtype, transforms=_WIDE),
            "k": plgpu.SMEM((stages, BLOCK, dim), dtype, transforms=_WIDE),
            "v": plgpu.SMEM((stages, BLOCK, dim), dtype, transforms=_WIDE),
            "out": plgpu.SMEM((_WARPGROUPS, BLOCK, dim), jnp.float32),
            "own": plgpu.Barrier(num_arrivals=2, num_barriers=_WARPGROUPS),
            "filled": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "consumed": plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages),
        },
        operands,
    )


def _key_gradients(tiling, problem, dtype, operands):
    dim, stages = problem.dim, 3

    def body(
        q_ref,
        k_ref,
        v_ref,
        grad_ref,
        lse_ref,
        delta_ref,
        documents_ref,
        plan_ref,
        grad_k_ref,
        grad_v_ref,
        **scratch,
    ):
        kv_head, tile, row = (lax.axis_index(name) for name in ("head", "tile", "row"))
        plan = [plan_ref[row, tile, i] for i in range(4)]
        count = plan[3] - plan[0]

        def copies(step):
            head = kv_head * problem.group + lax.div(step, count)
            tokens = pl.ds((plan[0] + lax.rem(step, count)) * BLOCK, BLOCK)
            return (
                (q_ref.at[row, tokens, head], scratch["q"]),
                (grad_ref.at[row, tokens, head], scratch["grad"]),
                (lse_ref.at[row, head, tokens], scratch["lse"]),
                (delta_ref.at[row, head, tokens], scratch["delta"]),
            )

        ring = _Ring(copies, scratch["filled"], scratch["consumed"], stages)

        def compute(warpgroup):
            first = tile * _TILE + warpgroup * BLOCK
            mine = (row, pl.ds(first, BLOCK), kv_head)
            k_tile, v_tile, weights_tile, slopes_tile = (
                scratch[n].at[warpgroup] for n in ("k", "v", "weights", "slopes")
            )
            for source, target in ((k_ref, k_tile), (v_ref, v_tile)):
                plgpu.copy_gmem_to_smem(source.at[mine], target, scratch["own"].at[warpgroup])
            plgpu.barrier_wait(scratch["own"].at[warpgroup])

            def sum_blocks(k_acc_ref, v_acc_ref):
                def step_body(block, done, masked):
                    slot = ring.wait(done + block - plan[0])
                    lse, delta = (
                        lax.broadcast_in_dim(load(scratch[n].at[slot], _COLUMNS, False), (BLOCK, BLOCK), [1])
                        for n in ("lse", "delta")
                    )
                    # Transposed, [keys, queries], as both gradients want them.
                    scores = _product(k_tile, _transposed(scratch["q"].at[slot]), BLOCK) * tiling.scale
                    weights = jnp.exp(scores - lse)
                    if masked:
                        visible = _visible(documents_ref, row, block * BLOCK, first, 1)
                        weights = jnp.where(visible, weights, 0.0)
                    slopes = _product(v_tile, _transposed(scratch["grad"].at[slot]), BLOCK) - delta
                    weights_tile[...] = weights.astype(dtype)
                    slopes_tile[...] = (weights * slopes * tiling.scale).astype(dtype)
                    plgpu.commit_smem()
                    plgpu.wgmma(v_acc_ref, weights_tile, scratch["grad"].at[slot])
                    plgpu.wgmma(k_acc_ref, slopes_tile, scratch["q"].at[slot])
                    ring.release(slot)
                    return done

                def head_body(head, _):
                    _over_steps(plan, step_body, head * count)

                lax.fori_loop(0, problem.group, head_body, None)
                return k_acc_ref[...], v_acc_ref[...]

            acc = plgpu.ACC((BLOCK, dim), jnp.float32)
            # The tiles of k and v have been read for the last time.
            for target, ref, value in zip(
                (k_tile, v_tile), (grad_k_ref, grad_v_ref), pl.run_scoped(sum_blocks, acc, acc), strict=True
            ):
                target[...] = value.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(target, ref.at[mine])
            plgpu.wait_smem_to_gmem(0)

        _roles(compute, lambda: ring.fill(count * problem.group))

    shape = (problem.batch, problem.padded, problem.kv_heads, dim)
    return _call(
        tiling,
        body,
        [jax.ShapeDtypeStruct(shape, dtype)] * 2,
        problem.kv_heads,
        problem,
        {
            "k": plgpu.SMEM((_WARPGROUPS, BLOCK, dim), dtype, transforms=_WIDE),
            "v": plgpu.SMEM((_WARPGROUPS, BLOCK, dim), dtype, transforms=_WIDE),
            "weights": plgpu.SMEM((_WARPGROUPS, BLOCK, BLOCK), dtype, transforms=_WIDE),
            "slopes": plgpu.SMEM((_WARPGROUPS, BLOCK, BLOCK), dtype, transforms=_WIDE),
            "q": plgpu.SMEM((stages, BLOCK, dim), dtype, transforms=_WIDE),
            "grad": plgpu.SMEM((stages, BLOCK, dim), dtype, transforms=_WIDE),
            "lse": plgpu.SMEM((stages, BLOCK), jnp.float32),
            "delta": plgpu.SMEM((stages, BLOCK), jnp.float32),
            "own": plgpu.Barrier(num_arrivals=2, num_barriers=_WARPGROUPS),
            "filled": plgpu.Barrier(num_arrivals=4, num_barriers=stages),
            "consumed": plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages),
        },
        operands,
    )
