"""PyTorch ``.bin`` files (zip archives with a pickle inside) without PyTorch and without running what they
hold.

A pickle is a program. This reader knows the handful of operations and names that a dict of tensors needs and
refuses every other one, so that a hostile file can do nothing. What it builds is bounded, too: keys are
strings, tuples nest a few levels, and no foreign value is hashed, compared or printed, which a tuple that
holds itself a million times over would not survive. Tensors are views of the mapped archive; nothing is
copied or unpacked.
"""

from __future__ import annotations

import dataclasses
import math
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from eaglejax.checkpoint.files import refuse_pointer
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
_ODD_ARCHIVE = (NotImplementedError, RuntimeError, EOFError, ValueError, OSError)
"""What else ``zipfile`` raises for archives that no saver writes (encrypted, unknown compression, cut)."""
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


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> _Tensor:
    del rest  # requires_grad, hooks, metadata
    shape, strides = _of(tuple, shape), _of(tuple, strides)
    if not isinstance(storage, _Storage) or len(shape) != len(strides) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError("a tensor without a storage, or with strides for another shape")
    return _Tensor(storage, _whole(offset), tuple(map(_whole, shape)), tuple(map(_whole, strides)))


def _rebuild_parameter(tensor: Any, *rest: Any) -> _Tensor:
    del rest
    return _of(_Tensor, tensor)


def _empty_dict(*items: Any) -> dict[str, Any]:
    if items:
        raise ValueError("an OrderedDict made of something")
    return {}


def _size(shape: Any) -> tuple[Any, ...]:
    return _of(tuple, shape)


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a {kind.__name__} was expected, not {type(value).__name__}")
    return value


def _whole(value: Any) -> int:
    """A count or a number of bytes, such that a file can have it."""
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise ValueError("a size, offset or stride that is no whole number a file could have")
    return value


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _empty_dict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch", "Size"): _size,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}
_CALLABLE = (_empty_dict, _size, _rebuild_tensor, _rebuild_parameter)

_LARGEST_PICKLE = 1 << 25
"""Bytes; a dict of a hundred thousand tensors takes two fifths of it."""

_MOST_OPERATIONS = 1 << 23
"""A tensor takes about thirty."""

_MOST_DIMENSIONS = 16
_MOST_LEVELS = 8
"""Of tuples in tuples; arguments of a tensor have three."""

