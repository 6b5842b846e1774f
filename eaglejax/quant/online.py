"""Rotations that cannot be folded away and run with the model: R4 before a down projection. And the array
that any weight stands for, packed or turned.

R3 turns queries and keys behind the rotary embedding, which stands between them and their weights; it is the
flag ``qk_rotation`` of ModelConfig. R4 turns what comes out of the gated activation (Ashkboos et al. 2024,
arXiv:2404.00456): it belongs to the weight that reads it, so that one is wrapped.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import devices, pytree
from eaglejax.nn.linear import grouped_linear, linear
from eaglejax.quant.array import QuantArray
from eaglejax.quant.blocks import BlockArray


@pytree.dataclass
class HadamardInput:
    """A weight [..., I, O] whose input is first multiplied by the orthonormal Hadamard matrix of order I.

    ``inner``: the weight as it meets the turned input (an array, or another ``PackedWeight``), that is
    ``H^T W`` for a weight W.
    """

    inner: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight it stands for."""
        return self.inner.shape

    @property
    def dtype(self) -> Any:
        """Of the weight it stands for."""
        return self.inner.dtype

    def dequantize(self) -> jax.Array:
        """The weight it stands for, f32 of ``shape``: the turn times ``inner``."""
        turn = _turn(jnp.eye(self.shape[-2], dtype=jnp.float32))
        return jnp.matmul(turn, plain(self.inner, jnp.float32), precision=jax.lax.Precision.HIGHEST)

    def matmul(self, x: jax.Array, *, transposed: bool) -> jax.Array:
        """See ``PackedWeight``."""
        return linear(_turn(x), self.inner, transposed=transposed, dtype=jnp.float32)

    def grouped_matmul(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """See ``PackedWeight``; every group's input is turned alike."""
        return grouped_linear(_turn(x), self.inner, sizes)

    def take(self, ids: jax.Array) -> jax.Array:
        """Refused: a table has no input to turn."""
        raise TypeError(f"rows {ids.shape} of a weight whose input is rotated have no meaning")


def plain(weight: Any, dtype: Any = None) -> jax.Array:
    """The array that a weight of a target stands for, packed or not, in ``dtype`` (None: its own)."""
    array = weight.dequantize() if isinstance(weight, QuantArray | BlockArray | HadamardInput) else weight
    return jnp.asarray(array, weight.dtype if dtype is None else dtype)


def _turn(x: jax.Array) -> jax.Array:
    # Importing Pallas takes a third of a second, which those who do not rotate are spared.
    from kernels_pallas.hadamard import hadamard

    return hadamard(x, implementation=devices.current().operation("hadamard"))
