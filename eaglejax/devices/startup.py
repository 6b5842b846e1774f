"""What must be set before jax starts on a machine, once a process."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys

from eaglejax.devices import compile_cache, cpu_flags, kernel_errors


@dataclasses.dataclass(frozen=True)
class Startup:
    """What :func:`prepare` did. Each text says what is in force and why; ``eaglejax doctor`` prints them."""

    cpu_flags: cpu_flags.FlagReport
    compile_cache: compile_cache.CacheReport


@functools.cache
def prepare() -> Startup:
    """Set CPU compiler flags and the persistent compilation cache, and make kernels' refusals eaglejax's own,
    once a process."""
    kernel_errors.adopt()
    started = jax_has_started()
    return Startup(
        cpu_flags.set_flags(os.environ, started=started), compile_cache.enable(os.environ, started=started)
    )


def jax_has_started() -> bool:
    """Whether this process already made a jax backend, after which XLA reads no more flags."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bool(bridge.backends_are_initialized())
