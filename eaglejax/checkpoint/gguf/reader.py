"""Reading a GGUF file: metadata, tensor directory, and dequantised rows.

The file is mapped, never read whole, and every offset is checked against its size and its neighbours before
it is used, so that a truncated or damaged file is refused by name. A model in several files (``gguf-split``)
is read as one, whichever of them is named. Block formats are decoded by the ``gguf`` package. Its own
reader is not used: it keeps one numpy object for each metadata string, which takes ten seconds on a
vocabulary of 150 000 tokens.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import re
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np

from eaglejax.checkpoint.files import refuse_pointer
from eaglejax.errors import CheckpointError

_ValueType = gguf.GGUFValueType
_SCALARS: dict[int, str] = {
    _ValueType.UINT8: "B",
    _ValueType.INT8: "b",
    _ValueType.UINT16: "H",
    _ValueType.INT16: "h",
    _ValueType.UINT32: "I",
    _ValueType.INT32: "i",
    _ValueType.FLOAT32: "f",
    _ValueType.BOOL: "?",
    _ValueType.UINT64: "Q",
    _ValueType.INT64: "q",
    _ValueType.FLOAT64: "d",
}
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """Directory entry: ``shape`` is row-major (outermost first), ``start`` and ``nbytes`` are bytes in the
    file, ``part`` says in which one."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    start: int
    nbytes: int
    part: int = 0


class _Cursor:
    """A reading position that never leaves the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def take(self, count: int) -> int:
        """Step over ``count`` bytes and return where they start."""
        start = self.at
        if start + count > len(self.data):
            raise CheckpointError(
                f"{self.path} is truncated: its header needs {start + count} bytes, the file has "
                f"{len(self.data)}; "
                "download it again"
            )
        self.at += count
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        length = int.from_bytes(self.data[self.take(8) : self.at], "little")
        start = self.take(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.path} is damaged: the string at byte {start} is not UTF-8"
            ) from error

    def value(self, kind: int, *, nested: bool = False) -> Any:
        if kind == _ValueType.STRING:
            return self.string()
        if kind == _ValueType.ARRAY and not nested:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in _SCALARS:
                dtype = np.dtype("<" + _SCALARS[item])
                return np.frombuffer(self.data, dtype, count, self.take(count * dtype.itemsize)).tolist()
            if item == _ValueType.STRING:
                return [self.string() for _ in range(count)]
            return [self.value(item, nested=True) for _ in range(count)]
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        raise CheckpointError(f"{self.path} is damaged: unknown metadata type {kind} before byte {self.at}")


class _Part:
    """One file: its metadata, its tensors and its bytes."""

    def __init__(self, path: Path, number: int = 0) -> None:
        self.path, self.number = path, number
        refuse_pointer(path)
        try:
            size = path.stat().st_size
            if size < 24:
                raise CheckpointError(f"{path} is not a GGUF file: it has {size} bytes")
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        cursor = _Cursor(path, self.data)
        if self.data[:4] != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file: it starts with {self.data[:4]!r}, not b'GGUF'")
        cursor.take(4)
        version = cursor.scalar("I")
        if version not in (2, 3):
            hint = "; it may be a big-endian file" if version & 0xFFFF == 0 else ""
            raise CheckpointError(f"{path} is GGUF version {version}; versions 2 and 3 are read{hint}")
        tensor_count, pair_count = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = cursor.string()
            if key in self.metadata:
                raise CheckpointError(f"{path} is damaged: metadata key {key!r:.200} occurs twice")
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        self.tensors = self._directory(cursor, tensor_count)

    def _directory(self, cursor: _Cursor, count: int) -> dict[str, GGUFTensor]:
        entries = []
        for _ in range(count):
            name, dimensions = cursor.string(), cursor.scalar("I")
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                self._fail(f"tensor {name!r:.200} has {dimensions} dimensions")
            shape = tuple(cursor.scalar("Q") for _ in range(dimensions))[::-1]
            entries.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self._fail(f"general.alignment = {alignment!r:.80} is no power of two")
        base = -(-cursor.at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        expected = 0
        for name, shape, raw_kind, offset in entries:
            kind = _decodable(self.path, name, raw_kind)
            block, size = gguf.GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                self._fail(
                    f"rows of {name!r:.200} ({shape[-1]}) are no multiple of the {kind.name} block ({block})"
                )
            nbytes = math.prod(shape) // block * size
            if name in tensors:
                self._fail(f"tensor {name!r:.200} occurs twice")
            # ggml writes and reads them in this order alone; any other place holds other values.
            if offset != expected:
                self._fail(
                    f"tensor {name!r:.200} is said to begin at byte {offset} of the data, not {expected}"
                )
            expected = -(-(offset + nbytes) // alignment) * alignment
            if base + offset + nbytes > len(self.data):
                raise CheckpointError(
                    f"{self.path} is truncated: tensor {name!r:.200} ends at byte {base + offset + nbytes}, "
                    f"the file has {len(self.data)}; download it again"
                )
            tensors[name] = GGUFTensor(shape, kind, base + offset, nbytes, self.number)
        return tensors

    def _fail(self, text: str) -> NoReturn:
        raise CheckpointError(f"{self.path} is damaged: {text}")


_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


def part_paths(path: Path) -> list[Path]:
    """All files of the model that ``path`` belongs to, as their names have it; they need not exist."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]) <= _MOST_PARTS:
        return [path]
    ends = [f"-{i + 1:05d}-of-{match['count']}{path.suffix}" for i in range(int(match["count"]))]
    return [path.with_name(match["stem"] + end) for end in ends]


