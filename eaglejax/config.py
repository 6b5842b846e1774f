"""What a person writes in files and option strings: prompt files, and speculative configurations as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eaglejax.errors import ConfigError, RequestError

Message = Mapping[str, Any]
SHAPES = ("prompt", "messages", "turns")


@dataclasses.dataclass(frozen=True)
class PromptRow:
    """One row of a prompt file.

    ``id``: the row's own, else its line number. Exactly one of ``prompt`` (a text), ``messages`` (a
    conversation that waits for its next answer) and ``turns`` (user turns, to be answered one after the
    other) is set. ``predictions``: per turn, what the answer will mostly repeat, or None.
    """

    id: str | int
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    turns: tuple[str, ...] | None = None
    predictions: tuple[str | None, ...] = (None,)

    @property
    def count(self) -> int:
        """How many answers the row asks for."""
        return len(self.turns) if self.turns else 1

    def request(self, answers: Sequence[str], *, chat: bool) -> str | list[Message]:
        """The text or conversation that asks for answer ``len(answers)``, given the answers so far.

        ``chat`` wraps a plain ``prompt`` as a user's message; messages and turns always are conversations.
        """
        if self.prompt is not None:
            return [{"role": "user", "content": self.prompt}] if chat else self.prompt
        if self.messages is not None:
            return list(self.messages)
        conversation: list[Message] = []
        for turn, answer in zip(self.turns or (), [*answers, None], strict=False):
            conversation.append({"role": "user", "content": turn})
            if answer is not None:
                conversation.append({"role": "assistant", "content": answer})
        return conversation


@dataclasses.dataclass(frozen=True)
class BadRow:
    """A row that cannot be served; ``error`` names the line and what is wrong with it."""

    id: str | int
    error: str


def read_prompts(
    path: str | Path, *, prediction_field: str | None = None, limit: int | None = None
) -> list[PromptRow | BadRow]:
    """Rows of a JSON Lines file, at most the first ``limit``.

    A row is an object with exactly one of ``prompt``, ``messages`` and ``turns``, perhaps an ``id``, and any
    other fields, which are ignored but for ``prediction_field``: a string (for every turn) or a list with
    one string or null a turn. A row that is not so becomes a BadRow, and the others stand. Raises
    ConfigError for a file that is missing, empty or not UTF-8, a limit below 1, and a prediction field that
    no sound row has.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; it must be 1 or more")
    rows: list[PromptRow | BadRow] = []
    predicted = False
    for number, line in _lines(Path(path)):
        if limit is not None and len(rows) == limit:
            break
        name: str | int = number
        try:
            fields = _object(line)
            name = _identity(fields, number)
            row = _row(fields, name, prediction_field)
            predicted |= any(row.predictions)
            rows.append(row)
        except RequestError as error:
            rows.append(BadRow(name, f"{path}, line {number}: {error}"))
    if not rows:
        raise ConfigError(f'{path} holds no prompt; give one JSON object a line, such as {{"prompt": "..."}}')
    if prediction_field and not predicted and any(isinstance(row, PromptRow) for row in rows):
        raise ConfigError(f"no row of {path} has a field {prediction_field!r} with a prediction")
    return rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Non-blank lines, numbered from 1. A JSON string may hold U+2028, so newlines alone end a line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"prompt file {path} cannot be read: {error.strerror}") from error
    for number, raw in enumerate(data.split(b"\n"), start=1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path}, line {number}: byte {error.start + 1} is not UTF-8; save the file as UTF-8"
            ) from error
        if line.strip():
            yield number, line


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(f"not valid JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise RequestError("not usable JSON: it is nested too deeply") from error
    if not isinstance(value, dict):
        raise RequestError(f"a row is a JSON object, this is a {type(value).__name__}")
    return value


def _identity(fields: dict[str, Any], number: int) -> str | int:
    name = fields.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise RequestError(f"'id' is a string or an integer, not {_kind(name)}")
    return name


def _row(fields: dict[str, Any], name: str | int, prediction_field: str | None) -> PromptRow:
    shapes = [shape for shape in SHAPES if shape in fields]
    if len(shapes) != 1:
        having = " and ".join(map(repr, shapes)) or "none of them"
        raise RequestError(f"a row has exactly one of 'prompt', 'messages' and 'turns'; this has {having}")
    value = fields[shapes[0]]
    if shapes == ["prompt"]:
        row = PromptRow(name, prompt=_text("'prompt'", value))
    elif shapes == ["messages"]:
        row = PromptRow(name, messages=tuple(_message(n, m) for n, m in enumerate(_list("messages", value))))
    else:
        row = PromptRow(name, turns=tuple(_text(f"turn {n}", t) for n, t in enumerate(_list("turns", value))))
    if prediction_field is None:
        return row
    return dataclasses.replace(
        row, predictions=_predictions(prediction_field, fields.get(prediction_field), row.count)
    )


def _predictions(field: str, value: Any, count: int) -> tuple[str | None, ...]:
    if value is None or isinstance(value, str):
        return (value,) * count
    if not isinstance(value, list) or not all(v is None or isinstance(v, str) for v in value):
        raise RequestError(
            f"{field!r} is a string, or a list with a string or null a turn, not {_kind(value)}"
        )
    if len(value) != count:
        raise RequestError(f"{field!r} has {len(value)} entries for {count} turns")
    return tuple(value)


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{what} is a string, not {_kind(value)}")
    if not value:
        raise RequestError(f"{what} is empty")
    return value


def _list(field: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise RequestError(f"{field!r} is a non-empty list, not {_kind(value)}")
    return value


def _message(number: int, value: Any) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str) or "content" not in value:
        raise RequestError(f"message {number} is an object with 'role' and 'content', not {_kind(value)}")
    if value["content"] is not None and not isinstance(value["content"], str):
        raise RequestError(f"the content of message {number} is a string, not {_kind(value['content'])}")
    return value


def _kind(value: Any) -> str:
    """A JSON value's type, in JSON's words, with its contents where they are short."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    name = names.get(type(value), "a number")
    text = json.dumps(value, ensure_ascii=False)
    return f"{name} ({text})" if len(text) <= 40 else name


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """How to draft, in the words that vLLM's ``--speculative-config`` uses.

    ``num_speculative_tokens``: drafts a round. ``prompt_lookup_max`` and ``prompt_lookup_min``: the longest
    and shortest suffix that the n-gram method searches for. ``model``: the draft, for methods that have one.
    None leaves the method's own default.
    """

    method: str
    num_speculative_tokens: int | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    model: str | None = None

    def given(self) -> dict[str, Any]:
        """The settings that are not None, without the method."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "method" and v is not None}


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Read a JSON object. Raises ConfigError for bad JSON, unknown keys and wrong types."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"the speculative config is not valid JSON: {error.msg} at column {error.colno}"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"the speculative config is a JSON object, not {_kind(value)}")
    kinds: dict[str, type] = {
        "method": str,
        "num_speculative_tokens": int,
        "prompt_lookup_max": int,
        "prompt_lookup_min": int,
        "model": str,
    }
    unknown = sorted(set(value) - set(kinds))
    if unknown:
        raise ConfigError(
            f"unknown key {unknown[0]!r} in the speculative config; known are {', '.join(kinds)}"
        )
    for key, entry in value.items():
        if isinstance(entry, bool) or not isinstance(entry, kinds[key]):
            raise ConfigError(
                f"{key!r} in the speculative config is {kinds[key].__name__}, not {_kind(entry)}"
            )
    if "method" not in value:
        raise ConfigError("the speculative config names no 'method'")
    return SpeculativeConfig(**value)
