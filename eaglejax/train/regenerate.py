"""Answers of the target to a file of prompts: training text that a draft can learn to guess.

Every line of the output is one answer with its exact token ids. Its ``key`` is a hash of the prompt's ids and
of all settings that shape the answer; the row's seed comes from that key. So a run that was killed and
started again answers what is missing and writes what it would have written anyway, in whatever order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eaglejax import json_text
from eaglejax.checkpoint.files import only_writer
from eaglejax.conversation import (
    Conversation,
    Message,
    read_messages,
    read_row,
    row_variables,
    template_variables,
)
from eaglejax.drafts.base import Bound, Proposer
from eaglejax.errors import ConfigError, RequestError
from eaglejax.jsonl import parse_object, read_lines
from eaglejax.models.target import Target
from eaglejax.sampling import Sampling
from eaglejax.speculate.admission import check_request
from eaglejax.speculate.generate import Request
from eaglejax.train.decode import decode_requests
from eaglejax.train.features import fingerprint
from eaglejax.train.samples import answered, prompt_digest
from eaglejax.train.writing import end_line, split_lines

_BEGINNING = b'{"id": '
"""How the line of an answer begins."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One row: what is asked, one question after the other.

    ``asks``: per question the messages that come before its answer and behind the answer before.
    ``recorded``: the answer that the next question stands behind, None for the target's own. ``variables``:
    what the chat template reads beside the messages.
    """

    id: str
    asks: tuple[tuple[Message, ...], ...]
    recorded: tuple[Message | None, ...]
    variables: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RegenerateOptions:
    """``temperature``, ``top_p``, ``top_k``: of the answers (0: greedy). ``max_new_tokens``: of one answer;
    ``max_prompt_tokens``: longer prompts are left out. ``turns``: most questions asked of one row on top
    of the target's own answers.
    ``batch_size``: rows decoded together. ``seed``: another one gives other samples.
    ``chat_template_kwargs``: what the chat template reads where a row does not say. Raises ConfigError and
    RequestError."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 400
    max_prompt_tokens: int = 1024
    turns: int = 1
    batch_size: int = 8
    seed: int = 0
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        template_variables(self.chat_template_kwargs)
        for name in ("max_new_tokens", "max_prompt_tokens", "turns", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


@dataclasses.dataclass
class Counts:
    """Answers that were there before, written now, left out, and failed."""

    known: int = 0
    written: int = 0
    too_long: int = 0
    failed: int = 0


def read_prompt_rows(path: str | Path) -> Iterator[Prompt | str]:
    """Rows of a JSON Lines file: ``turns``, ``prompt``, ``messages`` or ``conversations``, perhaps with
    ``tools``, ``documents`` and ``chat_template_kwargs``.

    User turns are asked again, and answers in the row not used; in a conversation with tool calls every
    answer is asked for behind the conversation as it stands. A bad row comes as the text of its error. Raises
    ConfigError for a file that cannot be read or holds no row."""
    number = 0
    for number, line in read_lines(path):
        yield _row(line, f"{path}, line {number}", number)
    if not number:
        raise ConfigError(f"{path} holds no rows")


def _row(line: str, where: str, number: int) -> Prompt | str:
    try:
        return _prompt(parse_object(line), number)
    except RequestError as error:
        return f"{where}: {error}"


def _prompt(row: Mapping[str, Any], number: int) -> Prompt:
    name = str(row.get("id", number))
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"its id is no valid Unicode: {name!a}") from error
    field = next((f for f in ("messages", "conversations") if f in row), None)
    if field is not None and "turns" not in row:
        conversation = read_row(row, field)
        return _recorded(name, conversation) if conversation.asks_tools else _asked_again(name, conversation)
    turns = row.get("turns", [row["prompt"]] if "prompt" in row else [])
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
        raise RequestError("a row needs turns, prompt, messages or conversations with at least one question")
    messages = [] if field is None else [m for m in read_messages(row[field]) if m["role"] == "system"][:1]
    messages += [{"role": "user", "content": turn} for turn in turns]
    return _asked_again(name, Conversation(tuple(messages), row_variables(row)))


def _asked_again(name: str, conversation: Conversation) -> Prompt:
    """Every user turn is a question, behind the target's own answers; those in the row are not used."""
    asks: list[tuple[Message, ...]] = []
    before: list[Message] = []
    for message in conversation.messages:
        if message["role"] == "assistant":
            continue
        before.append(message)
        if message["role"] == "user":
            asks.append(tuple(before))
            before = []
    if not asks:
        raise RequestError("a row needs at least one question; this conversation has no user turn")
    return Prompt(name, tuple(asks), (None,) * len(asks), conversation.variables)


def _recorded(name: str, conversation: Conversation) -> Prompt:
    """A conversation with tools: what a tool answered belongs to the call on record, so every assistant turn
    is asked for behind the conversation as it stands, and one that waits for an answer at its end."""
    asks: list[tuple[Message, ...]] = []
    recorded: list[Message | None] = []
    before: list[Message] = []
    for message in answered(conversation).messages:
        if message["role"] == "assistant":
            asks.append(tuple(before))
            recorded.append(message)
            before = []
        else:
            before.append(message)
    if before:
        asks.append(tuple(before))
        recorded.append(None)
    return Prompt(name, tuple(asks), tuple(recorded), conversation.variables)


