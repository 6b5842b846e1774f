"""Running a command from its words: parse, run, and say in one line what went wrong."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from eaglejax.cli import compiling
from eaglejax.cli.interrupts import INTERRUPTED, say_and_leave
from eaglejax.devices import environment
from eaglejax.errors import EaglejaxError

NO_READER = 141
"""Exit status of a process that the end of a pipe's other side ended: 128 and the signal."""


def run_command(
    kind: Callable[[], Any] | type, argv: Sequence[str] | None, *, own_process: bool = False, **about: Any
) -> int:
    """Run one command; its exit status. 0: done, 1: done but not all is well, 2: refused.

    ``kind``: a dataclass with ``run``, whose fields are the options, or a function that imports and returns
    it. ``own_process``: the process ends with the command. ``about``: what the help text says besides
    (``prog``, ``description``). What a person or the machine may bring about (a full disk, too little memory,
    a backend that is not there, Ctrl-C) is said in one line; any other error is a fault of ours, and has its
    traceback.
    """
    compiling.begin()
    try:
        import tyro

        made = kind if isinstance(kind, type) else kind()
        command = tyro.cli(made, args=argv, config=(tyro.conf.FlagCreatePairsOff,), **about)
        environment.check(os.environ)
        with _warnings_in_a_line():
            status = command.run()
            compiling.tell()
        sys.stdout.flush()
        return status
    except EaglejaxError as error:
        return _refused(str(error))
    except KeyboardInterrupt:
        if own_process:
            say_and_leave()
        _refused("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever reads has enough (`| head -1`); the interpreter would flush into the pipe once more.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except MemoryError:
        return _refused("the machine has too little memory for this: take a smaller model, batch or context")
    except OSError as error:
        if error.strerror is None:
            raise
        where = f": {error.filename}" if error.filename is not None else ""
        return _refused(f"{error.strerror}{where}")
    except RuntimeError as error:
        text = _backend(error)
        if text is None:
            raise
        return _refused(text)


def _refused(text: str) -> int:
    from eaglejax.cli.show import print_error

    print_error(text)
    return 2


def _backend(error: RuntimeError) -> str | None:
    """What jax's error says of the device, None for another error."""
    first = next(iter(str(error).strip().splitlines()), "")
    if "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
        return f"the device has too little memory for this: take a smaller batch or context ({first:.200})"
    if "Unable to initialize backend" in str(error) or "Unknown backend" in str(error):
        asked = os.environ.get("JAX_PLATFORMS")
        cause = f"JAX_PLATFORMS={asked}: " if asked else ""
        return f"{cause}{first:.300}; unset it, or install what the platform needs"
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(error, jax.errors.JaxRuntimeError):
        return f"the device failed: {first:.400}"
    return None


@contextlib.contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Warnings for people are said as notes are, without the line of code that they came from."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if category is not UserWarning:
                usual(message, category, *where, **more)
                return
            from eaglejax.cli.show import print_note

            print_note(f"warning: {message}")

        warnings.showwarning = show  # type: ignore[assignment]
        yield
