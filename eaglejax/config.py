"""What a person writes in files and option strings: prompt files, and speculative configurations as JSON."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from eaglejax import json_text
from eaglejax.conversation import Conversation, read_row, row_variables, template_variables
from eaglejax.engine_keys import Ranges, read_ranges, translated
from eaglejax.errors import ConfigError, RequestError
from eaglejax.jsonl import kind, parse_json, parse_object, read_lines
from eaglejax.naming import misspelt

SHAPES = ("prompt", "messages", "conversations", "turns")


@dataclasses.dataclass(frozen=True)
class PromptRow:
    """One row of a prompt file.

    ``id``: the row's own, else its line number. Exactly one of ``prompt`` (a text), ``conversation`` (which
    waits for its next answer) and ``turns`` (user turns, to be answered one after the other) is set.
    ``predictions``: per turn, what the answer will mostly repeat, or None. ``variables``: what the chat
    template is given with a prompt or turns (``tools``, ``documents``, entries of ``chat_template_kwargs``).
    ``stop_token_ids``: ids that end its answers. ``system``: a system message for a conversation that begins
    with none.
    """

    id: str | int
    prompt: str | None = None
    conversation: Conversation | None = None
    turns: tuple[str, ...] | None = None
    predictions: tuple[str | None, ...] = (None,)
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    system: str | None = None

    @property
    def count(self) -> int:
        """How many answers the row asks for."""
        return len(self.turns) if self.turns else 1

    def request(self, answers: Sequence[str], *, chat: bool) -> str | Conversation:
        """The text or conversation that asks for answer ``len(answers)``, given the answers so far.

        ``chat`` wraps a plain ``prompt`` as a user's message; messages and turns always are conversations.
        Raises RequestError for a plain prompt with something for the chat template beside it.
        """
        system = () if self.system is None else ({"role": "system", "content": self.system},)
        if self.conversation is not None:
            own = self.conversation.messages[0]["role"] in ("system", "developer")
            return self.conversation if own else self.conversation.behind(*system)
        if self.prompt is not None and not chat:
            unread = [*self.variables, *(["a system message"] if system else [])]
            if unread:
                raise RequestError(
                    f"{', '.join(unread)} beside a plain prompt means nothing: the chat "
                    "template alone reads it; use --chat, or give messages"
                )
            return self.prompt
        turns = (self.prompt,) if self.prompt is not None else self.turns or ()
        messages: list[dict[str, Any]] = []
        for turn, answer in zip(turns, [*answers, None], strict=False):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return Conversation((*system, *messages), self.variables)


@dataclasses.dataclass(frozen=True)
class BadRow:
    """A row that cannot be served; ``error`` names the line and what is wrong with it."""

    id: str | int
    error: str


def read_prompts(
    path: str | Path, *, prediction_field: str | None = None, limit: int | None = None
) -> list[PromptRow | BadRow]:
    """Rows of a JSON Lines file, at most the first ``limit``.

    A row is an object with exactly one of ``prompt``, ``messages`` (or ``conversations``) and ``turns``,
    perhaps an ``id``, what the chat template reads (``tools``, ``documents``, ``chat_template_kwargs``),
    ``stop_token_ids``, and any other fields, which are ignored but for ``prediction_field``: a string (for
    every turn) or a list with one string or null a turn. A row that is not so becomes a BadRow, and the
    others stand. Raises ConfigError for a file that is missing, empty or not UTF-8, a limit below 1, and a
    prediction field that no sound row has.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; it must be 1 or more")
    rows: list[PromptRow | BadRow] = []
    predicted = False
    for number, line in read_lines(path):
        if limit is not None and len(rows) == limit:
            break
        name: str | int = number
        try:
            fields = parse_object(line)
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


def _identity(fields: dict[str, Any], number: int) -> str | int:
    name = fields.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise RequestError(f"'id' is a string or an integer, not {kind(name)}")
    return name


