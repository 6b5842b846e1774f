"""The books of a row: its tokens and text, its rounds, and the Generation that they come to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from eaglejax.drafts.base import Request
from eaglejax.sampling import Sampling
from eaglejax.speculate import metrics, rounds
from eaglejax.speculate.pace import Pace
from eaglejax.speculate.stops import TextStream


@dataclasses.dataclass
class Generation:
    """What came of a request.

    ``token_ids`` include the end-of-text id that stopped it; ``text`` holds neither it nor any other control
    token. ``finish_reason``: "stop" (end of text, a stop string or one of ``stop_token_ids``), "length"
    (max_new_tokens or the context limit), "cancelled" (by whoever asked for it), "error" (see ``error``).
    ``logprobs``: one per token under the
    target's untransformed distribution, or None when not asked for. ``prompt_tokens``: length of the prompt.
    ``top_logprobs``: for each token the likeliest in its place, (id, log-probability), likeliest first, where
    an engine was asked for them.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[float] | None
    stats: metrics.Stats
    prompt_tokens: int
    error: str | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """Newly settled text and tokens of a row while it streams.

    The texts of a row's pieces joined are its Generation's text. Their ``token_ids`` joined begin with the
    Generation's and may go on: tokens are handed out before it is known that a stop string begins in them.
    """

    row: int
    text: str
    token_ids: tuple[int, ...]


class Row:
    """Books of one row."""

    def __init__(
        self, request: Request, tokenizer: Any, eos: frozenset[int], logprobs: bool, top: int = 0
    ) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.logprobs: list[float] | None = [] if logprobs else None
        self.most_likely = top
        self.likeliest: list[list[tuple[int, float]]] = []
        self.rounds: list[metrics.Round] = []
        self.first_tokens = 0
        self.first_seconds = 0.0
        self.seconds = 0.0
        self.stopped = False
        self.error: str | None = None
        self.cancelled = False
        self.ends = frozenset(request.stop_token_ids)
        hidden = eos | self.ends
        self.text = TextStream(tokenizer, request.stop, hidden) if tokenizer is not None else None
        self.shown = 0
        self.shown_tokens = 0
        self.learned = 0

    def take(self, tokens: Sequence[int], logprobs: Sequence[float] | None) -> int:
        """Add tokens up to a stop string or a token that ends the row; how many were taken."""
        for n, token in enumerate(tokens):
            self.tokens.append(int(token))
            if self.logprobs is not None and logprobs is not None:
                self.logprobs.append(float(logprobs[n]))
            found = self.text is not None and self.text.push(int(token))
            if found or int(token) in self.ends:
                self.stopped = True
                return n + 1
        return len(tokens)

    def piece(self, index: int, final: bool) -> Piece | None:
        """What can be shown since the last call."""
        if self.text is None:
            text = ""
        else:
            whole = self.text.text if final else self.text.safe_text
            text, self.shown = whole[self.shown :], max(self.shown, len(whole))
        tokens = tuple(self.tokens[self.shown_tokens :])
        self.shown_tokens = len(self.tokens)
        return Piece(index, text, tokens) if text or tokens else None

    @property
    def kept(self) -> int:
        """How many of its tokens are the answer's: a stop string's are not."""
        return self.text.kept_tokens() if self.stopped and self.text else len(self.tokens)

    def news(self) -> list[int]:
        """The answer's tokens since the last call."""
        begin, self.learned = self.learned, max(self.kept, self.learned)
        return self.tokens[begin : self.learned]

    def result(self, eos: frozenset[int], depth: int) -> Generation:
        """The row's Generation; a stop string's tokens leave ids, log-probabilities and statistics."""
        keep = self.kept
        judged, left = [], keep - min(self.first_tokens, keep)
        for r in self.rounds:
            count = min(r.count, left)
            left -= count
            judged.append(dataclasses.replace(r, count=count, accepted=min(r.accepted, count)))
        tokens = self.tokens[:keep]
        if self.error:
            reason = "error"
        elif self.cancelled:
            reason = "cancelled"
        elif self.stopped or (tokens and tokens[-1] in eos):
            reason = "stop"
        else:
            reason = "length"
        return Generation(
            text=self.text.text if self.text else "",
            token_ids=tokens,
            finish_reason=reason,
            logprobs=None if self.logprobs is None else self.logprobs[:keep],
            top_logprobs=self.likeliest[:keep] if self.most_likely else None,
            stats=metrics.from_rounds(
                judged,
                depth=depth,
                first_tokens=min(self.first_tokens, keep),
                seconds=self.seconds,
                first_seconds=self.first_seconds,
            ),
            prompt_tokens=len(self.request.prompt),
            error=self.error,
        )


def no_distribution(tokens: int, settings: Sampling) -> str:
    """Why a row ends after ``tokens`` tokens without a distribution for the next."""
    text = (
        f"the target's logits became NaN or infinite after {tokens} tokens; its weights or dtype overflow "
        "(float16 is prone to it: try bfloat16 or float32)"
    )
    if settings.logit_bias or settings.penalised:
        text += ", or logit_bias and penalties leave no token: try without them"
    return text


def book_row(row: Row, record: rounds.Record, now: float, pace: Pace | None, *, first: bool) -> None:
    """Add one row's ``record`` to its books, with what the costs of its ``pace`` say of it."""
    count = int(record.count)
    logprobs = None if record.logprobs is None else np.asarray(record.logprobs)[:count].tolist()
    taken = row.take(np.asarray(record.tokens)[:count].tolist(), logprobs)
    if row.most_likely:
        assert record.likeliest is not None
        ids, values = (np.asarray(x)[:taken, : row.most_likely].tolist() for x in record.likeliest)
        row.likeliest += [list(zip(*place, strict=True)) for place in zip(ids, values, strict=True)]
    row.seconds = now
    if first:
        row.first_tokens, row.first_seconds = taken, now
        return
    said, plain = (0.0, 0.0) if pace is None else pace.said(record)
    row.rounds.append(
        metrics.Round(
            count=taken,
            accepted=min(int(record.accepted), taken),
            drafted=int(record.drafted),
            reach=int(record.reach),
            width=int(record.width),
            rested=bool(record.rested),
            said=said,
            said_plain=plain,
        )
    )
