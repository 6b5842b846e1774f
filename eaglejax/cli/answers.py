"""Answers to the rows of a prompt file, turn after turn, and the JSON objects that tell of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import eaglejax as ej
from eaglejax.config import BadRow, PromptRow


def answer_rows(
    target: ej.Target,
    rows: Sequence[PromptRow],
    *,
    chat: bool,
    predicts: bool,
    sampling: ej.Sampling | Sequence[ej.Sampling] | None = None,
    stop_token_ids: Sequence[int] = (),
    **options: Any,
) -> list[list[ej.Generation]]:
    """The Generations of each row, one a turn, all rows decoded together; a failed turn is the row's last.

    Each turn sees the row's own earlier answers. ``predicts``: hand the rows' predictions to the proposer.
    ``sampling``: one for all rows (None: greedy), or one each. ``stop_token_ids``: of all rows, beside their
    own.
    ``options`` are those of ``generate``.
    """
    from eaglejax.api import failed

    answers: list[list[ej.Generation]] = [[] for _ in rows]
    for turn in range(max((row.count for row in rows), default=0)):
        asked = [n for n, row in enumerate(rows) if turn < row.count and not any(a.error for a in answers[n])]
        prompts = {}
        for n in asked:
            try:
                prompts[n] = rows[n].request([a.text for a in answers[n]], chat=chat)
            except ej.EaglejaxError as error:
                answers[n].append(failed(str(error)))
        if not prompts:
            continue
        results = ej.generate(
            target,
            list(prompts.values()),
            predictions=[rows[n].predictions[turn] for n in prompts] if predicts else None,
            sampling=[sampling[n] for n in prompts] if isinstance(sampling, Sequence) else sampling,
            stop_token_ids=[(*stop_token_ids, *rows[n].stop_token_ids) for n in prompts],
            on_error="return",
            **options,
        )
        for n, result in zip(prompts, results, strict=True):
            answers[n].append(result)
    return answers


def in_groups(rows: Sequence[PromptRow | BadRow], size: int) -> Iterator[list[PromptRow | BadRow]]:
    """Runs of rows that hold up to ``size`` good ones each, in order."""
    group: list[PromptRow | BadRow] = []
    for row in rows:
        group.append(row)
        if sum(isinstance(r, PromptRow) for r in group) == size:
            yield group
            group = []
    if group:
        yield group


def answer_json(name: str | int, answers: Sequence[ej.Generation]) -> dict[str, Any]:
    """The object of one row: its last answer, statistics summed over its turns, each turn where there are
    several.

    A row that failed has ``error``, and the turns that did not fail.
    """
    from eaglejax.speculate import metrics

    good = [a for a in answers if not a.error]
    errors = [a.error for a in answers if a.error]
    value: dict[str, Any] = {"id": name}
    if errors:
        value["error"] = errors[0]
    else:
        value |= _fields(answers[-1])
        value["stats"] = metrics.total(a.stats for a in good).to_json()
    if len(answers) > 1:
        value["turns"] = [{**_fields(a), "stats": a.stats.to_json()} for a in good]
    return value


def bad_row_json(row: BadRow) -> dict[str, Any]:
    """The object of a row that could not be read."""
    return {"id": row.id, "error": row.error}


def _fields(answer: ej.Generation) -> dict[str, Any]:
    fields = {"text": answer.text, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
    return fields if answer.logprobs is None else {**fields, "logprobs": answer.logprobs}