def regenerate(
    target: Target,
    rows: Iterator[Prompt | str],
    out: str | Path,
    options: RegenerateOptions,
    *,
    proposer: Proposer | Bound | None = None,
    limit: int | None = None,
    advance: Callable[[int, int], None] = lambda answers, tokens: None,
) -> Counts:
    """Answer ``rows`` (the first ``limit``) and append to ``out``; rows that fail go to
    ``error_file(out)``, each once.

    ``proposer`` only makes it faster. ``advance`` is told answers and tokens as they are written. Raises
    CheckpointError while another process writes to ``out``, and ConfigError, before anything is changed,
    when ``out`` holds something else than answers, or for a limit below 1.
    """
    out = Path(out)
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; it must be 1 or more")
    model, counts = fingerprint(target), Counts()
    errors = error_file(out)
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_writer(out))
        known, told = read_answers(out), set(split_lines(errors)[0])
        end_line(out)
        end_line(errors)
        file, bad = (stack.enter_context(p.open("a", encoding="utf-8")) for p in (out, errors))

        def fail(row: Mapping[str, Any]) -> None:
            counts.failed += 1
            # A run that goes on meets the rows again that failed before.
            if (line := json_text.dump(row)) not in told:
                told.add(line)
                _append(bad, line)

        group: list[Prompt] = []
        taken = 0
        for row in rows:
            if limit is not None and taken == limit:
                break
            taken += 1
            if isinstance(row, str):
                fail({"error": row})
                continue
            group.append(row)
            if len(group) == options.batch_size:
                _answer(target, group, options, model, known, counts, file, fail, proposer, advance)
                group = []
        if group:
            _answer(target, group, options, model, known, counts, file, fail, proposer, advance)
        if errors.stat().st_size == 0:
            errors.unlink()
    return counts


def error_file(out: str | Path) -> Path:
    """Where the rows that fail go, with the reason of each."""
    return Path(f"{out}.errors.jsonl")


def read_answers(path: Path) -> dict[str, dict[str, Any]]:
    """Answers already in a file, by key; what a kill left of a last line is no answer. Raises ConfigError for
    a file of something else."""
    found = {}
    lines, rest = split_lines(path)
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_object(line)
            found[row["key"]] = row
        except (RequestError, KeyError, TypeError) as error:
            raise ConfigError(_foreign(path, number)) from error
    if not lines and rest[: len(_BEGINNING)] != _BEGINNING[: len(rest)]:
        raise ConfigError(_foreign(path, 1))
    return found


def _foreign(path: Path, number: int) -> str:
    return f"{path}, line {number} is no answer of `regenerate`; name another file"


def _answer(
    target: Target,
    group: Sequence[Prompt],
    options: RegenerateOptions,
    model: str,
    known: dict[str, dict[str, Any]],
    counts: Counts,
    file: Any,
    fail: Callable[[Mapping[str, Any]], None],
    proposer: Proposer | Bound | None,
    advance: Callable[[int, int], None],
) -> None:
    """Answer one batch of rows, question by question."""
    talks = [Conversation((), {**options.chat_template_kwargs, **p.variables}) for p in group]
    alive, first = list(range(len(group))), dict[int, str]()
    # Questions behind a recorded conversation do not wait for each other's answers.
    asked_of = [len(p.asks) if any(p.recorded) else min(len(p.asks), options.turns) for p in group]
    for turn in range(max(asked_of)):
        asked: list[tuple[int, tuple[int, ...], str]] = []
        for n in alive:
            if turn >= asked_of[n]:
                continue
            talks[n] = talks[n].then(*group[n].asks[turn])
            try:
                ids = tuple(target.need_tokenizer().encode_conversation(talks[n]))
                if len(ids) > options.max_prompt_tokens:
                    counts.too_long += 1
                    continue
                check_request(_request(ids, options, ""), target.context, target.config.vocab_size)
            except RequestError as error:
                fail({"id": group[n].id, "turn": turn, "error": str(error)})
                continue
            first.setdefault(n, prompt_digest(ids))
            asked.append((n, ids, _key(ids, options, model)))
        # Rows that ask the same have one answer, in the same batch as in different ones.
        todo: dict[str, tuple[int, tuple[int, ...]]] = {}
        for n, ids, key in asked:
            if key not in known:
                todo.setdefault(key, (n, ids))
        counts.known += len(asked) - len(todo)
        if todo:
            requests = [_request(ids, options, key) for key, (_, ids) in todo.items()]
            results = decode_requests(target, requests, proposer, batch=options.batch_size)
            for (key, (n, ids)), result in zip(todo.items(), results, strict=True):
                if result.error is not None:
                    fail({"id": group[n].id, "turn": turn, "error": result.error})
                    continue
                known[key] = row = {
                    "id": group[n].id,
                    "turn": turn,
                    "key": key,
                    "conversation": first[n],
                    "model": model,
                    "temperature": options.temperature,
                    "finish_reason": result.finish_reason,
                    "prompt_ids": list(ids),
                    "completion_ids": result.token_ids,
                    "text": result.text,
                }
                _append(file, json_text.dump(row))
                counts.written += 1
                advance(1, len(result.token_ids))
        alive = []
        for n, _, key in asked:
            answer = group[n].recorded[turn]
            if answer is None and key in known and known[key]["finish_reason"] == "stop":
                answer = {"role": "assistant", "content": known[key]["text"]}
            if answer is not None:
                alive.append(n)
                talks[n] = talks[n].then(answer)


def _key(ids: Sequence[int], options: RegenerateOptions, model: str) -> str:
    settings = [options.temperature, options.top_p, options.top_k, options.max_new_tokens, options.seed]
    text = json.dumps([model, settings, list(ids)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _request(ids: tuple[int, ...], options: RegenerateOptions, key: str) -> Request:
    """The decode of one prompt; its seed comes from ``key`` alone."""
    sampling = Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=int(key[:8] or "0", 16) & 0x7FFFFFFF,
    )
    return Request(ids, sampling, options.max_new_tokens)


def _append(file: Any, line: str) -> None:
    file.write(line + "\n")
    file.flush()
