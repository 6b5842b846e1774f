"""Quantised matrices between files and parameters.

Files keep a matrix as [out, in] with one value a byte or several packed ones; parameters hold [in, out], two
4-bit rows a byte. ``Part`` is the form in between, which every file format encodes and decodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from eaglejax.checkpoint.safetensors_io import Pending
from eaglejax.errors import CheckpointError
from eaglejax.quant.array import QuantArray, column_sums


@dataclasses.dataclass(frozen=True)
class Kind:
    """How one matrix is quantised.

    ``bits`` of the weights: 8 or 4. ``activation``: ``dynamic`` (a scale a token), ``static`` (one calibrated
    scale) or None (activations stay floating-point). ``group``: input channels that share a scale, None for
    one scale an output channel. ``asymmetric``: static activations have an offset as well.
    """

    bits: int
    activation: str | None
    group: int | None = None
    asymmetric: bool = False

    @property
    def scheme(self) -> str:
        """The scheme's name without its group size."""
        name = f"w{self.bits}a{16 if self.activation is None else 8}"
        return name + "-static" if self.activation == "static" else name


@dataclasses.dataclass(frozen=True)
class Part:
    """One quantised matrix as files keep it: weight = values * scale.

    ``values`` int8 [O, I], one value a byte; ``scale`` f32 [O, G], G = 1 without groups. ``input_scale`` and,
    asymmetric, ``input_offset`` f32 of static activations: clip(round(x / input_scale + input_offset)).
    """

    kind: Kind
    values: np.ndarray
    scale: np.ndarray
    input_scale: np.float32 | None = None
    input_offset: np.float32 | None = None


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A quantised matrix in a file: its ``kind``, [O, I] ``shape``, the tensors it takes and how to read it.

    ``decode`` raises ``CheckpointError`` for values that contradict each other.
    """

    kind: Kind
    shape: tuple[int, int]
    tensors: tuple[str, ...]
    decode: Callable[[], Part]


class Store(Protocol):
    """A safetensors store under the names of ``*ForCausalLM``."""

    def names(self) -> Any: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype: ...

    def array(self, name: str) -> np.ndarray: ...

    def rows(self, name: str, start: int, stop: int) -> Any: ...

    def check_dtypes(self, names: Any) -> None: ...


class QuantizedStore:
    """A store in which every quantised matrix appears once, as ``module.weight`` of its logical shape.

    What a matrix takes besides (scales, packed values) is hidden, so that a name table joins with a quantised
    file exactly as with a plain one: whatever is left over is refused there.
    """

    def __init__(self, store: Store, encoded: Mapping[str, Encoded], hidden: Sequence[str] = ()) -> None:
        self._store, self.encoded = store, {f"{module}.weight": e for module, e in encoded.items()}
        taken = {name for e in encoded.values() for name in e.tensors} | set(hidden)
        self._names = dict.fromkeys([*(n for n in store.names() if n not in taken), *self.encoded])

    def names(self) -> Any:
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.encoded[name].shape if name in self.encoded else self._store.shape(name)

    def check_dtypes(self, names: Any) -> None:
        """Refuse tensors outside the quantised matrices that hold no plain floating-point weights."""
        self._store.check_dtypes(name for name in names if name not in self.encoded)

    def rows(self, name: str, start: int, stop: int) -> Any:
        if name in self.encoded:
            part = self.encoded[name].decode()
            return dequantized(part)[start:stop]
        return self._store.rows(name, start, stop)


def dequantized(part: Part) -> np.ndarray:
    """f32 [O, I] of a part."""
    out, groups = part.scale.shape
    grouped = part.values.astype(np.float32).reshape(out, groups, -1) * part.scale[..., None]
    return grouped.reshape(part.values.shape)


def kind_of(array: QuantArray) -> Kind:
    """How a parameter is quantised."""
    group = array.rows // array.groups if array.scale.ndim == array.values.ndim else None
    return Kind(array.bits, array.activation, group, array.input_offset is not None)


def to_part(array: QuantArray, index: int | None = None) -> Part:
    """The part of a matrix, or of the ``index``-th of a stack of experts. The array has no ``smooth``."""
    pick = slice(None) if index is None else index
    values, scale = np.asarray(array.values[pick]), np.asarray(array.scale[pick])
    values = unpack_rows(values) if array.bits == 4 else values

    def scalar(value: Any) -> np.float32 | None:
        return None if value is None else np.float32(value)

    return Part(
        kind=kind_of(array),
        values=np.ascontiguousarray(values.T),
        scale=np.ascontiguousarray(scale.reshape(array.groups, -1).T),
        input_scale=scalar(array.input_scale),
        input_offset=scalar(array.input_offset),
    )


def from_parts(
    parts: Iterable[Part], *, stacked: bool, transposed: bool, dtype: Any, where: str
) -> QuantArray:
    """The parameter of one part, or of a stack of them (experts), which must be quantised alike.

    ``transposed``, ``dtype``: of the QuantArray. Raises ``CheckpointError`` naming ``where``.
    """
    columns: dict[str, list[np.ndarray]] = {"values": [], "scale": []}
    how = set()
    for part in parts:
        kind = part.kind
        how.add((kind, part.input_scale, part.input_offset))
        columns["values"].append(
            pack_rows(part.values.T) if kind.bits == 4 else np.ascontiguousarray(part.values.T)
        )
        columns["scale"].append(np.ascontiguousarray(part.scale.T if kind.group else part.scale[:, 0]))
    if len(how) > 1:
        raise CheckpointError(
            f"{where}: its experts differ in scheme, groups or input scale "
            f"({'; '.join(sorted(map(str, how)))}); they are read when quantised alike"
        )
    kind, input_scale, input_offset = how.pop()
    arrays = {name: jnp.asarray(np.stack(c) if stacked else c[0]) for name, c in columns.items()}
    found = QuantArray(
        **arrays,
        input_scale=None if input_scale is None else jnp.float32(input_scale),
        input_offset=None if input_offset is None else jnp.float32(input_offset),
        bits=kind.bits,
        activation=kind.activation,  # type: ignore[arg-type]
        transposed=transposed,
        dtype=np.dtype(dtype),
    )
    return with_offset_sums(found)


def with_offset_sums(array: QuantArray) -> QuantArray:
    """The array with ``offset_sums`` where it has an input offset: what follows from the weights is not
    stored."""
    return array if array.input_offset is None else dataclasses.replace(array, offset_sums=column_sums(array))


def pack_rows(values: np.ndarray) -> np.ndarray:
    """[I, O] values of [-8, 7] as [I / 2, O] bytes, even rows in the low nibble.

    The layout of ``kernels_pallas.quant_matmul.pack_int4``, on the host."""
    return ((values[0::2] & 15) | (values[1::2] << 4)).astype(np.int8)


def unpack_rows(packed: np.ndarray) -> np.ndarray:
    """Inverse of ``pack_rows``."""
    out = np.empty((2 * packed.shape[0], *packed.shape[1:]), np.int8)
    out[0::2], out[1::2] = (packed << 4).astype(np.int8) >> 4, packed >> 4
    return out


def require(condition: Any, text: str) -> None:
    """Refuse a file: raises ``CheckpointError`` with ``text`` unless ``condition``."""
    if not condition:
        raise CheckpointError(text)


def checked_scale(scale: np.ndarray, name: str) -> np.ndarray:
    """A scale tensor in f32; refused when a scale is negative or not a number."""
    wide = scale.astype(np.float32)
    require(
        np.all(np.isfinite(wide)) and np.all(wide >= 0),
        f"tensor {name!r} holds scales that are negative or no numbers; the file is damaged",
    )
    return wide


def pending(value: np.ndarray) -> Pending:
    """A small array, ready to be written."""
    return Pending(value.shape, value.dtype, lambda: value)