_MOST_PARTS = 1024


class GGUFFile:
    """An open GGUF model: one file, or all its parts.

    ``metadata``: key -> value (numbers, strings, lists), of the first part. ``tensors``: name ->
    ``GGUFTensor``. Raises ``CheckpointError`` when a file is no GGUF, is truncated or damaged, or holds a
    tensor type that the ``gguf`` package cannot decode, and when parts are missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        named = _Part(path)
        count = named.metadata.get("split.count", 0)
        parts = [named]
        if isinstance(count, int) and count > 1:
            paths = part_paths(path)
            self._check_parts(paths, count)
            parts = [_Part(part, number) for number, part in enumerate(paths)]
        self.metadata = parts[0].metadata
        self.tensors: dict[str, GGUFTensor] = {}
        for number, part in enumerate(parts):
            if len(parts) > 1 and part.metadata.get("split.no") != number:
                raise CheckpointError(
                    f"{part.path} says that it is part {part.metadata.get('split.no')!r:.80} of the model, "
                    f"its name that it is part {number}, counted from 0"
                )
            twice = sorted(self.tensors.keys() & part.tensors.keys())
            if twice:
                raise CheckpointError(f"{part.path}: tensor {twice[0]!r:.200} is in another part as well")
            self.tensors |= part.tensors
        told = self.metadata.get("split.tensors.count")
        if len(parts) > 1 and told not in (None, len(self.tensors)):
            raise CheckpointError(
                f"{path}: its parts hold {len(self.tensors)} tensors, the first one says {told!r:.80}"
            )
        self._data = [part.data for part in parts]

    def _check_parts(self, paths: list[Path], count: Any) -> None:
        if len(paths) != count:
            raise CheckpointError(
                f"{self.path} is one of {count!r:.80} parts of a model, which its name does not say; call "
                "them <name>-00001-of-<count>.gguf and so on, as they were"
            )
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise CheckpointError(
                f"{self.path} is one of {count} parts of a model; {', '.join(missing[:4])} must lie beside it"
            )

    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major shape of a tensor."""
        return self.tensors[name].shape

    def raw(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the tensor seen as [product of leading dimensions, last dimension], as the
        bytes of their blocks: uint8 [rows, bytes a row]."""
        tensor = self.tensors[name]
        block, size = gguf.GGML_QUANT_SIZES[tensor.kind]
        width = tensor.shape[-1] // block * size
        raw = np.frombuffer(
            self._data[tensor.part], np.uint8, (stop - start) * width, tensor.start + start * width
        )
        return raw.reshape(stop - start, width)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the tensor seen as [product of leading dimensions, last dimension], f32."""
        return gguf.dequantize(self.raw(name, start, stop), self.tensors[name].kind)


def _decodable(path: Path, name: str, raw_kind: int) -> gguf.GGMLQuantizationType:
    """The tensor's type, once one block of it was seen to decode."""
    try:
        kind = gguf.GGMLQuantizationType(raw_kind)
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (ValueError, NotImplementedError) as error:
        raise CheckpointError(
            f"{path}: tensor {name!r:.200} has GGML type {raw_kind}, which gguf {_gguf_version()} cannot "
            "decode"
        ) from error
    return kind


def _gguf_version() -> str:
    from importlib.metadata import version

    return version("gguf")
