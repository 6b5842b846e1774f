"""Arrays in one file of raw bytes, with an index that travels beside it as JSON.

Written as the arrays come, so that a recording is never held whole; read through a map of the file. Reading
needs NumPy alone; bfloat16, which NumPy lacks, is widened to float32 (exactly), or handed to torch as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eaglejax.errors import CheckpointError

ALIGNMENT = 64
"""Bytes that every array starts at a multiple of."""

_BYTES = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_NATIVE = ("float32", "float16", "bool", "int8", "uint8", "int16", "int32", "int64")


class BlobWriter:
    """Appends arrays; ``index`` describes them: dtype, shape, offset by name. Use :func:`write_blob`."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.nbytes = 0
        self.index: dict[str, dict[str, Any]] = {}

    def add(self, name: str, data: Any, dtype: str, shape: tuple[int, ...]) -> None:
        """Append the bytes ``data`` (C order, little endian) of an array of ``dtype`` and ``shape``."""
        if name in self.index:
            raise ValueError(f"{name} is written twice")
        self._append(b"\0" * (-self.nbytes % ALIGNMENT))
        self.index[name] = {"dtype": dtype, "shape": list(shape), "offset": self.nbytes}
        self._append(data)

    def add_array(self, name: str, array: np.ndarray) -> None:
        """Append a NumPy array (those of ``ml_dtypes`` too)."""
        flat = np.ascontiguousarray(array).reshape(-1)
        self.add(name, flat.view(np.uint8).data, array.dtype.name, array.shape)

    def _append(self, data: Any) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.nbytes += len(data)

    def describe(self) -> dict[str, Any]:
        """What a reader needs to know: bytes, SHA-256 and the index."""
        return {"bytes": self.nbytes, "sha256": self._digest.hexdigest(), "index": self.index}


@contextlib.contextmanager
def write_blob(path: Path) -> Iterator[BlobWriter]:
    """Write a file beside ``path`` and rename it once the body is through."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            yield BlobWriter(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class Blob:
    """The arrays of a file, by the description that its writer gave.

    Raises CheckpointError, with the file's name, where it is missing, of another size or hash, or where the
    index does not fit it.
    """

    def __init__(self, path: Path, description: Mapping[str, Any]) -> None:
        check_file(path, description)
        self._path, self._index = path, description["index"]
        size = int(description["bytes"])
        self._data = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
        for name, entry in self._index.items():
            if entry["offset"] + self._nbytes(entry) > size:
                raise CheckpointError(f"{path} is damaged: its index says that {name} goes past its end")

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def names(self) -> list[str]:
        """Names of all arrays, in the order in which they were written."""
        return list(self._index)

    def dtype(self, name: str) -> str:
        """Dtype of an array, as it was."""
        return str(self._entry(name)["dtype"])

    def array(self, name: str) -> np.ndarray:
        """A view of an array; bfloat16 as a widened copy. Raises CheckpointError for another dtype that NumPy
        lacks."""
        entry = self._entry(name)
        raw, shape = self._raw(entry), entry["shape"]
        if entry["dtype"] == "bfloat16":
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
        if entry["dtype"] not in _NATIVE:
            raise CheckpointError(f"{self._path}: {name} is {entry['dtype']}, which NumPy does not hold")
        return raw.view(np.dtype(entry["dtype"])).reshape(shape)

    def tensor(self, name: str) -> Any:
        """An array as a torch tensor of its own dtype (a copy)."""
        from eaglejax.interop.backends.arrays import torch_dtype
        from eaglejax.interop.backends.torch_import import torch

        entry = self._entry(name)
        tensor = torch.empty(entry["shape"], dtype=torch_dtype(entry["dtype"]))
        if tensor.numel():
            tensor.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(np.array(self._raw(entry))))
        return tensor

    def _entry(self, name: str) -> Mapping[str, Any]:
        if name not in self._index:
            raise CheckpointError(f"{self._path} holds no {name}")
        entry: Mapping[str, Any] = self._index[name]
        return entry

    def _raw(self, entry: Mapping[str, Any]) -> np.ndarray:
        return self._data[entry["offset"] : entry["offset"] + self._nbytes(entry)]

    def _nbytes(self, entry: Mapping[str, Any]) -> int:
        dtype = entry["dtype"]
        if dtype not in _BYTES and dtype not in _NATIVE:
            raise CheckpointError(f"{self._path} is damaged: dtype {dtype!r} is not known")
        return math.prod(entry["shape"]) * (_BYTES.get(dtype) or np.dtype(dtype).itemsize)


def check_file(path: Path, description: Mapping[str, Any]) -> None:
    """Raise CheckpointError, by name, unless the file at ``path`` has the bytes and the SHA-256 described."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    size = path.stat().st_size
    if size < description["bytes"]:
        raise CheckpointError(f"{path} is truncated: it has {size} of {description['bytes']} bytes")
    if size > description["bytes"]:
        raise CheckpointError(f"{path} has {size} bytes, {description['bytes']} were written")
    if sha256(path) != description["sha256"]:
        raise CheckpointError(f"{path} was changed after it was written: its SHA-256 is another")


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
