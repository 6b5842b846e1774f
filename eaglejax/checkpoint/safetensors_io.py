"""Safetensors files: mapped reading with every bound checked, and a streaming writer.

Format: https://github.com/huggingface/safetensors (8-byte header length, JSON header, contiguous row-major
data).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eaglejax import json_text
from eaglejax.checkpoint.files import refuse_pointer
from eaglejax.errors import CheckpointError

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # the limit of the reference implementation

ALIGNMENT = 64
"""Bytes. XLA on CPU adopts a host buffer without a copy when it starts at a multiple of this."""


@dataclasses.dataclass(frozen=True)
class _Entry:
    file: int
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int


class SafetensorsFile:
    """One or several safetensors files as one mapping from names to read-only numpy views of the mapped data.

    Raises ``CheckpointError`` for a file that is missing, truncated, damaged or empty, and for a name that
    two files hold. ``metadata`` joins the files' ``__metadata__``.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = list(paths)
        self.metadata: dict[str, str] = {}
        self._maps: list[np.memmap] = []
        self._entries: dict[str, _Entry] = {}
        for number, path in enumerate(self.paths):
            self._add(number, path)

    def _add(self, number: int, path: Path) -> None:
        size = path.stat().st_size if path.is_file() else -1
        if size < 0:
            raise CheckpointError(f"{path} is missing")
        if size < 8:
            raise CheckpointError(f"{path} is truncated: it has {size} bytes, not even the header length")
        refuse_pointer(path)
        # A private mapping: a write that slipped through would change this process's copy, never the file.
        data = np.memmap(path, np.uint8, "c")
        length = int(data[:8].view("<u8")[0])
        if length > _MAX_HEADER:
            raise CheckpointError(
                f"{path} is not a safetensors file: its header would be {length} bytes long"
            )
        if 8 + length > size:
            raise CheckpointError(
                f"{path} is truncated: its header alone needs {8 + length} bytes, it has {size}"
            )
        try:
            header = json_text.parse(data[8 : 8 + length].tobytes(), strict=True)
        except json_text.JsonError as error:
            raise CheckpointError(f"{path} is not a safetensors file: its header is {error}") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{path} is not a safetensors file: its header is no JSON object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise CheckpointError(f"{path} is damaged: its __metadata__ is no JSON object of strings")
        self.metadata.update(metadata)
        for name, info in header.items():
            entry = _entry(path, number, name, info, 8 + length, size)
            if name in self._entries:
                raise CheckpointError(
                    f"tensor {name!r} is in both {self.paths[self._entries[name].file]} and {path}"
                )
            self._entries[name] = entry
        _check_contiguous(path, header, size - 8 - length)
        self._maps.append(data)

    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._entries.keys()

    def where(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.paths[self._entries[name].file]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, as stored."""
        return self._entries[name].shape

    def dtype(self, name: str) -> np.dtype:
        """Dtype of a tensor, as stored."""
        return self._entries[name].dtype

    def array(self, name: str) -> np.ndarray:
        """A view of the mapped tensor; nothing is copied."""
        entry = self._entries[name]
        stop = entry.start + math.prod(entry.shape) * entry.dtype.itemsize
        return self._maps[entry.file][entry.start : stop].view(entry.dtype, np.ndarray).reshape(entry.shape)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the tensor seen as [product of leading dimensions, last dimension]."""
        array = self.array(name)
        return array.reshape(-1, array.shape[-1] if array.ndim else 1)[start:stop]


def _entry(path: Path, number: int, name: str, info: Any, base: int, size: int) -> _Entry:
    try:
        dtype_name, shape, (start, stop) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged: the header entry of {name!r:.200} is {info!r:.200}"
        ) from error
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise CheckpointError(f"{path}: tensor {name!r:.200} has dtype {dtype_name!r:.80}, which is not read")
    # numpy counts every dimension in 64 bits, also those of an empty array.
    if not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, start, stop)) or (
        stop - start != math.prod(shape) * dtype.itemsize
    ):
        raise CheckpointError(
            f"{path} is damaged: tensor {name!r:.200} of shape {shape!s:.80} and dtype {dtype_name} is said "
            f"to span [{start}, {stop})"
        )
    if base + stop > size:
        raise CheckpointError(
            f"{path} is truncated: tensor {name!r:.200} ends at byte {base + stop}, the file has {size}; "
            "download or copy it again"
        )
    return _Entry(number, dtype, shape, base + start)


def _check_contiguous(path: Path, header: Mapping[str, Any], size: int) -> None:
    """Refuse tensors that do not follow one another to the end of the file: offsets that were moved would
    give other values for the weights."""
    at = 0
    for start, stop, name in sorted((*info["data_offsets"], name) for name, info in header.items()):
        if start != at:
            what = (
                "overlaps the tensor before it"
                if start < at
                else "leaves bytes before it that belong to none"
            )
            raise CheckpointError(
                f"{path} is damaged: tensor {name!r:.200} begins at byte {start} of the data, which {what} "
                f"(byte {at} is next)"
            )
        at = stop
    if at != size:
        raise CheckpointError(
            f"{path} is damaged: its tensors end at byte {at} of the data, which has {size} bytes"
        )


@dataclasses.dataclass(frozen=True)
class Pending:
    """An array that the writer will ask for when its turn comes, so that only one exists at a time."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]


def write_safetensors(
    path: Path, arrays: Mapping[str, Pending], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays one after another to a temporary file beside ``path``, then rename it.

    The largest itemsize comes first and the header is padded, so that data starts at a multiple of
    ``ALIGNMENT``.
    """
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        pending = arrays[name]
        nbytes = math.prod(pending.shape) * pending.dtype.itemsize
        header[name] = {
            "dtype": _NAMES[pending.dtype],
            "shape": list(pending.shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for name in order:
                array = np.asarray(arrays[name].make(), order="C")
                if array.shape != arrays[name].shape or array.dtype != arrays[name].dtype:
                    raise ValueError(f"{name}: announced {arrays[name]}, made {array.shape} {array.dtype}")
                # As bytes: numpy's own writer does not know the dtypes of ml_dtypes.
                file.write(array.reshape(-1).view(np.uint8).data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