_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": lambda: _Tuple(()),
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
}
_LITERALS = {"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK: Any = object()


class _Tuple(tuple[Any, ...]):
    """A tuple that knows how deep it is."""

    levels: int

    def __new__(cls, items: Iterable[Any]) -> _Tuple:
        found = super().__new__(cls, items)
        found.levels = 1 + max((item.levels for item in found if isinstance(item, _Tuple)), default=0)
        if found.levels > _MOST_LEVELS:
            raise ValueError("tuples nested too deeply")
        return found


class _Pickle:
    """A machine for the few opcodes that a saved dict of tensors consists of.

    Python's own unpickler would do more than that whatever its ``find_class`` refuses: set attributes, make
    instances, fill all memory at the wish of one index.
    """

    def __init__(self, data: bytes) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._result: Any = None
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if number >= _MOST_OPERATIONS:
                raise ValueError(f"more than {_MOST_OPERATIONS} operations")
            self._step(opcode.name, argument)

    @classmethod
    def load(cls, data: bytes) -> Any:
        """The object that ``data`` describes; raises CheckpointError for anything but tensors in it."""
        try:
            return cls(data)._result
        except CheckpointError:
            raise
        except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"its pickle is damaged ({error!s:.200})") from error

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _LITERALS:
            if isinstance(argument, str):
                argument.encode("utf-8")  # pickletools lets half surrogate pairs pass
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in ("PROTO", "FRAME"):
            pass
        elif name == "MARK":
            self._marks.append(len(stack))
            stack.append(_MARK)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "TUPLE":
            stack.append(_Tuple(self._marked()))
        elif name in _TUPLES:
            stack.append(_Tuple(self._take(_TUPLES[name])))
        elif name in ("APPEND", "APPENDS"):
            items = self._take(1) if name == "APPEND" else self._marked()
            _of(list, stack[-1]).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._take(2) if name == "SETITEM" else self._marked()
            keys = [_of(str, key) for key in items[::2]]
            _of(dict, stack[-1]).update(zip(keys, items[1::2], strict=True))
        elif name == "GLOBAL":
            stack.append(_known(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            stack.append(_known(*(_of(str, part) for part in self._take(2))))
        elif name == "REDUCE":
            function, arguments = self._take(2)
            if not any(function is known for known in _CALLABLE):
                raise CheckpointError("its pickle calls something that is no part of a tensor")
            stack.append(function(*_of(tuple, arguments)))
        elif name == "BUILD":
            # The attributes of a state dict (version numbers of modules) mean nothing here.
            self._take(1)
        elif name == "BINPERSID":
            stack.append(_storage(*self._take(1)))
        elif name == "STOP":
            (self._result,) = stack
        else:
            raise CheckpointError(
                f"its pickle has the operation {name}, which a file of tensors does not need"
            )

    def _take(self, count: int) -> list[Any]:
        items = self._stack[len(self._stack) - count :]
        if len(items) < count or any(item is _MARK for item in items):
            raise ValueError("an operation lacks its operands")
        del self._stack[len(self._stack) - count :]
        return items

    def _marked(self) -> list[Any]:
        """What lies above the last mark; the mark goes too."""
        at = self._marks.pop()
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items


def _known(module: str, name: str) -> Any:
    try:
        return _ALLOWED[module, name]
    except KeyError:
        raise CheckpointError(
            f"its pickle asks for {module:.80}.{name:.80}, which no file of plain tensors needs; it is "
            "not run. Convert the file to safetensors where you trust it"
        ) from None


_DEVICE = re.compile(r"[a-z]+[0-9]*(:[0-9]+)?")
"""Where a storage was when it was written; it is read into main memory wherever that was."""


def _storage(pid: Any) -> _Storage:
    kind, dtype, key, device, size = _of(tuple, pid)
    if not isinstance(kind, str) or kind != "storage" or not isinstance(dtype, np.dtype):
        raise CheckpointError("its pickle refers to something that is no tensor storage")
    if not _DEVICE.fullmatch(_of(str, device)):
        raise CheckpointError("its pickle refers to a storage of no device")
    return _Storage(_of(str, key), dtype, _whole(size))


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
            refuse_pointer(path)
            try:
                arrays = _read(path)
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {error}") from error
            except (zipfile.BadZipFile, zlib.error, struct.error, *_ODD_ARCHIVE) as error:
                raise CheckpointError(f"{path}: its archive is damaged ({error})") from error
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
        if len(entries) != len(archive.infolist()):
            raise CheckpointError("it holds two files of one name")
        packed = [name for name, info in entries.items() if info.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise CheckpointError(
                f"{packed[0]!r:.200} in it is compressed, which PyTorch never does; save the tensors again"
            )
        pickles = [name for name in entries if name.rsplit("/", 1)[-1] == "data.pkl"]
        if len(pickles) != 1:
            raise CheckpointError(f"it holds {len(pickles)} files named data.pkl instead of one")
        root = pickles[0].removesuffix("data.pkl")
        order = entries.get(root + "byteorder")
        if order is not None and archive.read(order) != b"little":
            raise CheckpointError("it was written on a big-endian machine, which is not read")
        if entries[pickles[0]].file_size > _LARGEST_PICKLE:
            raise CheckpointError(
                f"its pickle is larger than {_LARGEST_PICKLE} bytes, which no dict of tensors is"
            )
        tensors = _Pickle.load(archive.read(pickles[0]))
        if not isinstance(tensors, Mapping) or not all(isinstance(t, _Tensor) for t in tensors.values()):
            raise CheckpointError("it holds something else than a dict of tensors")
        return {name: _view(path, entries, root, tensor) for name, tensor in tensors.items()}


def _view(
    path: Path,
    entries: Mapping[str, zipfile.ZipInfo],
    root: str,
    tensor: _Tensor,
) -> np.ndarray:
    storage = tensor.storage
    info = entries.get(f"{root}data/{storage.key}")
    nbytes = storage.size * storage.dtype.itemsize
    last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    count = math.prod(tensor.shape)
    # A tensor that shows one value many times over could be of any size.
    inside = tensor.offset <= storage.size and (count == 0 or (last < storage.size and count <= storage.size))
    if info is None or info.file_size != nbytes or not inside:
        raise CheckpointError(
            f"storage {storage.key!r:.80} is missing or does not hold the tensor that refers to it"
        )
    if count == 0:
        return np.empty(tensor.shape, storage.dtype)
    with path.open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(_LOCAL_HEADER)
    start = info.header_offset + _LOCAL_HEADER
    start += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    if header[:4] != b"PK\x03\x04" or start + nbytes > path.stat().st_size:
        raise CheckpointError(f"it is damaged or truncated before the end of storage {storage.key!r:.80}")
    flat = np.memmap(path, np.uint8, "c", start, (nbytes,)).view(storage.dtype, np.ndarray)
    strides = [s * storage.dtype.itemsize for s in tensor.strides]
    return np.lib.stride_tricks.as_strided(flat[tensor.offset :], tensor.shape, strides, writeable=False)
