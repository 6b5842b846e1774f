"""Ctrl-C at any moment of a command's own process ends it in one line, with status 130.

Python raises KeyboardInterrupt wherever its main thread is. In the middle of an import that leaves half a
module behind, or another error; so it waits for the import's end. While a compiler or a device works nothing
is raised at all before they are done; so a thread looks on, and ends the process where nothing happens for a
while. A second Ctrl-C ends it at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
"""Exit status of a process that Ctrl-C ended: 128 and the signal."""

PATIENCE = 5.0
"""Seconds that a first Ctrl-C may go unheard, in a compiler, say, before the process is ended."""

_AGAIN = 0.02
"""Seconds between two looks whether an import is over."""

_asked = False
_heard = threading.Event()


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """While the body runs, Ctrl-C is handled as the module's text says; for a process of its own, which ends
    with the body."""
    main = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    # What runs in the background of a shell is started deaf to it, and stays so.
    if not main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGINT, _interrupted)
    signal.signal(signal.SIGALRM, _when_no_import_runs)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_look_on, args=(read,), daemon=True, name="interrupts").start()
    try:
        yield
    except BaseException as error:
        # What was interrupted may have made another error of it.
        if isinstance(error, KeyboardInterrupt) or (_asked and not isinstance(error, SystemExit)):
            say_and_leave()
        raise
    finally:
        # Nobody would catch it any more: what follows is the interpreter's end.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def say_and_leave() -> NoReturn:
    """End the process with the one line. What still compiles or runs elsewhere in it would meet an
    interpreter that is gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with contextlib.suppress(OSError):
        os.write(2, b"error: interrupted\n")
    os._exit(INTERRUPTED)


def _interrupted(number: int, frame: FrameType | None) -> None:
    global _asked
    _heard.set()
    if _asked:
        say_and_leave()
    _asked = True
    _when_no_import_runs(number, frame)


def _when_no_import_runs(number: int, frame: FrameType | None) -> None:
    del number
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _look_on(read: int) -> None:
    while os.read(read, 1)[0] != signal.SIGINT:
        pass
    # A command may handle it in its own way, as training does.
    if not _heard.wait(PATIENCE) and signal.getsignal(signal.SIGINT) is _interrupted:
        say_and_leave()
