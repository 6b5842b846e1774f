"""A quantised weight, as ``nn.linear`` multiplies it.

Integers times scales stand for the weight: ``w[i, o] ~ values[i, o] * scale[group(i), o]``. Activations meet
them in one of three ways: quantised to int8 with a scale for each token (``"dynamic"``), with one calibrated
scale (``"static"``), or as they are (None). Integer products accumulate in int32, so that a row's result does
not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import devices, pytree
from eaglejax.errors import ConfigError
from eaglejax.nn.gather import take
from eaglejax.quant.schemes import Activation


def _kernels() -> Any:
    # Importing Pallas takes a third of a second, which those who do not quantise are spared.
    from kernels_pallas import quant_matmul

    return quant_matmul


@pytree.dataclass
class QuantArray:
    """A matrix [I, O], or a stack of experts [E, I, O], in 8 or 4 bits.

    ``values`` int8 [..., I, O], or [..., I / 2, O] holding two 4-bit rows a byte (``bits`` 4, see
    ``kernels_pallas.quant_matmul.pack_int4``). ``scale`` f32 [..., O], or [..., G, O] for G groups of
    consecutive input rows. ``activation``: "dynamic", "static" or None (float). ``input_scale``,
    ``input_offset``: f32 scalars of static activations, ``x_q = round(x / input_scale + input_offset)``;
    without an offset they are symmetric. A token whose input is not finite gets NaN. ``offset_sums`` f32
    [..., O]: what an offset of one adds to the product of a column, ``column_sums(self)``; None computes it
    in every forward. ``smooth`` f32 [I] divides the input first, None for ones.

    ``transposed``: the matrix it stands for is the transpose, a table [O, I] whose rows can be looked up and
    that multiplies as a tied head; ``values`` and ``scale`` are laid out the same. ``dtype``: of the matrix
    it stands for, in which looked-up rows come.
    """

    values: jax.Array
    scale: jax.Array
    input_scale: jax.Array | None = None
    input_offset: jax.Array | None = None
    smooth: jax.Array | None = None
    offset_sums: jax.Array | None = None
    bits: int = pytree.static(default=8)
    activation: Activation | None = pytree.static(default="dynamic")
    transposed: bool = pytree.static(default=False)
    dtype: Any = pytree.static(default=np.dtype("bfloat16"))

    @property
    def rows(self) -> int:
        """Input rows I."""
        return self.values.shape[-2] * (2 if self.bits == 4 else 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix it stands for."""
        matrix = (self.rows, self.values.shape[-1])
        return (*self.values.shape[:-2], *(matrix[::-1] if self.transposed else matrix))

    @property
    def ndim(self) -> int:
        """Dimensions of the matrix it stands for."""
        return self.values.ndim

    @property
    def groups(self) -> int:
        """Groups of input rows with a scale of their own."""
        return self.scale.shape[-2] if self.scale.ndim == self.values.ndim else 1

    @property
    def nbytes(self) -> int:
        """Bytes of integers, scales and all."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def integers(self) -> jax.Array:
        """The weight's integers, int8 [..., I, O]."""
        return _kernels().unpack_int4(self.values) if self.bits == 4 else self.values

    def dequantize(self) -> jax.Array:
        """The matrix it stands for, f32 of ``shape``: integers times scales, over ``smooth``."""
        matrix = _times_scale(self.integers(), self.scale, self.groups)
        if self.smooth is not None:
            matrix = matrix / self.smooth[:, None]
        return jnp.swapaxes(matrix, -1, -2) if self.transposed else matrix

    def columns(self, ids: jax.Array) -> QuantArray:
        """The same weight with the output channels ``ids`` [n] alone (rows of a table)."""
        picked = {
            name: jnp.take(array, ids, axis=-1)
            for name in ("values", "scale", "offset_sums")
            if (array := getattr(self, name)) is not None
        }
        return self.replace(**picked)  # type: ignore[attr-defined]

    def matmul(self, x: jax.Array, *, transposed: bool) -> jax.Array:
        """``x`` [..., I] times the weight -> f32 [..., O].

        ``transposed`` must be the weight's own: its scales belong to one side. Raises ConfigError otherwise
        and for an ``x`` that is not float or not I wide.
        """
        if transposed != self.transposed:
            stored = "a table" if self.transposed else "a matrix"
            raise ConfigError(
                f"a weight quantised as {stored} of shape {self.shape} cannot be multiplied as the other; "
                "quantise it for its use (transposed)"
            )
        x = self._input(x)
        integers, x_scale = self._quantize(x)
        out = _kernels().quant_matmul(
            integers,
            self.values,
            self.scale,
            x_scale=x_scale,
            out_dtype=jnp.float32,
            implementation=devices.current().operation("quant_matmul"),
        )
        return out if self.input_offset is None else out - self._offset_terms()

    def grouped_matmul(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """``x`` [T, I], sorted by expert, times its expert's matrix -> f32 [T, O]; ``sizes`` [E] int32."""
        x = self._input(x)
        tokens, experts = x.shape[0], self.values.shape[0]
        expert = jnp.repeat(jnp.arange(experts), sizes, total_repeat_length=tokens)
        integers, x_scale = self._quantize(x)
        if x_scale is None:
            return self._grouped_float(x, sizes, expert)
        out = self._grouped_integers(integers, sizes, expert) * x_scale[:, None]
        return out if self.input_offset is None else out - self._offset_terms()[expert]

    def take(self, ids: jax.Array) -> jax.Array:
        """Rows ``ids`` (any shape, within the table) of a table [V, H] -> [..., H] in ``dtype``."""
        if not self.transposed:
            raise ConfigError(
                f"a weight quantised as a matrix of shape {self.shape} has no rows to look up; quantise "
                "embedding tables as such (transposed)"
            )
        flat = ids.reshape(-1)
        columns = take(self.values, flat, axis=1)
        integers = _kernels().unpack_int4(columns) if self.bits == 4 else columns
        rows = _times_scale(integers, take(self.scale, flat, axis=self.scale.ndim - 1), self.groups)
        if self.smooth is not None:
            rows = rows / self.smooth[:, None]
        return rows.T.reshape(*ids.shape, self.rows).astype(self.dtype)

    def _grouped_integers(self, x: jax.Array, sizes: jax.Array, expert: jax.Array) -> jax.Array:
        """int8 ``x`` [T, I] times the integers and scales of the experts, f32 [T, O]."""
        (experts, columns), groups = (self.values.shape[0], self.values.shape[-1]), self.groups

        def product(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
            return jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.int32) * scale[expert]

        if groups == 1:
            return product(x, self.integers(), self.scale.reshape(experts, columns))
        parts = (
            jnp.moveaxis(x.reshape(x.shape[0], groups, -1), 1, 0),
            jnp.moveaxis(self.integers().reshape(experts, groups, -1, columns), 1, 0),
            jnp.moveaxis(self.scale, 1, 0),
        )
        zero = jnp.zeros((x.shape[0], columns), jnp.float32)
        return jax.lax.scan(lambda total, part: (total + product(*part), None), zero, parts)[0]

    def _grouped_float(self, x: jax.Array, sizes: jax.Array, expert: jax.Array) -> jax.Array:
        if self.groups > 1:
            w = _times_scale(self.integers(), self.scale, self.groups).astype(x.dtype)
            return jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)
        w = self.integers().astype(x.dtype)
        out = jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)
        return out * self.scale.reshape(self.values.shape[0], -1)[expert]

    def _input(self, x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.shape[-1] != self.rows:
            raise ConfigError(
                f"a quantised weight of {self.rows} input rows multiplies floats [..., {self.rows}], not "
                f"{x.dtype} {x.shape}"
            )
        return x if self.smooth is None else (x * (1 / self.smooth)).astype(x.dtype)

    def _quantize(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """(what multiplies the integers, its scale [...] a row, None for floats)."""
        if self.activation is None:
            return x, None
        if self.activation == "dynamic":
            return _kernels().quantize_per_token(x)
        if self.input_scale is None:
            raise ConfigError("static activations need input_scale; calibrate, or use a dynamic scheme")
        # A product, as a division may become one or not with the shape of x, and change the last bit.
        steps = x.astype(jnp.float32) * (1 / self.input_scale)
        if self.input_offset is None:
            steps = jnp.clip(jnp.round(steps), -127, 127)
        else:
            steps = jnp.clip(jnp.round(steps + self.input_offset), -128, 127)
        # An integer cannot say that a number was none; the scale of its row can.
        sound = jnp.isfinite(x).all(-1)
        return steps.astype(jnp.int8), jnp.where(sound, self.input_scale, jnp.nan)

    def _offset_terms(self) -> jax.Array:
        """What the input's offset added to every product, f32 [..., O]."""
        assert self.input_scale is not None
        assert self.input_offset is not None
        sums = column_sums(self) if self.offset_sums is None else self.offset_sums
        return self.input_scale * self.input_offset * sums


def column_sums(weight: QuantArray) -> jax.Array:
    """Sum over input rows of integer times scale, f32 [..., O]: what an input offset of one contributes."""
    integers, groups = weight.integers(), weight.groups
    parts = integers.reshape(*integers.shape[:-2], groups, -1, integers.shape[-1])
    sums = jnp.sum(parts, axis=-2, dtype=jnp.int32)
    return jnp.sum(sums * weight.scale.reshape(sums.shape), axis=-2)


def _times_scale(integers: jax.Array, scale: jax.Array, groups: int) -> jax.Array:
    """Integers [..., I, O] times ``scale``, of ``groups`` groups of rows -> f32."""
    parts = integers.reshape(*integers.shape[:-2], groups, -1, integers.shape[-1]).astype(jnp.float32)
    scales = scale.reshape(*parts.shape[:-2], 1, parts.shape[-1])
    return (parts * scales).reshape(integers.shape)
