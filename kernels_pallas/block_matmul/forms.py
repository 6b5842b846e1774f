"""Forms of block weights, and how a matrix of each lies in bytes for `block_matmul`.

A matrix [N, K] is cut into tiles of 16 rows (the output columns of a product), padded with zeros, and along K
into units, which hold everything of themselves: first the numbers of each 32, then the scales, for 16 rows at
a time. So a tile is read from its first byte to its last. Of 32 numbers of a row, byte i of word c of a
register is number 4 q + i of row c of quad q:

- 4 bits and more: 4 registers of nibbles, quads 0 to 3 low, 4 to 7 high; 8 bits: 8 registers of bytes
- 2 and 3 bits: 2 registers, whose bytes hold two bits of four quads each, the first one lowest
- a fifth (third) bit: 1 register, whose bytes hold one bit of each quad; a fifth and sixth: 2 registers, as
  of 2 bits

Scales are float16, least numbers ("mins") beside them. Forms of two levels have units of 256 with one of
either, then int8 factors for each group of 16 or 32."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

TILE = 16
"""Rows of a matrix [N, K] that lie together."""

GROUP = 32
"""Numbers whose bits lie together, and that share a scale of rounded activations."""

_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclasses.dataclass(frozen=True)
class Form:
    """A kind of block; hashable.

    A number is `scale * (q - 2 ** (bits - 1))` for an unsigned q of `bits` bits; with `mins` `scale * q +
    min` where a unit is 32 (one level), `scale * q - min` where it is 256; with a `codebook` `scale *
    codebook[q]`. `group`: numbers that share a scale."""

    name: str
    bits: int
    group: int = GROUP
    unit: int = GROUP
    mins: bool = False
    codebook: tuple[int, ...] | None = None

    @property
    def two_level(self) -> bool:
        """Whether a unit's groups have integer factors of its scale."""
        return self.unit > GROUP

    @property
    def packed_group(self) -> int:
        """Bytes of the numbers of 32 rows of a tile."""
        return GROUP * self.bits // 8 * TILE

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of a tile, scales and all."""
        scales = 2 + (self.unit // self.group if self.two_level else 0)
        return self.unit // GROUP * self.packed_group + TILE * scales * (2 if self.mins else 1)

    def tiles(self, rows: int) -> int:
        """Tiles of a matrix of so many rows."""
        return -(-rows // TILE)

    def tile_bytes(self, k: int) -> int:
        """Bytes of a tile of K numbers a row."""
        return k // self.unit * self.unit_bytes


FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form("Q4_0", 4),
        Form("Q4_1", 4, mins=True),
        Form("Q5_0", 5),
        Form("Q5_1", 5, mins=True),
        Form("Q8_0", 8),
        Form("IQ4_NL", 4, codebook=_IQ4_NL),
        Form("Q2_K", 2, group=16, unit=256, mins=True),
        Form("Q3_K", 3, group=16, unit=256),
        Form("Q4_K", 4, unit=256, mins=True),
        Form("Q5_K", 5, unit=256, mins=True),
        Form("Q6_K", 6, group=16, unit=256),
    )
}
"""By the name of the block type in a GGUF file."""


@dataclasses.dataclass(frozen=True)
class Fields:
    """A matrix [N, K] taken apart: `q` uint8 [N, K]; `scale`, and `min` of forms with mins, float16 [N, K /
    unit]; of forms of two levels `factor`, and `min_factor`, int8 [N, K / group]."""

    q: np.ndarray
    scale: np.ndarray
    min: np.ndarray | None = None
    factor: np.ndarray | None = None
    min_factor: np.ndarray | None = None


def pack(form: Form, fields: Fields) -> np.ndarray:
    """uint8 [tiles, tile_bytes(K)] of a matrix [N, K]."""
    n, k = fields.q.shape
    tiles, units, groups = form.tiles(n), k // form.unit, form.unit // GROUP

    def tiled(array: np.ndarray) -> np.ndarray:
        """[N, K / x] as [tiles, 16, units, what is left], zeros where there are no rows."""
        if n % TILE:
            array = np.concatenate([array, np.zeros((-n % TILE, array.shape[1]), array.dtype)])
        return array.reshape(tiles, TILE, units, -1)

    words = np.ascontiguousarray(tiled(fields.q)).view("<u4").reshape(tiles, TILE, units, groups, 8)
    quads = np.ascontiguousarray(words.transpose(0, 2, 3, 4, 1))  # [tiles, units, groups, 8, 16]
    planes = _planes(form, quads.view(np.uint8).reshape(tiles, units, groups, 8, 4 * TILE))
    parts = [planes.reshape(tiles, units, -1)]
    wanted = [fields.scale, fields.min if form.mins else None]
    wanted += [fields.factor, fields.min_factor if form.mins else None] if form.two_level else []
    for array in wanted:
        if array is not None:
            lying = np.ascontiguousarray(tiled(array).transpose(0, 2, 3, 1))
            parts.append(lying.view(np.uint8).reshape(tiles, units, -1))
    return np.concatenate(parts, axis=-1).reshape(tiles, -1)


def _planes(form: Form, quads: np.ndarray) -> np.ndarray:
    """uint8 [..., 8, 64], a number a byte, as `Form.packed_group` bytes in the last dimensions."""
    if form.bits == 8:
        return quads
    base = 4 if form.bits >= 4 else 2
    low = quads & ((1 << base) - 1)
    found = [low[..., :4, :] | low[..., 4:, :] << 4] if base == 4 else [_gathered(low, 2)]
    if form.bits > base:
        found.append(_gathered(quads >> base, form.bits - base))
    return np.concatenate(found, axis=-2)


def _gathered(quads: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of so many bits, [..., 8, 64], as [..., bits, 64]."""
    each = 8 // bits
    parts = quads.reshape(*quads.shape[:-2], bits, each, quads.shape[-1])
    out = parts[..., 0, :].copy()
    for i in range(1, each):
        out |= parts[..., i, :] << (bits * i)
    return out


