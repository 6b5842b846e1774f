"""Conversations as people write them, read one way for serving, prompt files, training and regeneration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eaglejax.errors import RequestError
from eaglejax.jsonl import kind, parse_json

Message = Mapping[str, Any]

ROLES = (
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
    "ipython",
    "observation",
    "context",
    "documents",
)
"""Roles that chat templates know; each template knows some of them."""

NICKNAMES = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bard", "model"), "assistant")}
"""Other names of a role in published data, in either spelling of a message."""

SHAREGPT = {"function": "tool", "observation": "tool"}
"""Names that mean the tool's answer where a message has ``from`` and ``value``."""

LISTS = ("tools", "documents")
"""Fields beside the messages that templates read, each a list of objects."""

RESERVED = ("messages", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template")
"""Names that are no variable of a template, or not the caller's to set."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What a chat template is given.

    ``messages``: one or more, each with ``role`` and ``content`` (a text) and whatever else it was written
    with. ``variables``: ``tools``, ``documents`` and what else the template is to read
    (``enable_thinking``...).
    """

    messages: tuple[Message, ...]
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.messages)

    def first(self, count: int) -> Conversation:
        """The conversation up to its first ``count`` messages."""
        return dataclasses.replace(self, messages=self.messages[:count])

    def then(self, *messages: Message) -> Conversation:
        """The conversation with ``messages`` behind it."""
        return dataclasses.replace(self, messages=(*self.messages, *messages))

    def behind(self, *messages: Message) -> Conversation:
        """The conversation with ``messages`` in front of it."""
        return dataclasses.replace(self, messages=(*messages, *self.messages))

    def with_defaults(self, variables: Mapping[str, Any]) -> Conversation:
        """The conversation with ``variables`` that it does not set itself."""
        return dataclasses.replace(self, variables={**variables, **self.variables})

    def texts(self) -> list[str]:
        """Every text that the template is given: in messages, roles apart, and in variables."""
        found: list[str] = []
        self.map_texts(lambda text: found.append(text) or text)  # type: ignore[func-returns-value]
        return found

    def map_texts(self, change: Callable[[str], str]) -> Conversation:
        """The conversation with ``change`` applied to each of its ``texts``."""
        messages = tuple(
            {k: v if k == "role" else _mapped(v, change) for k, v in m.items()} for m in self.messages
        )
        return Conversation(messages, {k: _mapped(v, change) for k, v in self.variables.items()})

    @property
    def asks_tools(self) -> bool:
        """Whether a message calls a tool or is a tool's answer."""
        plain = ("system", "developer", "user", "assistant")
        return any(m["role"] not in plain or m.get("tool_calls") for m in self.messages)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` with ``change`` applied to every text in it, names of fields apart."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _mapped(inner, change) for name, inner in value.items()}
    return [_mapped(inner, change) for inner in value] if isinstance(value, list | tuple) else value


def as_conversation(value: Any) -> Conversation:
    """A Conversation, checked again, or a list of messages as one. Raises RequestError."""
    if isinstance(value, Conversation):
        return Conversation(read_messages(value.messages), template_variables(value.variables))
    return Conversation(read_messages(value))


def read_row(row: Mapping[str, Any], field: str) -> Conversation:
    """The conversation under ``field`` of a row, with the ``tools``, ``documents`` and
    ``chat_template_kwargs`` beside it. Raises RequestError."""
    return Conversation(read_messages(row[field]), row_variables(row))


def row_variables(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row gives its template beside the messages: ``tools`` and ``documents`` (lists of objects, or
    such as JSON text; empty: none) and the entries of ``chat_template_kwargs``. Raises RequestError."""
    given = {name: value for name in LISTS if (value := _parsed(row, name))}
    more = _parsed(row, "chat_template_kwargs")
    return {**given, **template_variables({} if more is None else more, taken=tuple(given))}


def template_variables(value: Any, taken: Sequence[str] = ()) -> dict[str, Any]:
    """``chat_template_kwargs`` [name -> value], checked; ``taken``: names that were given elsewhere. Raises
    RequestError."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise RequestError(
            f'chat_template_kwargs is an object such as {{"enable_thinking": false}}, not {kind(value)}'
        )
    for name in value:
        if name in RESERVED:
            raise RequestError(f"chat_template_kwargs sets {name!r}, which is no variable to be set")
        if name in taken:
            raise RequestError(f"{name!r} is given twice: in chat_template_kwargs and beside it")
    for name in LISTS:
        _check_list(name, value.get(name))
    return dict(value)


def _parsed(row: Mapping[str, Any], name: str) -> Any:
    """A field of a row; published data hold lists and objects as JSON text too."""
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except RequestError as error:
            raise RequestError(f"its {name} are {error}") from error
    if name in LISTS:
        _check_list(name, value)
    return value


def _check_list(name: str, value: Any) -> None:
    good = value is None or (isinstance(value, list | tuple) and all(isinstance(v, Mapping) for v in value))
    if not good:
        raise RequestError(f"its {name} are a list of objects, not {kind(value)}")


def read_messages(value: Any) -> tuple[dict[str, Any], ...]:
    """Messages in either spelling (``role`` and ``content``, or ShareGPT's ``from`` and ``value``), with
    roles that templates know, contents as texts, and every other field as it is.

    A content that is a list of text parts is those texts joined, null is the empty text, and absent is empty
    beside ``tool_calls``. Raises RequestError that names the message: for another shape, an unknown role, a
    part that is no text.
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise RequestError(f"messages must be a non-empty list of objects with a role, not {kind(value)}")
    return tuple(_message(n, entry) for n, entry in enumerate(value))


def _message(n: int, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, Mapping) or not {"role", "from"} & set(entry):
        raise RequestError(
            f"messages must be a non-empty list of objects with a role; message {n} is {kind(entry)}"
        )
    role_field, content_field = ("role", "content") if "role" in entry else ("from", "value")
    role = entry[role_field]
    known = NICKNAMES if role_field == "role" else NICKNAMES | SHAREGPT
    role = known.get(role, role) if isinstance(role, str) else role
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"message {n} has role {role!r}; known are {', '.join([*ROLES, *NICKNAMES])}")
    if content_field not in entry and "content" in entry:
        content_field = "content"
    if content_field not in entry and not entry.get("tool_calls"):
        raise RequestError(f"message {n} ({role}) has no {content_field!r}")
    rest = {k: v for k, v in entry.items() if k not in (role_field, content_field)}
    return {"role": role, "content": content_text(entry.get(content_field), f"message {n}"), **rest}


def content_text(content: Any, where: str) -> str:
    """A message's content as text; ``where`` names the message in errors. Raises RequestError."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"the content of {where} is no text, but {kind(content)}")
    texts = []
    for n, part in enumerate(content):
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise RequestError(
                f'the content of {where} is a text or a list of parts such as {{"type": "text", "text": '
                f'"..."}}; part {n} is {kind(part)}'
            )
        if part["type"] != "text":
            raise RequestError(
                f"the content of {where} has a part of type {part['type']!r}; only 'text' can be taken"
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(
                f"the content of {where} has a text part {n} whose 'text' is {kind(part.get('text'))}"
            )
        texts.append(part["text"])
    return "".join(texts)
