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

from eaglejax.checkpoint.files import only_writer
from eaglejax.drafts.base import Bound, Proposer
from eaglejax.errors import ConfigError, RequestError
from eaglejax.jsonl import parse_object, read_lines
from eaglejax.models.target import Target
from eaglejax.sampling import Sampling
from eaglejax.speculate.generate import Request, check_request
from eaglejax.train.decode import decode_requests
from eaglejax.train.features import fingerprint
from eaglejax.train.samples import prompt_digest, read_messages
from eaglejax.train.writing import end_line, split_lines

_BEGINNING = b'{"id": '
"""How the line of an answer begins."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One row: the conversation up to its first question, and the user turns that are asked one after the
    other, each on top of the target's own earlier answers."""

    id: str
    opening: tuple[Mapping[str, Any], ...]
    turns: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RegenerateOptions:
    """``temperature``, ``top_p``, ``top_k``: of the answers (0: greedy). ``max_new_tokens``: of one answer;
    ``max_prompt_tokens``: longer prompts are left out. ``turns``: most questions asked of one row.
    ``batch_size``: rows decoded together. ``seed``: another one gives other samples."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 400
    max_prompt_tokens: int = 1024
    turns: int = 1
    batch_size: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
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
    """Rows of a JSON Lines file: ``turns``, ``prompt``, ``messages`` or ``conversations`` (whose user turns
    are asked again; answers in them are not used). A bad row comes as the text of its error. Raises
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
    messages = row.get("messages", row.get("conversations"))
    opening: list[Mapping[str, Any]] = []
    if messages is not None:
        known = read_messages(messages)
        opening.extend([m for m in known if m["role"] == "system"][:1])
        turns = [m["content"] for m in known if m["role"] == "user"]
    else:
        turns = [row["prompt"]] if "prompt" in row else row.get("turns", [])
    turns = row.get("turns", turns)
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
        raise RequestError("a row needs turns, prompt, messages or conversations with at least one question")
    return Prompt(name, tuple(opening), tuple(turns))


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
            if (line := _line(row)) not in told:
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
    talks = [list(p.opening) for p in group]
    alive, first = list(range(len(group))), dict[int, str]()
    for turn in range(options.turns):
        asked: list[tuple[int, tuple[int, ...], str]] = []
        for n in alive:
            if turn >= len(group[n].turns):
                continue
            talks[n].append({"role": "user", "content": group[n].turns[turn]})
            try:
                ids = tuple(target.need_tokenizer().apply_chat_template(talks[n]))
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
                _append(file, _line(row))
                counts.written += 1
                advance(1, len(result.token_ids))
        alive = [n for n, _, key in asked if key in known and known[key]["finish_reason"] == "stop"]
        for n, _, key in asked:
            if n in alive:
                talks[n].append({"role": "assistant", "content": known[key]["text"]})


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


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False)


def _append(file: Any, line: str) -> None:
    file.write(line + "\n")
    file.flush()
