"""jax's persistent compilation cache, on by default: the second run of a program compiles nothing."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import MutableMapping

from kernels_pallas.native import HOME_VARIABLE, home

__all__ = ["HOME_VARIABLE", "OFF_VARIABLE", "CacheReport", "enable", "home"]

OFF_VARIABLE = "EAGLEJAX_NO_COMPILE_CACHE"
# A round of a small model is dozens of programs that take tens of milliseconds each; jax's own default of one
# second would leave all of those to be compiled again.
LEAST_COMPILE_SECONDS = "0.02"


@dataclasses.dataclass(frozen=True)
class CacheReport:
    """``folder`` of the cache in force, or None, and why."""

    folder: str | None
    reason: str


def enable(environ: MutableMapping[str, str], *, started: bool) -> CacheReport:
    """Point jax at ``<home>/jax``, unless the user turned the cache off or chose another place.

    Works before and after jax is imported. A folder that cannot be written is reported, not an error.
    """
    if environ.get(OFF_VARIABLE, "") not in ("", "0"):
        return CacheReport(None, f"turned off by {OFF_VARIABLE}")
    jax = sys.modules.get("jax")
    chosen = environ.get("JAX_COMPILATION_CACHE_DIR") or (
        jax.config.jax_compilation_cache_dir if jax else None
    )
    if chosen:
        return CacheReport(chosen, "chosen by the user")
    folder = home(environ) / "jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return CacheReport(None, f"{folder} cannot be made: {error.strerror}")
    if not os.access(folder, os.W_OK):
        return CacheReport(None, f"{folder} cannot be written")
    environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    least = environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", LEAST_COMPILE_SECONDS)
    if jax:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", float(least))
    late = "; programs compiled before eaglejax was imported are not in it" if started else ""
    return CacheReport(
        str(folder), f"the default place; {HOME_VARIABLE} moves it, {OFF_VARIABLE}=1 turns it off{late}"
    )
