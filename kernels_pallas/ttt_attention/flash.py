"""Causal flash attention within documents for TPU: forward with log-sum-exp, and the backward kernels.

All query heads of a key/value head are rows of one tile (row = token x group + head), so a key block is
loaded once for the group, and key and value gradients come out summed over it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import online_softmax

_LANES = 128
_PADDING_DOCUMENT = jnp.iinfo(jnp.int32).min


class Tiling(NamedTuple):
    """Static choices. block_q divides block_kv; both count tokens."""

    block_q: int
    block_kv: int
    scale: float
    interpret: Any


class _Layout:
    """Arrays and maps that the three kernels share for one problem."""

    def __init__(self, tiling: Tiling, q: jax.Array, k: jax.Array, document_ids: jax.Array):
        self.tiling = tiling
        self.batch, self.length, self.heads, self.dim = q.shape
        self.kv_heads = k.shape[2]
        self.group = self.heads // self.kv_heads
        self.padded = -(-self.length // tiling.block_kv) * tiling.block_kv
        self.rows = tiling.block_q * self.group
        self.q_blocks, self.kv_blocks = self.padded // tiling.block_q, self.padded // tiling.block_kv
        self.ratio = tiling.block_kv // tiling.block_q
        self.dtype = q.dtype

        documents = jnp.pad(
            document_ids, ((0, 0), (0, self.padded - self.length)), constant_values=_PADDING_DOCUMENT
        )
        tokens = jnp.broadcast_to(jnp.arange(self.padded, dtype=jnp.int32), documents.shape)
        self.row_ids = jnp.repeat(jnp.stack([tokens, documents], axis=-1), self.group, axis=1)
        self.column_documents = documents[:, None]
        q_docs, kv_docs = (documents.reshape(self.batch, n, -1) for n in (self.q_blocks, self.kv_blocks))
        q_low, q_high, kv_low, kv_high = q_docs.min(2), q_docs.max(2), kv_docs.min(2), kv_docs.max(2)
        causal = jnp.arange(self.kv_blocks)[None] * self.ratio <= jnp.arange(self.q_blocks)[:, None]
        live = causal & (q_low[:, :, None] <= kv_high[:, None]) & (kv_low[:, None] <= q_high[:, :, None])
        first_kv = jnp.argmax(live, axis=2).astype(jnp.int32)
        last_q = (self.q_blocks - 1 - jnp.argmax(live[:, ::-1], axis=1)).astype(jnp.int32)
        self.scalars = (q_low, q_high, kv_low, kv_high, first_kv, last_q)

    def pack_rows(self, x: jax.Array) -> jax.Array:
        """[B, T, Hq, X] to [B, Hkv, padded T x group, X]."""
        x = jnp.pad(x, ((0, 0), (0, self.padded - self.length), (0, 0), (0, 0)))
        x = x.reshape(self.batch, self.padded, self.kv_heads, self.group, -1).transpose(0, 2, 1, 3, 4)
        return x.reshape(self.batch, self.kv_heads, self.padded * self.group, -1)

    def unpack_rows(self, x: jax.Array) -> jax.Array:
        x = x.reshape(self.batch, self.kv_heads, self.padded, self.group, -1).transpose(0, 2, 1, 3, 4)
        return x.reshape(self.batch, self.padded, self.heads, -1)[:, : self.length]

    def pack_keys(self, x: jax.Array) -> jax.Array:
        """[B, T, Hkv, D] to [B, Hkv, padded T, D]."""
        x = jnp.pad(x, ((0, 0), (0, self.padded - self.length), (0, 0), (0, 0)))
        return jnp.swapaxes(x, 1, 2)

    def unpack_keys(self, x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x, 1, 2)[:, : self.length]

    # A dead step names a live block again, which Pallas does not copy twice.
    def kv_index(self, b, i, j, first_kv):
        return jnp.clip(j, first_kv[b, i], lax.div(i, self.ratio))

    def q_index(self, b, i, j, last_q):
        return jnp.clip(i, j * self.ratio, jnp.maximum(last_q[b, j], j * self.ratio))

    def specs(self, q_major: bool) -> dict[str, pl.BlockSpec]:
        """Block specs by kind of operand for the grid (B, Hkv, q, kv), or (B, Hkv, kv, q) if kv is major."""

        def order(b, outer, inner, scalars):
            *_, first_kv, last_q = scalars
            if q_major:
                return outer, self.kv_index(b, outer, inner, first_kv)
            return self.q_index(b, inner, outer, last_q), outer

        def row_spec(width: int) -> pl.BlockSpec:
            return pl.BlockSpec(
                (1, 1, self.rows, width),
                lambda b, h, outer, inner, *s: (b, h, order(b, outer, inner, s)[0], 0),
            )

        return {
            "rows": row_spec(self.dim),
            "row statistics": row_spec(2),
            "row lse": row_spec(1),
            "row ids": pl.BlockSpec(
                (1, self.rows, 2), lambda b, h, outer, inner, *s: (b, order(b, outer, inner, s)[0], 0)
            ),
            "columns": pl.BlockSpec(
                (1, 1, self.tiling.block_kv, self.dim),
                lambda b, h, outer, inner, *s: (b, h, order(b, outer, inner, s)[1], 0),
            ),
            "column documents": pl.BlockSpec(
                (1, 1, self.tiling.block_kv),
                lambda b, h, outer, inner, *s: (b, 0, order(b, outer, inner, s)[1]),
            ),
        }

    def cost(self, products: int) -> pl.CostEstimate:
        """For one document a row: half of `products` matrix products, keys read once a query block."""
        pairs = self.batch * self.heads * self.padded * self.padded // 2
        reads = self.q_blocks * self.batch * self.kv_heads * self.padded * self.dim * self.dtype.itemsize
        return pl.CostEstimate(
            flops=2 * products * pairs * self.dim, transcendentals=pairs, bytes_accessed=reads
        )

    def call(self, kernel, name, products, q_major, operands, in_specs, out_specs, out_shape, scratch):
        specs = self.specs(q_major)
        outer, inner = (self.q_blocks, self.kv_blocks) if q_major else (self.kv_blocks, self.q_blocks)
        return pl.pallas_call(
            functools.partial(kernel, layout=self),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(self.scalars),
                grid=(self.batch, self.kv_heads, outer, inner),
                in_specs=[specs[s] for s in in_specs],
                out_specs=[specs[s] for s in out_specs],
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            ),
            out_shape=out_shape,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
            ),
            cost_estimate=self.cost(products),
            interpret=self.tiling.interpret,
            name=name,
        )(*self.scalars, *operands)

    def product(self, x: jax.Array, y: jax.Array, contract: tuple[int, int]) -> jax.Array:
        """float32 matrix product contracting one axis of each operand."""
        return lax.dot_general(
            x.astype(self.dtype),
            y.astype(self.dtype),
            (((contract[0],), (contract[1],)), ((), ())),
            preferred_element_type=jnp.float32,
            precision=lax.Precision.HIGHEST if self.dtype == jnp.float32 else None,
        )

    def when_live(self, scalars, b, i, j, body) -> None:
        """Run `body(masked)` on block (i, j) unless no query of it sees any key of it."""
        q_low, q_high, kv_low, kv_high = (ref[b, n] for ref, n in zip(scalars[:4], (i, i, j, j), strict=True))
        live = (j * self.ratio <= i) & (q_low <= kv_high) & (kv_low <= q_high)
        # Whole: strictly below the diagonal, and one document throughout.
        whole = ((j + 1) * self.ratio <= i) & (q_low == q_high) & (kv_low == kv_high)
        pl.when(live & whole)(functools.partial(body, masked=False))
        pl.when(live & ~whole)(functools.partial(body, masked=True))

    def visible(self, row_ids_ref, column_documents_ref, j) -> jax.Array:
        """bool [rows, block_kv]."""
        block = self.tiling.block_kv
        column = j * block + lax.broadcasted_iota(jnp.int32, (1, block), 1)
        return (column <= row_ids_ref[0, :, 0:1]) & (column_documents_ref[0] == row_ids_ref[0, :, 1:2])


def _forward_kernel(*refs, layout: _Layout):
    scalars, refs = refs[:6], refs[6:]
    q_ref, k_ref, v_ref, row_ids_ref, column_documents_ref, out_ref, lse_ref, acc_ref, peak_ref, total_ref = (
        refs
    )
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)
        total_ref[...] = jnp.zeros_like(total_ref)
        peak_ref[...] = jnp.full_like(peak_ref, online_softmax.MASKED)

    def body(masked: bool):
        scores = layout.product(q_ref[0, 0], k_ref[0, 0], (1, 1)) * layout.tiling.scale
        visible = layout.visible(row_ids_ref, column_documents_ref, j) if masked else None
        weights, decay = online_softmax.update(scores, visible, peak_ref, total_ref)
        acc_ref[...] = decay * acc_ref[...] + layout.product(weights, v_ref[0, 0], (1, 0))

    layout.when_live(scalars, b, i, j, body)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        # Every token sees itself, so the total is positive.
        total = total_ref[:, :1]
        out_ref[0, 0] = acc_ref[...] / total
        lse_ref[0, 0] = peak_ref[:, :1] + jnp.log(total)


def _weights_and_slopes(layout, refs, j, masked):
    """Softmax weights, and gradients of the unscaled scores, of one block."""
    q_ref, k_ref, v_ref, grad_ref, statistics_ref, row_ids_ref, column_documents_ref = refs
    scores = layout.product(q_ref[0, 0], k_ref[0, 0], (1, 1)) * layout.tiling.scale
    weights = jnp.exp(scores - statistics_ref[0, 0, :, 0:1])
    if masked:
        weights = jnp.where(layout.visible(row_ids_ref, column_documents_ref, j), weights, 0.0)
    slopes = layout.product(grad_ref[0, 0], v_ref[0, 0], (1, 1)) - statistics_ref[0, 0, :, 1:2]
    return weights, weights * slopes * layout.tiling.scale


def _query_gradient_kernel(*refs, layout: _Layout):
    scalars, inputs, (out_ref, acc_ref) = refs[:6], refs[6:13], refs[13:]
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def body(masked: bool):
        _, slopes = _weights_and_slopes(layout, inputs, j, masked)
        acc_ref[...] += layout.product(slopes, inputs[1][0, 0], (1, 0))

    layout.when_live(scalars, b, i, j, body)

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        out_ref[0, 0] = acc_ref[...]


def _key_gradient_kernel(*refs, layout: _Layout):
    scalars, inputs, (grad_k_ref, grad_v_ref, k_acc_ref, v_acc_ref) = refs[:6], refs[6:13], refs[13:]
    b, j, i = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(i == 0)
    def _():
        k_acc_ref[...] = jnp.zeros_like(k_acc_ref)
        v_acc_ref[...] = jnp.zeros_like(v_acc_ref)

    def body(masked: bool):
        weights, slopes = _weights_and_slopes(layout, inputs, j, masked)
        k_acc_ref[...] += layout.product(slopes, inputs[0][0, 0], (0, 0))
        v_acc_ref[...] += layout.product(weights, inputs[3][0, 0], (0, 0))

    layout.when_live(scalars, b, i, j, body)

    @pl.when(i == pl.num_programs(3) - 1)
    def _():
        grad_k_ref[0, 0] = k_acc_ref[...].astype(grad_k_ref.dtype)
        grad_v_ref[0, 0] = v_acc_ref[...].astype(grad_v_ref.dtype)


def forward(
    tiling: Tiling, q: jax.Array, k: jax.Array, v: jax.Array, document_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """float32 output [B, T, Hq, D] and log-sum-exp [B, T, Hq] of causal attention within documents."""
    layout = _Layout(tiling, q, k, document_ids)
    packed = (layout.batch, layout.kv_heads, layout.padded * layout.group)
    out, lse = layout.call(
        _forward_kernel,
        "ttt_attention_forward",
        2,
        True,
        (
            layout.pack_rows(q),
            layout.pack_keys(k),
            layout.pack_keys(v),
            layout.row_ids,
            layout.column_documents,
        ),
        ("rows", "columns", "columns", "row ids", "column documents"),
        ("rows", "row lse"),
        [jax.ShapeDtypeStruct((*packed, width), jnp.float32) for width in (layout.dim, 1)],
        [(layout.rows, layout.dim), (layout.rows, _LANES), (layout.rows, _LANES)],
    )
    return layout.unpack_rows(out), layout.unpack_rows(lse)[..., 0]


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
    layout = _Layout(tiling, q, k, document_ids)
    operands = (
        layout.pack_rows(q),
        layout.pack_keys(k),
        layout.pack_keys(v),
        layout.pack_rows(grad),
        layout.pack_rows(jnp.stack([lse, delta], axis=-1)),
        layout.row_ids,
        layout.column_documents,
    )
    in_specs = ("rows", "columns", "columns", "rows", "row statistics", "row ids", "column documents")
    rows = (layout.batch, layout.kv_heads, layout.padded * layout.group, layout.dim)
    columns = (layout.batch, layout.kv_heads, layout.padded, layout.dim)
    (grad_q,) = layout.call(
        _query_gradient_kernel,
        "ttt_attention_query_gradient",
        3,
        True,
        operands,
        in_specs,
        ("rows",),
        [jax.ShapeDtypeStruct(rows, jnp.float32)],
        [(layout.rows, layout.dim)],
    )
    grad_k, grad_v = layout.call(
        _key_gradient_kernel,
        "ttt_attention_key_gradient",
        4,
        False,
        operands,
        in_specs,
        ("columns", "columns"),
        [jax.ShapeDtypeStruct(columns, k.dtype), jax.ShapeDtypeStruct(columns, v.dtype)],
        [(tiling.block_kv, layout.dim)] * 2,
    )
    return layout.unpack_rows(grad_q), layout.unpack_keys(grad_k), layout.unpack_keys(grad_v)
