"""Dtypes by name, known before jax starts: those of weights, and bytes of numbers."""

from __future__ import annotations

from eaglejax.errors import ConfigError

WEIGHT_DTYPES = ("bfloat16", "float32", "float16")
"""Dtypes that weights are held in."""

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


def check_weight_dtype(dtype: str) -> None:
    """Raises ConfigError for a name of no dtype that weights are held in."""
    if dtype not in WEIGHT_DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not known; use one of {', '.join(WEIGHT_DTYPES)}")
