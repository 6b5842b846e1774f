"""Quantised matrix product for CPUs: a C++ kernel that XLA calls, compiled on first use.

Weights are read from memory once, at the width that they are stored in, and every row's result is the same to
the bit however many rows there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from kernels_pallas.foreign import Kernel
from kernels_pallas.quant_matmul.reference import quant_matmul_reference

KERNEL = Kernel(
    op="quant_matmul",
    source=Path(__file__).parent / "native" / "quant_matmul.cc",
    symbols=("QuantMatmul",),
    left="products with packed weights are left to XLA, which is slower",
)


def quant_matmul_cpu(
    x: jax.Array,
    x_scale: jax.Array | None,
    w: jax.Array,
    w_scale: jax.Array,
    *,
    packed: bool,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """See `quant_matmul` in the package; x is [M, K], x_scale [M] and w_scale [K / group, N].

    Derivatives are the reference's. Under vmap rows of x that share their weights become rows of one call;
    batched weights are multiplied one after the other.
    """
    narrow = jnp.dtype(jnp.float16)
    if x.dtype == narrow:
        x = x.astype(jnp.float32)
    wide_dtype = jnp.dtype(jnp.float32) if out_dtype not in (jnp.float32, jnp.bfloat16) else out_dtype
    # A buffer of the call is never absent: floating x has no scales.
    scales = jnp.zeros((0,), jnp.float32) if x_scale is None else x_scale.astype(jnp.float32)
    target = KERNEL.target("QuantMatmul")
    call = _product(target, x_scale is not None, packed, wide_dtype)
    return call(x, scales, w, w_scale.astype(jnp.float32)).astype(out_dtype)


@functools.cache
def _product(target: str, integer: bool, packed: bool, out_dtype: jnp.dtype) -> Callable[..., jax.Array]:
    """The call as a differentiable and batchable function of (x, x_scale, w, w_scale)."""

    @jax.custom_batching.custom_vmap
    def run(x, x_scale, w, w_scale):
        shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), out_dtype)
        return jax.ffi.ffi_call(target, shape)(x, x_scale, w, w_scale)

    @run.def_vmap
    def run_batched(size: int, batched: list[bool], *args):
        x_args, w_args = args[:2], args[2:]
        if not any(batched[2:]):
            x, x_scale = (
                _flat(a, size, is_batched) for a, is_batched in zip(x_args, batched[:2], strict=True)
            )
            if not integer:
                x_scale = x_scale[:0]
            return run(x, x_scale, *w_args).reshape(size, -1, w_args[0].shape[-1]), True
        mapped = [a for a, is_batched in zip(args, batched, strict=True) if is_batched]

        def one(parts):
            rest = iter(parts)
            return run(*(next(rest) if b else a for a, b in zip(args, batched, strict=True)))

        return jax.lax.map(one, mapped), True

    @jax.custom_jvp
    def product(x, x_scale, w, w_scale):
        return run(x, x_scale, w, w_scale)

    @product.defjvp
    def product_jvp(primals, tangents):
        def reference(x, x_scale, w, w_scale):
            row_scale = x_scale if integer else None
            return quant_matmul_reference(x, row_scale, w, w_scale, packed=packed, out_dtype=out_dtype)

        _, tangent = jax.jvp(reference, primals, tangents)
        return product(*primals), tangent

    return product


def _flat(a: jax.Array, size: int, is_batched: bool) -> jax.Array:
    """[size, M, ...] -> [size * M, ...], a repeated where it is not batched."""
    if not is_batched:
        a = jnp.broadcast_to(a, (size, *a.shape))
    return a.reshape(-1, *a.shape[2:])
