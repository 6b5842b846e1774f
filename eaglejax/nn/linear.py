"""The one place where weights multiply activations or are looked up, so that a packed weight plugs in once.

A weight is an array or any pytree that follows :class:`PackedWeight` (a quantised matrix, say).
"""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from eaglejax.nn.gather import take


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
        y = _dot(x, w, transposed)
    if b is not None:
        y = y + b.astype(jnp.float32)
    return y.astype(dtype or x.dtype)


def _dot(x: jax.Array, w: jax.Array, transposed: bool) -> jax.Array:
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    alone = rows.shape[0] == 1 and w.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
    if alone:
        # XLA:CPU multiplies a single bf16 row on a scalar path, 10-20 times slower than two rows.
        rows = jnp.concatenate([rows, rows])
    y = jax.lax.dot_general(rows, w, dims, preferred_element_type=jnp.float32)
    if alone:
        y = y[:1]
    return y.reshape(*x.shape[:-1], y.shape[-1])


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
