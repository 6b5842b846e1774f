"""JSON as it comes from outside, bounded: what is read has a limited size, depth and length of numbers. And
as it is written: names from outside may hold what an encoding cannot."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

MOST_BYTES = 1 << 27
"""Of one text. The index of a model of a hundred thousand tensors takes a tenth of it."""

MOST_DEPTH = 64
"""Levels of objects and lists."""

_MOST_DIGITS = 40
"""Of an integer. Published files hold 1e30 spelt out, for a length without a limit."""


class JsonError(ValueError):
    """What is wrong with a text, so that ``<where> is <error>`` is a sentence."""


def parse(text: str | bytes, *, strict: bool = False) -> Any:
    """The value that ``text`` spells; bytes are UTF-8. ``strict``: without NaN and Infinity, which Python
    writes and JSON does not know, without a key twice in an object, of which Python takes the last, or
    halves of surrogate pairs, and with -0 as a float, as other readers have it.

    Raises JsonError for what is no JSON and for what is too large, too deep or holds integers of hundreds of
    digits, before anything of that size is made.
    """
    if len(text) > MOST_BYTES:
        raise JsonError(f"not usable JSON: it is longer than {MOST_BYTES} bytes")
    try:
        spelt = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(
            spelt,
            parse_int=_unsigned_zero if strict else _integer,
            parse_constant=_no_number if strict else None,
            object_pairs_hook=_distinct if strict else None,
        )
    except UnicodeDecodeError as error:
        raise JsonError(f"not valid JSON: byte {error.start + 1} is not UTF-8") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in error.doc else ""
        raise JsonError(f"not valid JSON: {error.msg} at {line}column {error.colno}") from error
    except RecursionError as error:
        raise JsonError("not usable JSON: it is nested too deeply") from error
    if strict and "\\ud" in spelt.lower():
        _check_characters(value)
    if spelt.count("[") + spelt.count("{") > MOST_DEPTH:
        _check_depth(value)
    return value


def dump(value: Any, *, encoding: str = "utf-8", indent: int | None = None) -> str:
    """``value`` spelt in characters; where ``encoding`` cannot hold them (ASCII, or half of a surrogate pair
    in UTF-8), escaped as JSON does it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=True, allow_nan=False, indent=indent)
    return text


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise JsonError("not usable JSON: it holds a number of too many digits")
    return int(digits)


def _unsigned_zero(digits: str) -> int | float:
    """An integer; -0 is one to Python alone."""
    return -0.0 if digits == "-0" else _integer(digits)


def _no_number(name: str) -> Any:
    raise JsonError(f"not valid JSON: it holds {name}")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonError(f"not usable JSON: it holds {twice!r:.80} twice in one object")
    return made


def _check_characters(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise JsonError("not valid JSON: it holds half of a surrogate pair, which is no character") from error


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MOST_DEPTH + 1):
        level = [inner for outer in level for inner in _parts(outer)]
        if not level:
            return
    raise JsonError("not usable JSON: it is nested too deeply")


def _parts(value: Any) -> Iterable[Any]:
    """The objects and lists inside a value."""
    inside = value.values() if isinstance(value, dict) else value
    return (
        [part for part in inside if isinstance(part, dict | list)] if isinstance(value, dict | list) else []
    )
