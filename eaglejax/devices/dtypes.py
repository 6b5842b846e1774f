"""Bytes of numbers by dtype, known before jax starts."""

from __future__ import annotations

from eaglejax.errors import ConfigError

BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int4": 0.5,
}
"""Bytes of one element by dtype."""


def dtype_bytes(dtype: str) -> float:
    """Bytes of one element. Raises ConfigError for a dtype that is not counted."""
    if dtype not in BYTES:
        raise ConfigError(f"dtype {dtype!r} is not known; use one of {', '.join(BYTES)}")
    return BYTES[dtype]
