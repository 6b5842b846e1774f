"""What a run writes while it goes: JSON Lines, TensorBoard event files, and Weights & Biases when asked."""

from __future__ import annotations

import hashlib
import json
import math
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from eaglejax.errors import ConfigError
from eaglejax.train.writing import end_line

SCALARS = "metrics.jsonl"


class Log(Protocol):
    """A place that values go to."""

    def write(self, update: int, values: Mapping[str, Any]) -> None:
        """``values``: numbers, or lists of numbers (one a chain step)."""

    def close(self) -> None:
        """Everything is on disk after this."""


class JsonLog:
    """One object a line, appended: ``{"update": ..., "time": ..., name: value, ...}``; a number that is not
    finite is null, which JSON has no other word for."""

    def __init__(self, path: Path) -> None:
        end_line(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, update: int, values: Mapping[str, Any]) -> None:
        """Append and flush, so that a kill loses nothing."""
        row = {"update": update, "time": time.time()} | {n: _finite(v) for n, v in values.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoardLog:
    """Scalars in TensorBoard's event format: length-prefixed protocol buffers with CRC-32C sums."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"events.out.tfevents.{time.time_ns()}.eaglejax").open("wb")
        self._record(_double(1, time.time()) + _bytes(3, b"brain.Event:2"))

    def write(self, update: int, values: Mapping[str, Any]) -> None:
        """One event; the entries of a list become ``name/0``, ``name/1``, ..."""
        flat: dict[str, float] = {}
        for name, value in values.items():
            if isinstance(value, list | tuple):
                flat |= {f"{name}/{i}": float(v) for i, v in enumerate(value)}
            elif isinstance(value, int | float):
                flat[name] = float(value)
        summary = b"".join(_bytes(1, _bytes(1, n.encode()) + _float(2, v)) for n, v in flat.items())
        self._record(_double(1, time.time()) + _varint(2, update) + _bytes(5, summary))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _record(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked_crc(length) + data + _masked_crc(data))
        self._file.flush()


def import_wandb() -> Any:
    """The package of Weights & Biases. Raises ConfigError where it is not installed."""
    try:
        import wandb
    except ImportError as error:
        raise ConfigError("run.wandb is set, but the package wandb is not installed") from error
    return wandb


class WandbLog:
    """Weights & Biases, where its package is installed; one run there for each folder, gone on with."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        options = {"dir": str(folder), "config": dict(config), "id": name, "resume": "allow"}
        self._run = import_wandb().init(project="eaglejax", **options)

    def write(self, update: int, values: Mapping[str, Any]) -> None:
        """One step."""
        self._run.log(dict(values), step=update)

    def close(self) -> None:
        """Finish the upload."""
        self._run.finish()


def _make_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _make_table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _base128(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def _varint(field: int, value: int) -> bytes:
    return _base128(field << 3) + _base128(value)


def _double(field: int, value: float) -> bytes:
    return _base128(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return _base128(field << 3 | 5) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _base128(field << 3 | 2) + _base128(len(value)) + value
