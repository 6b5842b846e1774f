"""Causal flash attention within documents for Hopper GPUs: forward with log-sum-exp, and backward kernels.

A thread block is three warpgroups: two compute, 64 tokens each, and the third streams the other side's blocks
to both through a ring of buffers (the division of labour of FlashAttention-3, arXiv:2407.08608). Sums without
rescaling, the gradients, stay in their accumulators over all steps.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import online_softmax
from kernels_pallas.hopper import load, simulated, swizzled
from kernels_pallas.ttt_attention.gpu import BLOCK
from kernels_pallas.ttt_attention.hopper_parts import (
    COLUMNS,
    ROWS,
    TILE,
    WARPGROUPS,
    Problem,
    Ring,
    Tiling,
    call,
    over_steps,
    product,
    roles,
    transposed,
    visible_pairs,
)
from kernels_pallas.ttt_attention.join import Triangle, attend

_WIDE = swizzled(64)


def ttt_attention_hopper(
    q: jax.Array,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    document_ids: jax.Array,
    *,
    scale: float,
    interpret: Any,
) -> jax.Array:
    """See `ttt_attention` in the package."""
    tiling = Tiling(scale=scale, interpret=simulated("ttt_attention", interpret))
    return attend(Triangle(forward, backward, tiling), q, tuple(keys), tuple(values), document_ids)


def forward(
    tiling: Tiling, q: jax.Array, k: jax.Array, v: jax.Array, document_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """float32 output [B, T, Hq, D] and log-sum-exp [B, T, Hq] of causal attention within documents."""
    problem = Problem(q, k, document_ids)
    dim, stages = problem.dim, 3

    def body(q_ref, k_ref, v_ref, documents_ref, plan_ref, out_ref, lse_ref, **scratch):
        head, tile, row = (lax.axis_index(name) for name in ("head", "tile", "row"))
        kv_head = lax.div(head, problem.group)
        plan = [plan_ref[row, tile, i] for i in range(4)]

        def copies(step):
            block = (row, pl.ds((plan[0] + step) * BLOCK, BLOCK), kv_head)
            return (k_ref.at[block], scratch["k"]), (v_ref.at[block], scratch["v"])

        ring = Ring(copies, scratch["filled"], scratch["consumed"], stages)

        def compute(warpgroup):
            first = tile * TILE + warpgroup * BLOCK
            mine = (row, pl.ds(first, BLOCK), head)
            q_tile, weights_tile = scratch["q"].at[warpgroup], scratch["weights"].at[warpgroup]
            plgpu.copy_gmem_to_smem(q_ref.at[mine], q_tile, scratch["own"].at[warpgroup])
            plgpu.barrier_wait(scratch["own"].at[warpgroup])

            def step_body(block, carry, masked):
                acc, peak, total = carry
                slot = ring.wait(block - plan[0])
                scores = product(q_tile, transposed(scratch["k"].at[slot]), BLOCK) * tiling.scale
                visible = visible_pairs(documents_ref, row, first, block * BLOCK, 0) if masked else None
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
                update = product(weights_tile, scratch["v"].at[slot], dim)
                ring.release(slot)
                return acc * lax.broadcast_in_dim(decay, acc.shape, [0]) + update, new_peak, total

            acc = plgpu.layout_cast(jnp.zeros((BLOCK, dim), jnp.float32), plgpu.Layout.WGMMA)
            peak = plgpu.layout_cast(jnp.full((BLOCK,), online_softmax.MASKED, jnp.float32), ROWS)
            total = plgpu.layout_cast(jnp.zeros((BLOCK,), jnp.float32), ROWS)
            acc, peak, total = over_steps(plan, step_body, (acc, peak, total))
            # Every token sees itself, so the total is positive.
            scratch["out"].at[warpgroup][...] = acc / lax.broadcast_in_dim(total, acc.shape, [0])
            scratch["lse"].at[warpgroup][...] = peak + jnp.log(total)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(scratch["out"].at[warpgroup], out_ref.at[mine])
            plgpu.copy_smem_to_gmem(scratch["lse"].at[warpgroup], lse_ref.at[row, head, pl.ds(first, BLOCK)])
            plgpu.wait_smem_to_gmem(0)

        roles(compute, lambda: ring.fill(plan[3] - plan[0]))

    out, lse = call(
        tiling,
        body,
        [
            jax.ShapeDtypeStruct((problem.batch, problem.padded, problem.heads, dim), jnp.float32),
            jax.ShapeDtypeStruct((problem.batch, problem.heads, problem.padded), jnp.float32),
        ],
        problem.heads,
        problem,
        {
            "q": plgpu.SMEM((WARPGROUPS, BLOCK, dim), q.dtype, transforms=_WIDE),
            "weights": plgpu.SMEM((WARPGROUPS, BLOCK, BLOCK), q.dtype, transforms=_WIDE),
            "k": plgpu.SMEM((stages, BLOCK, dim), q.dtype, transforms=_WIDE),
            "v": plgpu.SMEM((stages, BLOCK, dim), q.dtype, transforms=_WIDE),
            "out": plgpu.SMEM((WARPGROUPS, BLOCK, dim), jnp.float32),
            "lse": plgpu.SMEM((WARPGROUPS, BLOCK), jnp.float32),
            "own": plgpu.Barrier(num_barriers=WARPGROUPS),
            "filled": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "consumed": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
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
    problem = Problem(q, k, document_ids)
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

        ring = Ring(copies, scratch["filled"], scratch["consumed"], stages)

        def compute(warpgroup):
            first = tile * TILE + warpgroup * BLOCK
            mine = (row, pl.ds(first, BLOCK), head)
            q_tile, grad_tile, slopes_tile = (scratch[n].at[warpgroup] for n in ("q", "grad", "slopes"))
            for source, target in ((q_ref, q_tile), (grad_ref, grad_tile)):
                plgpu.copy_gmem_to_smem(source.at[mine], target, scratch["own"].at[warpgroup])
            lse, delta = (
                lax.broadcast_in_dim(
                    load(ref.at[row, head, pl.ds(first, BLOCK)], ROWS, False), (BLOCK, BLOCK), [0]
                )
                for ref in (lse_ref, delta_ref)
            )
            plgpu.barrier_wait(scratch["own"].at[warpgroup])

            def sum_blocks(acc_ref):
                def step_body(block, _, masked):
                    slot = ring.wait(block - plan[0])
                    scores = product(q_tile, transposed(scratch["k"].at[slot]), BLOCK) * tiling.scale
                    weights = jnp.exp(scores - lse)
                    if masked:
                        visible = visible_pairs(documents_ref, row, first, block * BLOCK, 0)
                        weights = jnp.where(visible, weights, 0.0)
                    slopes = product(grad_tile, transposed(scratch["v"].at[slot]), BLOCK) - delta
                    slopes_tile[...] = (weights * slopes * tiling.scale).astype(dtype)
                    plgpu.commit_smem()
                    plgpu.wgmma(acc_ref, slopes_tile, scratch["k"].at[slot])
                    ring.release(slot)

                over_steps(plan, step_body, None)
                return acc_ref[...]

            scratch["out"].at[warpgroup][...] = pl.run_scoped(
                sum_blocks, plgpu.ACC((BLOCK, dim), jnp.float32)
            )
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(scratch["out"].at[warpgroup], out_ref.at[mine])
            plgpu.wait_smem_to_gmem(0)

        roles(compute, lambda: ring.fill(plan[3] - plan[0]))

    return call(
        tiling,
        body,
        jax.ShapeDtypeStruct((problem.batch, problem.padded, problem.heads, dim), jnp.float32),
        problem.heads,
        problem,
        {
            "q": plgpu.SMEM((WARPGROUPS, BLOCK, dim), dtype, transforms=_WIDE),
            "grad": plgpu.SMEM((WARPGROUPS, BLOCK, dim), dtype, transforms=_WIDE),
            "slopes": plgpu.SMEM((WARPGROUPS, BLOCK, BLOCK), dtype, transforms=_WIDE),
            "k": plgpu.SMEM((stages, BLOCK, dim), dtype, transforms=_WIDE),
            "v": plgpu.SMEM((stages, BLOCK, dim), dtype, transforms=_WIDE),
            "out": plgpu.SMEM((WARPGROUPS, BLOCK, dim), jnp.float32),
            "own": plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
            "filled": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "consumed": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
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

        ring = Ring(copies, scratch["filled"], scratch["consumed"], stages)

        def compute(warpgroup):
            first = tile * TILE + warpgroup * BLOCK
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
                        lax.broadcast_in_dim(load(scratch[n].at[slot], COLUMNS, False), (BLOCK, BLOCK), [1])
                        for n in ("lse", "delta")
                    )
                    # Transposed, [keys, queries], as both gradients want them.
                    scores = product(k_tile, transposed(scratch["q"].at[slot]), BLOCK) * tiling.scale
                    weights = jnp.exp(scores - lse)
                    if masked:
                        visible = visible_pairs(documents_ref, row, block * BLOCK, first, 1)
                        weights = jnp.where(visible, weights, 0.0)
                    slopes = product(v_tile, transposed(scratch["grad"].at[slot]), BLOCK) - delta
                    weights_tile[...] = weights.astype(dtype)
                    slopes_tile[...] = (weights * slopes * tiling.scale).astype(dtype)
                    plgpu.commit_smem()
                    plgpu.wgmma(v_acc_ref, weights_tile, scratch["grad"].at[slot])
                    plgpu.wgmma(k_acc_ref, slopes_tile, scratch["q"].at[slot])
                    ring.release(slot)
                    return done

                def head_body(head, _):
                    over_steps(plan, step_body, head * count)

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

        roles(compute, lambda: ring.fill(count * problem.group))

    shape = (problem.batch, problem.padded, problem.kv_heads, dim)
    return call(
        tiling,
        body,
        [jax.ShapeDtypeStruct(shape, dtype)] * 2,
        problem.kv_heads,
        problem,
        {
            "k": plgpu.SMEM((WARPGROUPS, BLOCK, dim), dtype, transforms=_WIDE),
            "v": plgpu.SMEM((WARPGROUPS, BLOCK, dim), dtype, transforms=_WIDE),
            "weights": plgpu.SMEM((WARPGROUPS, BLOCK, BLOCK), dtype, transforms=_WIDE),
            "slopes": plgpu.SMEM((WARPGROUPS, BLOCK, BLOCK), dtype, transforms=_WIDE),
            "q": plgpu.SMEM((stages, BLOCK, dim), dtype, transforms=_WIDE),
            "grad": plgpu.SMEM((stages, BLOCK, dim), dtype, transforms=_WIDE),
            "lse": plgpu.SMEM((stages, BLOCK), jnp.float32),
            "delta": plgpu.SMEM((stages, BLOCK), jnp.float32),
            "own": plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
            "filled": plgpu.Barrier(num_arrivals=4, num_barriers=stages),
            "consumed": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        },
        operands,
    )
