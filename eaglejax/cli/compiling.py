"""What a command says of compilation: that it took place, how long it took, whether its results are kept."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from eaglejax import devices
from eaglejax.cli import show
from kernels_pallas import native

REQUEST, HIT = "/jax/compilation_cache/compile_requests_use_cache", "/jax/compilation_cache/cache_hits"
DONE = "/jax/core/compile/backend_compile_duration"
"""What jax records of a program: its cache is asked, it answers, the program is there, from wherever."""
WORTH_SAYING = 1.0
"""Seconds of compilation from which on it is told."""


@dataclasses.dataclass
class Compiled:
    """``programs`` that were compiled, not found in the cache, and the ``seconds`` that took."""

    programs: int = 0
    seconds: float = 0.0
    found: bool = False

    def on_event(self, event: str, **_: Any) -> None:
        """One of jax's events."""
        if event in (REQUEST, HIT):
            self.found = event == HIT

    def on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        """One of jax's durations."""
        if event == DONE:
            if not self.found:
                self.programs += 1
                self.seconds += duration_secs
            self.found = False


@functools.cache
def watch() -> Compiled:
    """Count what this process compiles from now on."""
    import jax.monitoring

    compiled = Compiled()
    jax.monitoring.register_event_listener(compiled.on_event)
    jax.monitoring.register_event_duration_secs_listener(compiled.on_duration)
    return compiled


def begin() -> None:
    """Forget what this process compiled before: :func:`tell` speaks of one command."""
    if watch.cache_info().currsize:
        compiled = watch()
        compiled.programs, compiled.seconds = 0, 0.0
    native.COMPILE_SECONDS.clear()


def tell() -> None:
    """Say in a line on stderr what was compiled since :func:`begin`, and begin anew; nothing where that took
    less than a second."""
    if not watch.cache_info().currsize:
        return
    compiled, kernels = watch(), native.COMPILE_SECONDS
    seconds = compiled.seconds + sum(kernels)
    if seconds >= WORTH_SAYING:
        parts = [(compiled.programs, "program"), (len(kernels), "kernel")]
        what = " and ".join(f"{count} {name}{'s' * (count > 1)}" for count, name in parts if count)
        kept = devices.prepare().compile_cache.folder is not None
        end = "they are kept for the next run" if kept else "programs are not kept (see `eaglejax doctor`)"
        show.print_note(f"compiled {what} for this machine in {seconds:.1f} s; {end}")
    begin()
