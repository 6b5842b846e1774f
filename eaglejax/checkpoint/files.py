"""Small things every file format needs: JSON objects, whole writes, one writer at a time, the cache folder, a
progress bar."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eaglejax import json_text
from eaglejax.devices import compile_cache
from eaglejax.errors import CheckpointError, ConfigError


def cache_dir() -> Path:
    """Where downloads and converted weights are kept: eaglejax's home, beside the compiled programs."""
    return compile_cache.home(os.environ)


@contextlib.contextmanager
def progress(text: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr where that is a terminal; the body calls the yielded function to advance by 1,
    or by a given amount.

    ``total`` None: the bar only shows that something moves.
    """
    if not sys.stderr.isatty():
        yield lambda amount=1: None
        return
    import rich.console
    import rich.progress

    columns = (
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
    )
    console = rich.console.Console(stderr=True, markup=False, emoji=False)
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda amount=1: bar.advance(task, amount)


def read_json(path: Path, *, default: Any = None) -> Any:
    """The JSON object in a file; ``default``, if given, when there is no file. Raises ``CheckpointError``
    otherwise."""
    if not path.is_file():
        if default is not None:
            return default
        raise CheckpointError(f"{path} is missing")
    refuse_pointer(path)
    try:
        if path.stat().st_size > json_text.MOST_BYTES:
            raise CheckpointError(f"{path} has more than {json_text.MOST_BYTES} bytes, as no settings do")
        text = path.read_bytes()
        value = json_text.parse(text)
        if b"\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{path} holds half of a surrogate pair, which is no character") from error
    except json_text.JsonError as error:
        raise CheckpointError(f"{path} is {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, it holds a {type(value).__name__}")
    return value


def refuse_pointer(path: Path) -> None:
    """Raise CheckpointError for a file that git-lfs left as a note of where its content lies."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.read(42).startswith(b"version https://git-lfs.github.com/spec/"):
            raise CheckpointError(
                f"{path} is a Git LFS pointer, not the file itself: `git lfs pull` in its repository, or "
                "download the file"
            )


def read_text(path: Path) -> str:
    """A file of settings as text. Raises ``CheckpointError`` for one that cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is damaged: byte {error.start + 1} is not UTF-8") from error


def write_text(path: Path, text: str) -> None:
    """``text`` as a file that exists whole or not at all: under another name, then renamed to ``path``."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def weight_map(index: Path) -> dict[str, str]:
    """Where an index of shards places each tensor. Raises ``CheckpointError`` for one without a map, and for
    a map to what is no file beside it."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, Mapping) or not places:
        raise CheckpointError(f"{index} has no weight_map")
    odd = [f"{k!r:.80}: {v!r:.80}" for k, v in places.items() if not _is_file_name(v)]
    if odd:
        raise CheckpointError(f"{index} names what is no file beside it: {', '.join(odd[:2])}")
    return dict(places)


def weight_files(folder: Path, stem: str, suffix: str) -> tuple[list[Path], dict[str, str]]:
    """(weight files of ``folder`` under the names that producers give them, where its index places each
    tensor).

    They are, whichever comes first, the shards that ``{stem}{suffix}.index.json`` names, ``{stem}{suffix}``
    and ``{stem}-00001-of-00001{suffix}``; the map is empty without an index, both are where there is nothing.
    Any other file is not taken, since nothing says that it belongs here: an old epoch's, an adapter's.
    Raises ``CheckpointError`` for an index without a map and for shards that are missing.
    """
    index = folder / f"{stem}{suffix}.index.json"
    if index.is_file():
        places = weight_map(index)
        shards = sorted(set(places.values()))
        absent = [name for name in shards if not (folder / name).is_file()]
        if absent:
            raise CheckpointError(
                f"{folder} lacks {', '.join(absent)}: {index.name} names {len(shards)} shards; copy or "
                "download the rest"
            )
        return [folder / name for name in shards], places
    for name in (f"{stem}{suffix}", f"{stem}-00001-of-00001{suffix}"):
        if (folder / name).is_file():
            return [folder / name], {}
    return [], {}


def shards_without_index(names: Sequence[str]) -> str | None:
    """The end of a refusal where ``names`` hold one of several shards, which no index lists; else None."""
    shards = [name for name in names if re.search(r"-\d{5}-of-\d{5}\.", name)]
    return f"; {shards[0]} is one of several shards, whose index is missing: copy it too" if shards else None


def _is_file_name(name: Any) -> bool:
    plain = isinstance(name, str) and name.isprintable() and len(name.encode()) < 256
    return plain and name not in ("", ".", "..") and not set(name) & set("/\\")


def say_strays(folder: Path, taken: list[Path]) -> None:
    """Warn of safetensors files that lie beside the weights that were ``taken`` and are not read."""
    strays = sorted(path.name for path in folder.glob("*.safetensors") if path not in taken)
    if strays:
        warnings.warn(
            f"{folder}: {', '.join(strays[:3])}{' ...' if len(strays) > 3 else ''} "
            f"{'is' if len(strays) == 1 else 'are'} not read; the weights are {taken[0].name}"
            + (f" and {len(taken) - 1} more" if len(taken) > 1 else ""),
            stacklevel=2,
        )


def require_disk(path: Path, needed: int, what: str) -> None:
    """Refuse (CheckpointError) to write ``needed`` bytes, those of ``what``, where the disk that ``path`` is
    to be on has not as many free."""
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise CheckpointError(
            f"{what} takes about {needed / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free where {path} "
            "is to be"
        )


def make_folder(path: Path) -> None:
    """The folder with all above it, unless it is there. Raises CheckpointError where it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be made a folder: {error.strerror}") from error


def check_output(out: Path, *, overwrite: bool | None = None) -> None:
    """Refuse a place where something lies, with its names; ``overwrite`` allows a folder, None where that
    cannot be asked for. Raises ConfigError."""
    if not out.exists() or (out.is_dir() and (overwrite or not any(out.iterdir()))):
        return
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    more = ", ..." if len(names) > 4 else ""
    held = f"not empty: it holds {', '.join(names[:4])}{more}" if names else "no folder"
    also = "" if overwrite is None or not names else ", or overwrite it (--overwrite)"
    raise ConfigError(f"{out} is {held}; name a new folder{also}")


@contextlib.contextmanager
def fresh_folder(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that takes its place when the body has run through."""
    import shutil
    import tempfile

    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        folder = temporary / "new"
        folder.mkdir()
        yield folder
        if out.exists():
            os.replace(out, temporary / "old")
        os.replace(folder, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Hold ``path``, a file or folder that grows over a long run, against other processes while the body
    runs, by whatever name they call it; however this process ends, it is free again. The folder above it is
    made. Raises CheckpointError when another holds it, or when nothing can be written there."""
    import filelock

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
