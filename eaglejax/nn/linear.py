"""The one place where weights multiply activations or are looked up, so that a packed weight plugs in once.

A weight is an array or any pytree that follows :class:`PackedWeight` (a quantised matrix, say).
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from eaglejax.nn.gather import take
from kernels_pallas.dense_matmul import dense_matmul


@runtime_checkable
class PackedWeight(Protocol):
    """A weight that knows its own arithmetic. Logical shapes are those of the array it stands for."""

    def matmul(self, x: jax.Array, *, transposed: bool) -> jax.Array:
        """``x`` [..., I] times the [I, O] weight ([O, I] when ``transposed``) -> f32 [..., O]."""

    def grouped_matmul(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """``x`` [T, I], sorted by group, times its group's [I, O] of E -> f32 [T, O]; ``sizes`` [E] int32."""

    def take(self, ids: jax.Array) -> jax.Array:
        """Rows ``ids`` of a [V, H] table -> [..., H] in the activations' dtype."""


Weight = jax.Array | PackedWeight


def linear(
    x: jax.Array, w: Any, b: jax.Array | None = None, *, transposed: bool = False, dtype: Any = None
) -> jax.Array:
    """``x`` [..., I] @ ``w`` [I, O] + ``b`` [O] -> [..., O], accumulated in f32.

    ``transposed``: ``w`` is stored [O, I] (a tied head is the embedding table). ``dtype`` of the result:
    x's by default.
    """
    if isinstance(w, PackedWeight):
        y = w.matmul(x, transposed=transposed)
    else:
        y = dense_matmul(x, w, transposed=transposed, out_dtype=jnp.float32)
    if b is not None:
        y = y + b.astype(jnp.float32)
    return y.astype(dtype or x.dtype)


def grouped_linear(x: jax.Array, w: Any, sizes: jax.Array) -> jax.Array:
    """``x`` [T, I], sorted by group, times its group's matrix of ``w`` [E, I, O] -> [T, O] in x's dtype.

    ``sizes`` [E] int32: rows of each group, summing to T.
    """
    if isinstance(w, PackedWeight):
        return w.grouped_matmul(x, sizes).astype(x.dtype)
    return jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32).astype(x.dtype)


def embedding(table: Any, ids: jax.Array) -> jax.Array:
    """Rows ``ids`` (any shape, within the table) of ``table`` [V, H] -> [..., H]."""
    if isinstance(table, PackedWeight):
        return table.take(ids)
    return take(table, ids)
