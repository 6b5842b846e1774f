"""A weight in the blocks of a GGUF file, as ``nn.linear`` multiplies it: exactly the file's numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import devices, pytree
from eaglejax.errors import ConfigError
from eaglejax.nn.gather import take
from kernels_pallas.block_matmul import TILE, Form, block_matmul, column_bytes, unpack


@pytree.dataclass
class BlockArray:
    """A matrix [I, O], or a stack of experts [E, I, O], in blocks along I.

    ``data`` uint8 [..., tiles, bytes]: 16 output columns a tile, as ``form`` lies
    (``kernels_pallas.block_matmul``). ``rows``, ``outputs``: I and O. ``rounded``: activations are rounded to
    8 bits, with a scale for each 32 of them, before they meet it; otherwise they stay as they are.

    ``transposed``: the matrix it stands for is the transpose, a table [O, I] whose rows can be looked up and
    that multiplies as a tied head. ``dtype``: of the matrix it stands for, in which looked-up rows come."""

    data: jax.Array
    form: Form = pytree.static()
    rows: int = pytree.static()
    outputs: int = pytree.static()
    rounded: bool = pytree.static(default=False)
    transposed: bool = pytree.static(default=False)
    dtype: Any = pytree.static(default=np.dtype("bfloat16"))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix it stands for."""
        matrix = (self.rows, self.outputs)
        return (*self.data.shape[:-2], *(matrix[::-1] if self.transposed else matrix))

    @property
    def ndim(self) -> int:
        """Dimensions of the matrix it stands for."""
        return self.data.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return self.data.nbytes

    def dequantize(self) -> jax.Array:
        """The matrix it stands for, f32 of ``shape``: to the bit the file's numbers."""
        table = self._table()
        return table if self.transposed else jnp.swapaxes(table, -1, -2)

    def columns(self, ids: jax.Array) -> BlockArray:
        """The same weight with the output channels ``ids`` [n] alone (rows of a table)."""
        picked = self._picked(ids)  # [n, units, bytes]
        short = -len(ids) % TILE
        picked = jnp.pad(picked, ((0, short), (0, 0), (0, 0)))
        tiles = picked.reshape(-1, TILE, *picked.shape[1:]).swapaxes(1, 2)
        place = np.argsort(column_bytes(self.form).reshape(-1))
        data = tiles.reshape(*tiles.shape[:2], -1)[..., place].reshape(tiles.shape[0], -1)
        return self.replace(data=data, outputs=len(ids))  # type: ignore[attr-defined,no-any-return]

    def matmul(self, x: jax.Array, *, transposed: bool) -> jax.Array:
        """``x`` [..., I] times the weight -> f32 [..., O].

        ``transposed`` must be the weight's own: its blocks lie along one side. Raises ConfigError otherwise
        and for an ``x`` that is not float or not I wide."""
        if transposed != self.transposed:
            stored = "a table" if self.transposed else "a matrix"
            raise ConfigError(
                f"blocks of {stored} of shape {self.shape} cannot be multiplied as the other: "
                "they lie along its inputs"
            )
        return self._product(x)

    def grouped_matmul(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """``x`` [T, I], sorted by expert, times its expert's matrix -> f32 [T, O]; ``sizes`` [E] int32."""
        return self._product(x, sizes)

    def take(self, ids: jax.Array) -> jax.Array:
        """Rows ``ids`` (any shape, within the table) of a table [V, H] -> [..., H] in ``dtype``."""
        if not self.transposed:
            raise ConfigError(
                f"blocks of a matrix of shape {self.shape} have no rows to look up; "
                "embedding tables are kept as such"
            )
        picked = self._picked(ids.reshape(-1))
        found = unpack(self.form, picked.reshape(picked.shape[0], -1), columns=1)
        return found.reshape(*ids.shape, self.rows).astype(self.dtype)

    def _product(self, x: jax.Array, sizes: jax.Array | None = None) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.shape[-1] != self.rows:
            raise ConfigError(
                f"a quantised weight of {self.rows} input rows multiplies floats [..., {self.rows}], not "
                f"{x.dtype} {x.shape}"
            )
        return block_matmul(
            x,
            self.data,
            form=self.form,
            columns=self.outputs,
            sizes=sizes,
            integers=self.rounded,
            out_dtype=jnp.dtype(jnp.float32),
            implementation=devices.current().operation("block_matmul"),
        )

    def _table(self) -> jax.Array:
        """f32 [..., O, I]."""
        numbers = unpack(self.form, self.data)
        return numbers.reshape(*self.data.shape[:-2], -1, self.rows)[..., : self.outputs, :]

    def _picked(self, ids: jax.Array) -> jax.Array:
        """The bytes of output channels ``ids`` [n]: uint8 [n, units, bytes of one channel]."""
        units = self.rows // self.form.unit
        tiles = take(self.data, ids // TILE).reshape(-1, units, self.form.unit_bytes)
        places = jnp.asarray(column_bytes(self.form))[ids % TILE]
        return jnp.take_along_axis(tiles, places[:, None, :], axis=-1)


def is_blocks(leaf: Any) -> bool:
    """True for a leaf of parameters that is kept in blocks."""
    return isinstance(leaf, BlockArray)
