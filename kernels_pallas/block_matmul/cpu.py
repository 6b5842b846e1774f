"""Products with block weights on CPUs: a C++ kernel that XLA calls, compiled on first use.

Weights are read from memory once, in their blocks, and every row's result is the same to the bit however many
rows there are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.block_matmul.forms import Form
from kernels_pallas.block_matmul.reference import block_matmul_reference
from kernels_pallas.foreign import Kernel

KERNEL = Kernel(
    op="block_matmul",
    source=Path(__file__).parent / "native" / "block_matmul.cc",
    symbols=("BlockMatmul",),
    left="products with block weights are left to XLA, which expands them to float32 each time",
)


def block_matmul_cpu(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    form: Form,
    columns: int,
    integers: bool,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """See `block_matmul` in the package; x is [M, K], w [E, tiles, bytes] and sizes [E].

    Derivatives are the reference's. Under vmap rows of x that share one matrix become rows of one call;
    anything else is multiplied one after the other."""
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        x = x.astype(jnp.float32)
    wide = out_dtype if out_dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)
    call = _product(KERNEL.target("BlockMatmul"), form, columns, integers, wide)
    return call(x, w, sizes).astype(out_dtype)


@functools.cache
def _product(
    target: str, form: Form, columns: int, integers: bool, out_dtype: jnp.dtype
) -> Callable[..., jax.Array]:
    """The call as a differentiable and batchable function of (x, w, sizes)."""
    attributes = {
        "bits": np.int64(form.bits),
        "group": np.int64(form.group),
        "unit": np.int64(form.unit),
        "mins": form.mins,
        "codebook": form.codebook is not None,
        "integers": integers,
    }

    @jax.custom_batching.custom_vmap
    def run(x, w, sizes):
        shape = jax.ShapeDtypeStruct((x.shape[0], columns), out_dtype)
        return jax.ffi.ffi_call(target, shape)(x, w, sizes, **attributes)

    @run.def_vmap
    def run_batched(size: int, batched: list[bool], x, w, sizes):
        if batched == [True, False, False] and w.shape[0] == 1:
            return run(x.reshape(-1, x.shape[-1]), w, sizes).reshape(size, -1, columns), True
        args = (x, w, sizes)
        mapped = [a for a, is_batched in zip(args, batched, strict=True) if is_batched]

        def one(parts):
            rest = iter(parts)
            return run(*(next(rest) if b else a for a, b in zip(args, batched, strict=True)))

        return jax.lax.map(one, mapped), True

    @jax.custom_jvp
    def product(x, w, sizes):
        return run(x, w, sizes)

    @product.defjvp
    def product_jvp(primals, tangents):
        def reference(x):
            # Rounding has no derivative: that of the product with x as it is.
            return block_matmul_reference(
                x, *primals[1:], form=form, columns=columns, integers=False, out_dtype=out_dtype
            )

        _, tangent = jax.jvp(reference, primals[:1], tangents[:1])
        return product(*primals), tangent

    return product
