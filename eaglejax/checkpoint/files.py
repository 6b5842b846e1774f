"""Small things every file format needs: JSON objects, whole writes, one writer at a time, the cache folder, a
progress bar."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock

from eaglejax.devices import compile_cache
from eaglejax.errors import CheckpointError


def cache_dir() -> Path:
    """Where downloads and converted weights are kept: eaglejax's home, beside the compiled programs."""
    return compile_cache.home(os.environ)


@contextlib.contextmanager
def progress(text: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr; the body calls the yielded function to advance by 1, or by a given amount.

    ``total`` None: the bar only shows that something moves.
    """
    import rich.console
    import rich.progress

    bar = rich.progress.Progress(console=rich.console.Console(stderr=True), transient=True)
    with bar:
        task = bar.add_task(text, total=total)
        yield lambda amount=1: bar.advance(task, amount)


def read_json(path: Path, *, default: Any = None) -> Any:
    """The JSON object in a file; ``default``, if given, when there is no file. Raises ``CheckpointError``
    otherwise."""
    if not path.is_file():
        if default is not None:
            return default
        raise CheckpointError(f"{path} is missing")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, it holds a {type(value).__name__}")
    return value


def write_text(path: Path, text: str) -> None:
    """``text`` as a file that exists whole or not at all: under another name, then renamed to ``path``."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def make_folder(path: Path) -> None:
    """The folder with all above it, unless it is there. Raises CheckpointError where it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be made a folder: {error.strerror}") from error


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Hold ``path``, a file or folder that grows over a long run, against other processes while the body
    runs, by whatever name they call it; however this process ends, it is free again. The folder above it is
    made. Raises CheckpointError when another holds it, or when nothing can be written there."""
    real = path.resolve()
    make_folder(real.parent)
    lock = filelock.FileLock(real.parent / f".{real.name}.lock", blocking=False)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise CheckpointError(
            f"{path} is being written by another process; wait for it, or write elsewhere"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{lock.lock_file} cannot be written: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()