def _row(fields: dict[str, Any], name: str | int, prediction_field: str | None) -> PromptRow:
    shapes = [shape for shape in SHAPES if shape in fields]
    if len(shapes) != 1:
        having = " and ".join(map(repr, shapes)) or "none of them"
        raise RequestError(
            f"a row has exactly one of 'prompt', 'messages' (or 'conversations') and 'turns'; this has "
            f"{having}"
        )
    value = fields[shapes[0]]
    if shapes[0] in ("messages", "conversations"):
        row = PromptRow(name, conversation=read_row(fields, shapes[0]))
    elif shapes == ["prompt"]:
        row = PromptRow(name, prompt=_text("'prompt'", value), variables=row_variables(fields))
    else:
        turns = tuple(_text(f"turn {n}", t) for n, t in enumerate(_list("turns", value)))
        row = PromptRow(name, turns=turns, variables=row_variables(fields))
    row = dataclasses.replace(row, stop_token_ids=_ids("stop_token_ids", fields))
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
            f"{field!r} is a string, or a list with a string or null a turn, not {kind(value)}"
        )
    if len(value) != count:
        raise RequestError(f"{field!r} has {len(value)} entries for {count} turns")
    return tuple(value)


def parse_template_kwargs(text: str | None) -> dict[str, Any]:
    """What ``--chat-template-kwargs`` hands to the chat template: a JSON object. Raises ConfigError."""
    try:
        return {} if text is None else template_variables(parse_json(text))
    except RequestError as error:
        raise ConfigError(f"--chat-template-kwargs: {error}") from error


def parse_logit_bias(text: str | None) -> dict[int, float] | None:
    """What ``--logit-bias`` adds to logits: a JSON object from token ids to numbers, or "-inf" for a ban.
    Raises ConfigError."""
    if text is None:
        return None
    try:
        value = parse_json(text)
    except RequestError as error:
        raise ConfigError(f"--logit-bias: {error}") from error
    good = isinstance(value, dict) and all(name.isascii() and name.isdigit() for name in value)
    if not good:
        raise ConfigError(f'--logit-bias is an object such as {{"13": -2.5, "7": "-inf"}}, not {kind(value)}')
    return {int(token): -math.inf if bias == "-inf" else bias for token, bias in value.items()}


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{what} is a string, not {kind(value)}")
    if not value:
        raise RequestError(f"{what} is empty")
    return value


def _ids(field: str, fields: Mapping[str, Any]) -> tuple[int, ...]:
    value = fields.get(field)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise RequestError(f"{field!r} is a list of token ids, not {kind(value)}")
    return tuple(value)


