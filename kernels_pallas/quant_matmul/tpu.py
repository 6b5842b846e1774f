"""Quantised matrix product for TPU: weights stay 8 or 4 bits wide until they are in VMEM.

K is cut into units, a scale group or a tile: x is laid out [units, M, unit] and w [units, unit, N], so that a
unit is a leading index. Within a unit of 4-bit weights x is reordered to even rows, then odd ones, which is
the order in which unpacking a byte's two nibbles side by side gives the weights; nothing is interleaved in
the kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.quant_matmul.packing import nibbles

_BLOCK_M, _BLOCK_N, _BLOCK_K = 256, 512, 1024
_RESIDENT_BYTES = 2 << 20  # of activations kept in VMEM for all of K, so that they are read once
_LANES = 128
_SUBLANES = 32  # rows of an 8-bit tile


def unit_size(k: int, groups: int) -> int:
    """Rows of K a unit: the scale group, or for one scale a channel the largest tile dividing K."""
    if groups > 1:
        return k // groups
    return next((u for u in range(_BLOCK_K, 0, -128) if k % u == 0), k)


def refusal(x: jax.Array, w: jax.Array, w_scale: jax.Array, packed: bool) -> str | None:
    """Why the kernel does not take these arguments, or None. x is [M, K], w_scale [K / group, N]."""
    unit = unit_size(x.shape[1], w_scale.shape[0])
    smallest = _SUBLANES * (2 if packed else 1)
    if x.dtype == jnp.float16:
        return "takes int8, float32 and bfloat16 activations, not float16"
    if unit % smallest:
        return f"takes {4 if packed else 8}-bit groups of a multiple of {smallest} rows, got {unit}"
    if unit > _BLOCK_K:
        return f"takes groups of at most {_BLOCK_K} rows, and K a multiple of 128 without groups; got {unit}"
    return None


def has_int8_products() -> bool:
    """Whether the TPU at hand or compiled for multiplies int8; without one (interpreted), yes."""
    return not pltpu.is_tpu_device() or pltpu.get_tpu_info().is_matmul_supported(jnp.int8, jnp.int8)


def _kernel(x_ref, w_ref, w_scale_ref, *refs, packed: bool, integer: bool, grouped: bool, int8: bool):
    *x_scale_refs, out_ref, acc_ref = refs
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    units = w_ref.shape[0]
    first = step * units if x_ref.shape[0] > units else 0
    for unit in range(units):
        x = x_ref[first + unit]
        w = w_ref[unit]
        if packed:
            w = jnp.concatenate(nibbles(w), axis=0)
        if integer and not int8:
            # Exact: 8-bit integers are bfloat16 numbers, and a unit's sum stays below 2^24.
            x = x.astype(jnp.bfloat16)
        product = lax.dot_general(
            x,
            w.astype(x.dtype),
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.int32 if integer and int8 else jnp.float32,
            precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        )
        if grouped:
            acc_ref[...] += product.astype(jnp.float32) * w_scale_ref[pl.ds(step * units + unit, 1)]
        else:
            acc_ref[...] += product.astype(acc_ref.dtype)

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        out = acc_ref[...].astype(jnp.float32)
        if not grouped:
            out *= w_scale_ref[...]
        for x_scale_ref in x_scale_refs:
            out *= x_scale_ref[...]
        out_ref[...] = out.astype(out_ref.dtype)


def quant_matmul_tpu(
    x: jax.Array,
    x_scale: jax.Array | None,
    w: jax.Array,
    w_scale: jax.Array,
    *,
    packed: bool,
    out_dtype: jnp.dtype,
    int8: bool,
    interpret: Any,
) -> jax.Array:
    """See `quant_matmul` in the package; x is [M, K], x_scale [M] and w_scale [K / group, N].

    `int8` multiplies int8 activations as such; otherwise as bfloat16, in float32 sums that stay exact.
    """
    m, k = x.shape
    n = w.shape[1]
    grouped = w_scale.shape[0] > 1
    unit = unit_size(k, w_scale.shape[0])
    units = k // unit
    stride = next(s for s in range(max(1, _BLOCK_K // unit), 0, -1) if units % s == 0)
    block_m, block_n = min(m, _BLOCK_M), min(n, _BLOCK_N)
    integer = x_scale is not None
    resident = units * block_m * max(unit, _LANES) * x.dtype.itemsize <= _RESIDENT_BYTES

    if packed:
        x = jnp.swapaxes(x.reshape(m, units, unit // 2, 2), 2, 3)
    x_units = jnp.moveaxis(x.reshape(m, units, unit), 1, 0)
    w_units = w.reshape(units, -1, n)

    operands = [x_units, w_units, w_scale.astype(jnp.float32)]
    in_specs = [
        pl.BlockSpec((units, block_m, unit), lambda i, j, s: (0, i, 0))
        if resident
        else pl.BlockSpec((stride, block_m, unit), lambda i, j, s: (s, i, 0)),
        pl.BlockSpec((stride, w_units.shape[1], block_n), lambda i, j, s: (s, 0, j)),
        pl.BlockSpec((w_scale.shape[0], block_n), lambda i, j, s: (0, j)),
    ]
    if x_scale is not None:
        operands.append(x_scale.astype(jnp.float32)[:, None])
        in_specs.append(pl.BlockSpec((block_m, 1), lambda i, j, s: (i, 0)))

    return pl.pallas_call(
        functools.partial(_kernel, packed=packed, integer=integer, grouped=grouped, int8=int8),
        grid=(pl.cdiv(m, block_m), pl.cdiv(n, block_n), units // stride),
        in_specs=in_specs,
        out_specs=pl.BlockSpec((block_m, block_n), lambda i, j, s: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
        scratch_shapes=[
            pltpu.VMEM((block_m, block_n), jnp.int32 if integer and not grouped else jnp.float32)
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * m * n * k,
            transcendentals=0,
            bytes_accessed=x.nbytes * (1 if resident else pl.cdiv(n, block_n))
            + w.nbytes * pl.cdiv(m, block_m)
            + w_scale.nbytes
            + m * n * out_dtype.itemsize,
        ),
        interpret=interpret,
        name="quant_matmul",
    )(*operands)
