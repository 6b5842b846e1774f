"""The values of eaglejax's environment variables, checked before a command runs."""

from __future__ import annotations

from collections.abc import Mapping

from eaglejax.devices import compile_cache, cpu_flags
from eaglejax.errors import ConfigError
from kernels_pallas import native

SWITCHES = (compile_cache.OFF_VARIABLE, cpu_flags.OFF_VARIABLE, native.OFF_VARIABLE)
"""Variables that are on with 1."""


def check(environ: Mapping[str, str]) -> None:
    """Refuse a value that means nothing, lest it be taken for another or for none. Raises ConfigError."""
    for name in SWITCHES:
        if environ.get(name, "") not in ("", "0", "1"):
            raise ConfigError(f"{name} is {environ[name]!r}; it is 1 (on), or 0 or empty (off)")
    level = environ.get(native.LEVEL_VARIABLE)
    if level and level not in native.LEVELS:
        raise ConfigError(f"{native.LEVEL_VARIABLE} is {level!r}; it is one of {', '.join(native.LEVELS)}")
