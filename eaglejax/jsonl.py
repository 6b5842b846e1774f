"""JSON Lines, read one way everywhere: one object a line, errors that name the line."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eaglejax import json_text
from eaglejax.errors import ConfigError, RequestError


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Lines with more than JSON's white space, numbered from 1. A JSON string may hold U+2028, so newlines
    alone end a line. ``-`` is the standard input.

    Raises ConfigError for a file that cannot be read and for the first line that is not UTF-8.
    """
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if str(path) == "-" else open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if line.strip(" \t\r\n"):
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


def kind(value: Any) -> str:
    """A JSON value's type, in JSON's words, with its contents where they are short; of another value its
    Python type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    names |= {int: "a number", float: "a number"}
    if type(value) not in names:
        return f"of type {type(value).__name__}"
    text = json.dumps(value, ensure_ascii=False, default=lambda other: type(other).__name__)
    return f"{names[type(value)]} ({text})" if len(text) <= 40 else names[type(value)]


def parse_object(line: str) -> dict[str, Any]:
    """The object of one line. Raises RequestError for anything else."""
    value = parse_json(line)
    if not isinstance(value, dict):
        raise RequestError(f"a row is a JSON object, this is a {type(value).__name__}")
    return value