def _list(field: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise RequestError(f"{field!r} is a non-empty list, not {kind(value)}")
    return value


Paths = tuple[tuple[int, ...], ...]
AuxConvention = Literal["auto", "boundary", "block"]
"""What layer ids in a draft's file count: hidden-state boundaries (0 = embedding), or blocks whose output is
meant (id + 1)."""


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """How to draft, in the words that vLLM's ``--speculative-config`` uses where it has them.

    ``num_speculative_tokens``: drafts a round (of a chain; beside a ``speculative_token_tree``, its paths).
    ``prompt_lookup_max`` and ``prompt_lookup_min``: the longest and shortest suffix that the n-gram method
    searches for; one alone is both. ``model``: the draft, for methods that have one.
    ``speculative_token_tree``: a fixed tree, one path of child ranks a draft. ``tree_depth``,
    ``tree_branching``, ``tree_nodes``: a dynamic tree as ``DynamicTree`` counts, ``tree_nodes`` including the
    root; of a tree of continuations that were found, ``tree_branching`` says how many. ``draft_sample``: draw
    drafts instead of taking the likeliest; ``draft_temperature``: at this temperature instead of the row's.
    ``min_confidence``: draft no further below this cumulative probability. ``suffix_decoding_...``: see
    ``Suffix``, without that word. ``parts``: of a cascade. ``aux_convention``: what layer ids in the draft's
    config count. ``kv_cache_dtype``: format of the draft's keys and values. ``draft_quant``: scheme of the
    draft's own weights. ``verification``: how drafts are judged, as in ``DecodeOptions`` (vLLM's
    ``rejection_sample_method``); ``num_speculative_tokens_per_batch_size``: (first, last, drafts) of batch
    sizes, see ``ByBatch``. None leaves the method's own default.
    """

    method: str
    num_speculative_tokens: int | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    model: str | None = None
    speculative_token_tree: Paths | None = None
    tree_depth: int | None = None
    tree_branching: int | None = None
    tree_nodes: int | None = None
    draft_sample: bool | None = None
    draft_temperature: float | None = None
    min_confidence: float | None = None
    aux_convention: str | None = None
    kv_cache_dtype: str | None = None
    draft_quant: str | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None
    parts: tuple[SpeculativeConfig, ...] | None = None
    verification: str | None = None
    num_speculative_tokens_per_batch_size: Ranges | None = None

    def given(self) -> dict[str, Any]:
        """The settings that are not None, without the method."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {k: v for k, v in values.items() if k != "method" and v is not None}


def _read_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _read_float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _read_str(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _read_bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


_LONGEST_TREE = 1 << 17
"""Characters of a tree written as text; the largest that is drafted with takes a tenth of it."""


def _read_paths(value: Any) -> Paths | None:
    """A list of lists of integers, or such a list written as text (vLLM has tuples in a string)."""
    if isinstance(value, str):
        if len(value) > _LONGEST_TREE:
            return None
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    if not isinstance(value, list | tuple) or not value:
        return None
    if not all(isinstance(path, list | tuple) for path in value):
        return None
    if any(_read_int(rank) is None for path in value for rank in path):
        return None
    return tuple(tuple(path) for path in value)


_KEYS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "method": ("a string", _read_str),
    "num_speculative_tokens": ("an integer", _read_int),
    "prompt_lookup_max": ("an integer", _read_int),
    "prompt_lookup_min": ("an integer", _read_int),
    "model": ("a string", _read_str),
    "speculative_token_tree": ("a list of paths such as [[0], [1], [0, 0]]", _read_paths),
    "tree_depth": ("an integer", _read_int),
    "tree_branching": ("an integer", _read_int),
    "tree_nodes": ("an integer", _read_int),
    "draft_sample": ("true or false", _read_bool),
    "draft_temperature": ("a number", _read_float),
    "min_confidence": ("a number", _read_float),
    "aux_convention": ("a string", _read_str),
    "kv_cache_dtype": ("a string", _read_str),
    "draft_quant": ("a string", _read_str),
    "suffix_decoding_max_tree_depth": ("an integer", _read_int),
    "suffix_decoding_max_cached_requests": ("an integer", _read_int),
    "suffix_decoding_max_spec_factor": ("a number", _read_float),
    "suffix_decoding_min_token_prob": ("a number", _read_float),
    "parts": ("a list of configs such as this one", lambda value: _read_parts(value)),
    "verification": ("a string", _read_str),
    "num_speculative_tokens_per_batch_size": ("a list such as [[1, 4, 5], [5, 64, 2]]", read_ranges),
}
"""Key of a speculative config -> what it holds, in words, and how it is read (None: it is not that)."""


def parse_speculative_config(text: str, *, method: str | None = None) -> SpeculativeConfig:
    """Read a JSON object. ``method``: where the object names none. Raises ConfigError for bad JSON, unknown
    keys and wrong types."""
    try:
        value = json_text.parse(text)
    except json_text.JsonError as error:
        raise ConfigError(f"the speculative config is {error}") from error
    return _read_config(value, method)


def _read_parts(value: Any) -> tuple[SpeculativeConfig, ...] | None:
    return tuple(_read_config(part, None) for part in value) if isinstance(value, list) and value else None


def _read_config(value: Any, method: str | None) -> SpeculativeConfig:
    if not isinstance(value, dict):
        raise ConfigError(f"the speculative config is a JSON object, not {kind(value)}")
    value = translated(value)
    unknown = sorted(set(value) - set(_KEYS))
    if unknown:
        meant = misspelt(unknown[0], _KEYS)
        raise ConfigError(
            f"unknown key {unknown[0]!r} in the speculative config"
            + ("" if meant is None else f" (is {meant!r} meant?)")
            + f"; known are {', '.join(_KEYS)}"
        )
    settings = {}
    for key, entry in value.items():
        what, read = _KEYS[key]
        settings[key] = read(entry)
        if settings[key] is None:
            raise ConfigError(f"{key!r} in the speculative config is {what}, not {kind(entry)}")
    if settings.setdefault("method", method) is None:
        raise ConfigError("the speculative config names no 'method'")
    return SpeculativeConfig(**settings)
