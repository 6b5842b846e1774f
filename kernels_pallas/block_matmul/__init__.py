"""Matrix product with weights in blocks of 2 to 8 bits, each with a scale of its own, as GGUF files hold
them.

`forms` lists the kinds of blocks and tells how a matrix of each lies in bytes. The weights of a product are
exactly the numbers that the file means; activations are taken as they are, or rounded to 8 bits with a scale
for each 32."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.block_matmul import cpu
from kernels_pallas.block_matmul.forms import FORMS, GROUP, TILE, Fields, Form, column_bytes, pack, unpack
from kernels_pallas.block_matmul.reference import block_matmul_reference, round_groups
from kernels_pallas.dispatch import Implementation, Way, run
from kernels_pallas.errors import require

__all__ = [
    "FORMS",
    "GROUP",
    "TILE",
    "Fields",
    "Form",
    "block_matmul",
    "column_bytes",
    "pack",
    "round_groups",
    "unpack",
]

_OP = "block_matmul"


def block_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    form: Form,
    columns: int,
    sizes: jax.Array | None = None,
    integers: bool = False,
    out_dtype: jnp.dtype | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """`x @ w.T` for the matrix [columns, K] that w stands for.

    Args:
      x: [..., K] float.
      w: uint8 [tiles, bytes] of `form`, see `forms.pack`; with `sizes` [E, tiles, bytes], one matrix for each
        group of rows of x.
      columns: rows of the matrix, of which the last tile may hold fewer than 16.
      sizes: int32 [E], the rows of x [T, K] that meet each matrix, in order; they sum to T.
      integers: round x to 8 bits with a scale for each 32 numbers (`round_groups`), whose products with a
        group of the weights are then summed exactly. Otherwise x is multiplied as it is, with sums in
        float32.
      out_dtype: x's dtype by default.
      implementation: "xla", which expands the weights to float32 for the product; the "cpu" kernel, which a
        C++ compiler makes on first use; or "auto", which takes the kernel on a CPU.

    Returns:
      [..., columns] of out_dtype. The kernel gives a row the same bits in a call of any number of rows.

    Raises:
      KernelError: inconsistent shapes or dtypes, or an implementation that there is not.
    """
    require(
        x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating),
        _OP,
        f"x must be float [..., K], got {x.dtype} {x.shape}",
    )
    k = x.shape[-1]
    require(
        k % form.unit == 0, _OP, f"K = {k} is no multiple of the {form.unit} numbers of a {form.name} block"
    )
    held = (form.tiles(columns), form.tile_bytes(k))
    grouped = sizes is not None
    require(
        w.dtype == jnp.uint8 and w.shape[w.ndim - 2 :] == held and w.ndim == 2 + grouped,
        _OP,
        f"a {form.name} matrix [{columns}, {k}] is uint8 {held}, one a group of rows where there are sizes; "
        f"w is {w.dtype} {w.shape}",
    )
    require(
        sizes is None or (x.ndim == 2 and sizes.shape == w.shape[:1]),
        _OP,
        f"sizes tell how many rows of x [T, K] meet each of the matrices, got x {x.shape} and w {w.shape}",
    )
    options: dict[str, Any] = {
        "form": form,
        "columns": columns,
        "integers": integers,
        "out_dtype": jnp.dtype(x.dtype if out_dtype is None else out_dtype),
    }
    rows = x.reshape(math.prod(x.shape[:-1]), k)
    arguments = (rows, w if grouped else w[None], jnp.zeros((1,), jnp.int32) if sizes is None else sizes)
    ways = {
        "xla": Way(functools.partial(block_matmul_reference, **options)),
        "cpu": Way(functools.partial(cpu.block_matmul_cpu, **options), cpu.KERNEL.refusal),
    }
    out: jax.Array = run(_OP, ways, arguments, implementation)
    return out.reshape(*x.shape[:-1], columns)
