"""Training texts as token ids with a mark on every token that the target wrote.

A row of a JSON Lines file is one of: pretokenised (``prompt_ids`` and ``completion_ids``, as ``eaglejax
regenerate`` writes, or ``input_ids`` and ``loss_mask``); a conversation (``messages`` or ``conversations``
with the ``tools``, ``documents`` and ``chat_template_kwargs`` beside it; see ``eaglejax.conversation``). Ids
are best: they are exactly what the target produced.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eaglejax.checkpoint.tokenizer import Tokenizer
from eaglejax.conversation import Conversation, read_row
from eaglejax.errors import ConfigError, RequestError
from eaglejax.jsonl import parse_object, read_lines
from eaglejax.train.render import NotServed, render_conversation

NOT_SERVED = "an answer stands behind another context than serving sends"
"""Why rows are left out whose template renders an answered conversation and a prompt differently."""


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """``ids`` [T] int32, ``supervised`` [T] bool; ``name`` says where it came from, for messages.
    ``conversation``: ``prompt_digest`` of the first turn, where the sample is a later turn of a conversation
    that has several samples."""

    ids: np.ndarray
    supervised: np.ndarray
    name: str
    conversation: str | None = None

    @property
    def key(self) -> str:
        """Content hash: SHA-256 over ids and marks, 32 hexadecimal digits."""
        digest = hashlib.sha256(self.ids.astype("<i4").tobytes())
        digest.update(np.packbits(self.supervised).tobytes())
        return digest.hexdigest()[:32]

    @property
    def prompt(self) -> np.ndarray:
        """Ids before the first supervised token."""
        return self.ids[: int(np.argmax(self.supervised))]

    @property
    def group(self) -> str:
        """Digest of the prompt that the sample's conversation began with."""
        return self.conversation or prompt_digest(self.question)

    @property
    def question(self) -> np.ndarray:
        """By which ids two samples count as the same prompt: ``prompt``, or all where everything is
        supervised, since texts without a prompt have nothing in common."""
        return self.ids if self.supervised[0] else self.prompt

    def __len__(self) -> int:
        return len(self.ids)


