"""JSON Lines that a run appends to, and that survive a kill in the middle of a line."""

from __future__ import annotations

import os
from pathlib import Path

from eaglejax.errors import ConfigError, RequestError
from eaglejax.jsonl import parse_object


def split_lines(path: Path) -> tuple[list[str], bytes]:
    """The whole lines of a file, ([], b"") where there is none, and what a kill left of a last one.

    Nothing is changed. A last object that lacks its line's end alone is whole. Raises ConfigError for a file
    that cannot be read as UTF-8.
    """
    try:
        data = path.read_bytes() if path.exists() else b""
        end = data.rfind(b"\n") + 1
        lines, rest = data[:end].decode("utf-8").split("\n")[:-1], data[end:]
        return ([*lines, rest.decode("utf-8")], b"") if _is_object(rest) else (lines, rest)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start + 1}") from error


def end_line(path: Path) -> None:
    """Make what is appended next start a line of its own: what a kill left of a last line is removed from the
    file, a whole one gets the end that it lacks."""
    data = path.read_bytes() if path.exists() else b""
    rest = data[data.rfind(b"\n") + 1 :]
    if _is_object(rest):
        with path.open("ab") as file:
            file.write(b"\n")
    elif rest:
        os.truncate(path, len(data) - len(rest))


def _is_object(rest: bytes) -> bool:
    """Whether a line without its end is whole. The beginning of an object never is one."""
    try:
        parse_object(rest.decode("utf-8"))
    except (UnicodeDecodeError, RequestError):
        return False
    return True
