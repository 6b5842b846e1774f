"""JSON Lines, read one way everywhere: one object a line, errors that name the line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eaglejax import json_text
from eaglejax.errors import ConfigError, RequestError


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Non-blank lines, numbered from 1. A JSON string may hold U+2028, so newlines alone end a line.

    Raises ConfigError for a file that cannot be read and for the first line that is not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}, line {number}: byte {error.start + 1} is not UTF-8; save the file as UTF-8"
        ) from error


def parse_json(text: str) -> Any:
    """The value that a text of one line spells. Raises RequestError for what is no JSON, or not usable."""
    try:
        return json_text.parse(text)
    except json_text.JsonError as error:
        raise RequestError(str(error)) from error


def parse_object(line: str) -> dict[str, Any]:
    """The object of one line. Raises RequestError for anything else."""
    value = parse_json(line)
    if not isinstance(value, dict):
        raise RequestError(f"a row is a JSON object, this is a {type(value).__name__}")
    return value