def column_bytes(form: Form) -> np.ndarray:
    """int32 [16, unit_bytes / 16]: where in a unit the bytes of each row of a tile lie, in their order."""
    numbers = form.unit // GROUP * form.packed_group
    words = np.arange(numbers).reshape(-1, TILE, 4)
    places, start = [words.transpose(1, 0, 2).reshape(TILE, -1)], numbers
    for size, count in _scale_parts(form):
        part = start + np.arange(count * TILE * size).reshape(count, TILE, size)
        places.append(part.transpose(1, 0, 2).reshape(TILE, -1))
        start += part.size
    return np.concatenate(places, axis=1).astype(np.int32)


def _scale_parts(form: Form) -> list[tuple[int, int]]:
    """(bytes of one, how many a row) of the parts behind a unit's numbers."""
    sides = 2 if form.mins else 1
    return [(2, 1)] * sides + ([(1, form.unit // form.group)] * sides if form.two_level else [])


def unpack(form: Form, w: jax.Array, *, columns: int = TILE) -> jax.Array:
    """Tiles uint8 [..., tile_bytes(K)] -> the numbers they stand for, float32 [..., columns, K], to the bit
    what the form means. `columns` 1: of tiles of which one row alone was taken (`column_bytes`)."""
    lead = w.shape[:-1]
    units = w.reshape(*lead, -1, form.unit_bytes * columns // TILE)
    groups = form.unit // GROUP
    packed = units[..., : groups * form.packed_group * columns // TILE]
    q = _numbers(
        form, packed.reshape(*units.shape[:-1], groups, -1, columns, 4)
    )  # [..., units, groups, 8, columns, 4]
    scales, start = [], packed.shape[-1]
    for size, count in _scale_parts(form):
        part = units[..., start : start + count * columns * size].reshape(
            *units.shape[:-1], count, columns, size
        )
        start += count * columns * size
        wide = (
            jax.lax.bitcast_convert_type(part, jnp.float16)
            if size == 2
            else jax.lax.bitcast_convert_type(part[..., 0], jnp.int8)
        )
        scales.append(wide.astype(jnp.float32))
    if form.two_level:
        half = len(scales) // 2
        scales = [side * factor for side, factor in zip(scales[:half], scales[half:], strict=True)]
    shape = (*units.shape[:-1], form.unit // form.group, form.group // 4, columns, 4)
    numbers = q.reshape(shape).astype(jnp.float32) * scales[0][..., :, None, :, None]
    if form.mins:
        least = scales[1][..., :, None, :, None]
        numbers = numbers - least if form.two_level else numbers + least
    numbers = jnp.moveaxis(numbers, -2, -len(shape) + len(lead))  # columns before units
    return numbers.reshape(*lead, columns, -1)


def _numbers(form: Form, packed: jax.Array) -> jax.Array:
    """int32 [..., 8, columns, 4] of registers [..., registers, columns, 4], centred unless the form has
    mins."""
    base = 8 if form.bits == 8 else 4 if form.bits >= 4 else 2
    rest = packed.astype(jnp.int32)
    low, high = rest[..., :base, :, :], rest[..., base:, :, :]
    q = _spread(low, base) if base < 8 else low
    if base == 4:
        q = jnp.concatenate([low & 15, low >> 4], axis=-3)
    if form.bits > base:
        q = q | _spread(high, form.bits - base) << base
    if form.codebook is not None:
        return jnp.asarray(form.codebook, jnp.int32)[q]
    return q if form.mins else q - (1 << (form.bits - 1))


def _spread(registers: jax.Array, bits: int) -> jax.Array:
    """The inverse of `_gathered`, over axis -3."""
    shifts = jnp.arange(0, 8, bits)[:, None, None]
    parts = (registers[..., :, None, :, :] >> shifts) & ((1 << bits) - 1)
    return parts.reshape(*registers.shape[:-3], 8, *registers.shape[-2:])
