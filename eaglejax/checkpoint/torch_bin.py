"""PyTorch ``.bin`` files (zip archives with a pickle inside) without PyTorch and without running what they
hold.

A pickle is a program. This reader's unpickler knows the handful of names that a dict of tensors needs and
refuses every other one, so that a hostile file can do nothing. Tensors are views of the mapped archive;
nothing is copied.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import pickle
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eaglejax.errors import CheckpointError

_STORAGES: dict[str, np.dtype] = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
_LOCAL_HEADER = 30  # bytes of a zip entry's own header before its name


@dataclasses.dataclass(frozen=True)
class _Storage:
    key: str
    dtype: np.dtype
    size: int


@dataclasses.dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_tensor(storage: Any, offset: int, shape: Any, strides: Any, *rest: Any) -> _Tensor:
    del rest  # requires_grad, hooks, metadata
    return _Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


def _rebuild_parameter(tensor: _Tensor, *rest: Any) -> _Tensor:
    del rest
    return tensor


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch", "Size"): tuple,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise CheckpointError(
                f"its pickle asks for {module}.{name}, which a file of plain tensors has no use for; it is "
                f"not run. "
                "Convert the file to safetensors where you trust it"
            ) from None

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, size = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise CheckpointError(f"its pickle refers to {pid!r}, which is no tensor storage")
        return _Storage(str(key), dtype, int(size))


class TorchBinFile:
    """One or several ``.bin`` files as one mapping from names to read-only numpy views.

    Raises ``CheckpointError`` for a missing, damaged or truncated file, one that is no dict of tensors, one
    in the format from before PyTorch 1.6, and a name that two files hold.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        for path in paths:
            if not path.is_file():
                raise CheckpointError(f"{path} is missing")
            try:
                arrays = _read(path)
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {error}") from error
            twice = sorted(self._arrays.keys() & arrays.keys())
            if twice:
                raise CheckpointError(
                    f"tensor {twice[0]!r} is in {path} and in another file of the same checkpoint"
                )
            self._arrays |= arrays

    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._arrays.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, as stored."""
        return self._arrays[name].shape

    def dtype(self, name: str) -> np.dtype:
        """Dtype of a tensor, as stored."""
        return self._arrays[name].dtype

    def array(self, name: str) -> np.ndarray:
        """A view of the mapped tensor."""
        return self._arrays[name]

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the tensor seen as [product of leading dimensions, last dimension]."""
        array = self._arrays[name]
        return array.reshape(-1, array.shape[-1] if array.ndim else 1)[start:stop]


def _read(path: Path) -> dict[str, np.ndarray]:
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            "it is no zip archive: truncated, or saved before PyTorch 1.6; save it again or convert it to "
            "safetensors"
        )
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in entries if name.rsplit("/", 1)[-1] == "data.pkl"]
        if len(pickles) != 1:
            raise CheckpointError(f"it holds {len(pickles)} files named data.pkl instead of one")
        root = pickles[0].removesuffix("data.pkl")
        order = entries.get(root + "byteorder")
        if order is not None and archive.read(order) != b"little":
            raise CheckpointError("it was written on a big-endian machine, which is not read")
        with archive.open(pickles[0]) as file:
            try:
                tensors = _Unpickler(file).load()
            except (
                pickle.UnpicklingError,
                EOFError,
                TypeError,
                ValueError,
                AttributeError,
                IndexError,
            ) as error:
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f"its pickle is damaged ({error})") from error
        if not isinstance(tensors, Mapping) or not all(isinstance(t, _Tensor) for t in tensors.values()):
            raise CheckpointError("it holds something else than a dict of tensors")
        return {str(name): _view(path, archive, entries, root, tensor) for name, tensor in tensors.items()}


def _view(
    path: Path,
    archive: zipfile.ZipFile,
    entries: Mapping[str, zipfile.ZipInfo],
    root: str,
    tensor: _Tensor,
) -> np.ndarray:
    storage = tensor.storage
    info = entries.get(f"{root}data/{storage.key}")
    nbytes = storage.size * storage.dtype.itemsize
    last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    inside = min((tensor.offset, *tensor.strides, *tensor.shape), default=0) >= 0 and (
        math.prod(tensor.shape) == 0 or last < storage.size
    )
    if info is None or info.file_size != nbytes or not inside:
        raise CheckpointError(
            f"storage {storage.key!r} is missing or does not hold the tensor that refers to it"
        )
    if info.compress_type == zipfile.ZIP_STORED:
        with path.open("rb") as file:
            file.seek(info.header_offset)
            header = file.read(_LOCAL_HEADER)
        start = info.header_offset + _LOCAL_HEADER
        start += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        if start + nbytes > path.stat().st_size:
            raise CheckpointError(f"it is truncated inside storage {storage.key!r}")
        flat = np.memmap(path, np.uint8, "c", start, (nbytes,)).view(storage.dtype, np.ndarray)
    else:
        flat = np.frombuffer(archive.read(info), storage.dtype)
    strides = [s * storage.dtype.itemsize for s in tensor.strides]
    return np.lib.stride_tricks.as_strided(flat[tensor.offset :], tensor.shape, strides, writeable=False)