def prompt_digest(ids: Any) -> str:
    """SHA-256 over the token ids of a prompt, 32 hexadecimal digits."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()[:32]


@dataclasses.dataclass
class Report:
    """What happened to the rows: how many were read, and how many were left out for which reason, with the
    first row named. ``notes``: what else is worth telling."""

    rows: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    first: dict[str, str] = dataclasses.field(default_factory=dict)

    def drop(self, reason: str, where: str, count: int = 1) -> None:
        """Count rows that are left out."""
        self.dropped[reason] += count
        self.first.setdefault(reason, where)

    def lines(self) -> list[str]:
        """One sentence a reason, and the notes."""
        left_out = [
            f"{n} left out: {why} (first: {self.first[why]})" for why, n in self.dropped.most_common()
        ]
        return [*left_out, *self.notes]


def make_sample(ids: Sequence[int], supervised: Sequence[bool], name: str, vocab_size: int) -> Sample:
    """Check and freeze one sample. Raises RequestError that names it."""
    marks = np.asarray(supervised, bool)
    try:
        array = np.asarray(ids, np.int64)
    except OverflowError as error:
        raise RequestError(f"{name}: ids must lie in 0..{vocab_size - 1}") from error
    if array.ndim != 1 or array.shape != marks.shape:
        raise RequestError(f"{name}: {array.shape} ids and {marks.shape} marks; they must be equally many")
    if array.size == 0 or array.min() < 0 or array.max() >= vocab_size:
        raise RequestError(f"{name}: ids must lie in 0..{vocab_size - 1} and there must be some")
    if not marks.any():
        raise RequestError(f"{name}: nothing is supervised; the row holds no answer")
    return Sample(array.astype(np.int32), marks, name)


def read_samples(
    path: str | Path, tokenizer: Tokenizer, *, vocab_size: int, limit: int | None = None
) -> tuple[list[Sample], Report]:
    """Samples of a JSON Lines file, at most those of its first ``limit`` rows.

    A row that cannot be used is left out and counted in the report. Raises ConfigError when the file cannot
    be read, and RequestError, naming the first bad row, when not one row can be used: then the format is
    wrong, not the row.
    """
    report, samples = Report(), []
    first_error: RequestError | None = None
    for number, line in read_lines(path):
        name = f"{path}, line {number}"
        if limit is not None and report.rows == limit:
            break
        report.rows += 1
        try:
            found = samples_of_row(_named_object(line, name), tokenizer, name=name, vocab_size=vocab_size)
        except RequestError as error:
            first_error = first_error or error
            served = not isinstance(error, NotServed)
            report.drop("the row cannot be used" if served else NOT_SERVED, str(error))
            continue
        samples.extend(found)
    if not samples:
        raise first_error or ConfigError(f"{path} holds no rows")
    return samples, report


def samples_of_row(
    row: Mapping[str, Any], tokenizer: Tokenizer, *, name: str, vocab_size: int
) -> list[Sample]:
    """The samples of one row: one, or one an assistant turn where the template rewrites history."""
    if "id" in row:
        name = f"{name} ({row['id']})"
    if "prompt_ids" in row and "completion_ids" in row:
        prompt, answer = _ids(row, "prompt_ids", name), _ids(row, "completion_ids", name)
        marks = [False] * len(prompt) + [True] * len(answer)
        first = row.get("conversation")
        if first is not None and not re.fullmatch("[0-9a-f]{32}", str(first)):
            raise RequestError(f"{name}: conversation is a prompt's digest, 32 hexadecimal digits")
        sample = make_sample([*prompt, *answer], marks, name, vocab_size)
        return [dataclasses.replace(sample, conversation=first)]
    if "input_ids" in row and "loss_mask" in row:
        given = _ids(row, "loss_mask", name)
        if not {0, 1}.issuperset(given):
            raise RequestError(f"{name}: loss_mask holds 1 for tokens of an answer and 0 for the rest alone")
        return [make_sample(_ids(row, "input_ids", name), [m == 1 for m in given], name, vocab_size)]
    for field in ("messages", "conversations"):
        if field in row:
            try:
                rendered = render_conversation(tokenizer, answered(read_row(row, field)))
            except RequestError as error:
                raise type(error)(f"{name}: {error}") from error
            first, *later = [make_sample(r.ids, r.supervised, name, vocab_size) for r in rendered]
            return [first, *(dataclasses.replace(s, conversation=first.group) for s in later)]
    raise RequestError(
        f"{name}: a training row has prompt_ids and completion_ids, input_ids and loss_mask, messages or "
        f"conversations; this one has {', '.join(sorted(row)) or 'nothing'}"
    )


def answered(conversation: Conversation) -> Conversation:
    """The conversation without assistant turns before its first user turn, which answer nothing."""
    messages = conversation.messages
    first = next((n for n, m in enumerate(messages) if m["role"] == "user"), len(messages))
    kept = [m for n, m in enumerate(messages) if n > first or m["role"] != "assistant"]
    return dataclasses.replace(conversation, messages=tuple(kept))


def preview(sample: Sample, tokenizer: Tokenizer, width: int = 4000) -> Any:
    """The sample as coloured rich text of at most ``width`` characters: supervised tokens bold green, the
    rest dim. Of a run of more than a quarter of that its two ends are shown, so that a long prompt does not
    hide the answer."""
    import rich.text

    text, most = rich.text.Text(), width // 4
    edges = np.flatnonzero(np.diff(sample.supervised.astype(np.int8))) + 1
    for run in np.split(np.arange(len(sample)), edges):
        piece = tokenizer.decode(sample.ids[run].tolist())
        if len(piece) > most:
            piece = f"{piece[: most // 2]} ... {piece[len(piece) - most // 2 :]}"
        text.append(piece, style="bold green" if sample.supervised[run[0]] else "dim")
    text.truncate(width)
    return text


def _ids(row: Mapping[str, Any], field: str, name: str) -> list[int]:
    value = row[field]
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise RequestError(f"{name}: {field} is a list of integers")
    return value


def _named_object(line: str, name: str) -> dict[str, Any]:
    try:
        return parse_object(line)
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from error
