"""C++ kernels as XLA calls them on a CPU: registered on first use, or refused with a reason.

``kernels_pallas.native`` compiles them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from kernels_pallas import native
from kernels_pallas.errors import KernelError

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A C++ source and the calls that XLA finds in it.

    ``op``: the operation, for messages and names. ``symbols``: names of its handlers. ``left``: what XLA does
    without it, for the one warning. ``levels``: those that it is made for.
    """

    op: str
    source: Path
    symbols: tuple[str, ...]
    left: str
    levels: tuple[str, ...] = native.LEVELS

    def status(self) -> tuple[str | None, str]:
        """(level in use, where it is kept), or (None, why there is no kernel). Compiles it where need be."""
        try:
            level = native.level_here()
        except KernelError as error:
            return None, str(error)
        made = self.made(level)
        return (None, made) if isinstance(made, str) else (made.level, str(made.path))

    def refusal(self) -> str | None:
        """Why the kernel cannot run here, or None."""
        if jax.default_backend() != "cpu":
            return f"runs on a CPU, and the default backend is {jax.default_backend()}"
        level, why = self.status()
        return None if level else f"cannot be made here: {why}"

    def unavailable(self) -> str | None:
        """Why programs of this process do not hold the kernel unasked, or None."""
        if jax.device_count() > 1:
            return "runs on one CPU device; XLA splits its own operations over a mesh, and not this call"
        return self.refusal()

    def target(self, symbol: str) -> str:
        """Name under which XLA knows a call of the level in force.

        Raises:
          KernelError: there is no kernel here.
        """
        made = self.made(native.level_here())
        if isinstance(made, str):
            raise KernelError(f"{self.op}: implementation 'cpu' cannot be made here: {made}")
        return _target(symbol, made)

    def made(self, level: str) -> native.Library | str:
        """The kernel, registered with XLA, or why it could not be made; tried, and said, once a process."""
        return _made(self, level)


@functools.cache
def _made(kernel: Kernel, level: str) -> native.Library | str:
    if level not in kernel.levels:
        return f"it needs {' or '.join(kernel.levels)}, and this processor's level is {level}"
    try:
        library = native.load(kernel.source, level)
    except KernelError as error:
        log.warning("%s: %s", kernel.left, error)
        return str(error)
    for symbol in kernel.symbols:
        name = _target(symbol, library)
        # XLA takes a name once a process, and the same name is the same code wherever its file lies.
        if name not in _REGISTERED:
            jax.ffi.register_ffi_target(
                name, jax.ffi.pycapsule(getattr(library.handle, symbol)), platform="cpu"
            )
            _REGISTERED.add(name)
    return library


_REGISTERED: set[str] = set()
"""Names under which XLA knows the calls of this process."""


def _target(symbol: str, library: native.Library) -> str:
    # Programs in jax's compilation cache name it, and must not meet a kernel other than their own.
    return f"eaglejax.{symbol}.{library.level}.{library.key}"


def portable_call(native_call: Callable[..., Any], other: Callable[..., Any], *args: Any) -> Any:
    """``native_call(*args)`` in a program for a CPU and ``other(*args)`` in one for anything else.

    Derivatives are those of ``other``.
    """

    @jax.custom_jvp
    def call(*args):
        return jax.lax.platform_dependent(*args, cpu=native_call, default=other)

    @call.defjvp
    def call_jvp(primals, tangents):
        _, tangent = jax.jvp(other, primals, tangents)
        return call(*primals), tangent

    return call(*args)
