"""Acceptance and speed, defined once.

A row's history is a list of rounds; each judged ``width`` nodes and emitted ``count`` tokens, of which
``accepted`` were drafts, out of ``drafted`` real ones that reached depth ``reach``; or it ``rested``, and no
draft was made. Where costs were measured, ``said`` and ``said_plain`` are the seconds that the table gives it
and a round of plain decoding. Counts are trimmed
exactly as the text is (end of text, stop strings, limits). The prompt's forward, which yields the first
token, counts on neither side of any ratio.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Round:
    """One target forward of one row, after trimming."""

    count: int
    accepted: int
    drafted: int
    reach: int
    width: int = 1
    rested: bool = False
    said: float = 0.0
    said_plain: float = 0.0


@dataclasses.dataclass(frozen=True)
class Stats:
    """Sums over rounds; every rate is derived from them.

    ``target_forwards``: rounds that emitted something. ``num_drafts``: rounds that proposed something.
    ``num_draft_tokens``: proposed nodes (root excluded). ``num_accepted_tokens``: drafts that became text.
    ``round_tokens``: tokens emitted by rounds. ``num_tokens``: all emitted tokens, the prefill's first
    included. ``accepted_at[i]``: rounds that accepted at least i + 1 drafts; ``reached_at[i]``: rounds that
    accepted i drafts, had proposed a deeper node and did not end before it was judged. ``seconds``: wall time
    from start of the prompt's forward to the last token; ``first_seconds``: to the first token. ``rows``:
    rows that emitted anything. ``widths``: (width, rounds that judged so many nodes), ascending. ``rests``:
    rounds that made no draft though they might have. ``said_seconds``, ``said_plain_seconds``: what the
    measured costs give these rounds, and plain decoding of the same tokens; 0 where nothing was measured.
    """

    num_tokens: int = 0
    round_tokens: int = 0
    target_forwards: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: tuple[int, ...] = ()
    reached_at: tuple[int, ...] = ()
    seconds: float = 0.0
    first_seconds: float = 0.0
    rows: int = 0
    widths: tuple[tuple[int, int], ...] = ()
    rests: int = 0
    said_seconds: float = 0.0
    said_plain_seconds: float = 0.0

    @property
    def predicted_speedup(self) -> float | None:
        """Over plain decoding, by the measured costs of these rounds and not by their own time; None where
        widths were not chosen by costs."""
        return self.said_plain_seconds / self.said_seconds if self.said_seconds > 0 else None

    @property
    def mean_acceptance_length(self) -> float:
        """tau = tokens emitted by rounds / target forwards, bonus included; 1 for autoregressive decoding."""
        return self.round_tokens / self.target_forwards if self.target_forwards else 1.0

    @property
    def per_position_acceptance_rate(self) -> list[float]:
        """Unconditional: rounds that accepted at position i / target forwards. Sums to tau - 1 but for bonus
        tokens that a limit cut off."""
        if not self.target_forwards:
            return []
        return [n / self.target_forwards for n in self.accepted_at]

    @property
    def n_alpha(self) -> list[float]:
        """Acceptance at each position given that all before were accepted (EAGLE papers' n-alpha)."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted_at, self.reached_at, strict=True)]

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted drafts / proposed nodes."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """All emitted tokens over wall time, the prompt's forward included."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def ttft_ms(self) -> float:
        """Mean time to first token, milliseconds."""
        return 1e3 * self.first_seconds / self.rows if self.rows else 0.0

    @property
    def tpot_ms(self) -> float:
        """Mean time per output token after the first, milliseconds."""
        later = self.num_tokens - self.rows
        return 1e3 * (self.seconds - self.first_seconds) / later if later > 0 else 0.0

    @property
    def vllm(self) -> dict[str, Any] | None:
        """The same counts under the names of vLLM's metrics, and what its log line derives from them: per
        round with a draft, where tau and the acceptance above are per target forward. None where nothing was
        drafted."""
        if not self.num_drafts:
            return None
        return {
            "vllm:spec_decode_num_drafts": self.num_drafts,
            "vllm:spec_decode_num_draft_tokens": self.num_draft_tokens,
            "vllm:spec_decode_num_accepted_tokens": self.num_accepted_tokens,
            "vllm:spec_decode_num_accepted_tokens_per_pos": list(self.accepted_at),
            "mean_acceptance_length": 1 + self.num_accepted_tokens / self.num_drafts,
            "accepted_throughput": self.num_accepted_tokens / self.seconds if self.seconds > 0 else 0.0,
            "drafted_throughput": self.num_draft_tokens / self.seconds if self.seconds > 0 else 0.0,
            "per_position_acceptance_rate": [n / self.num_drafts for n in self.accepted_at],
            "draft_acceptance_rate": self.draft_acceptance_rate,
        }

    def to_json(self) -> dict[str, Any]:
        """The fields that every command prints."""
        return {
            "num_tokens": self.num_tokens,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
            "per_position_acceptance_rate": self.per_position_acceptance_rate,
            "n_alpha": self.n_alpha,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "tokens_per_second": self.tokens_per_second,
            "target_forwards": self.target_forwards,
            "widths": {str(width): count for width, count in self.widths},
            "rests": self.rests,
            "predicted_speedup": self.predicted_speedup,
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "vllm": self.vllm,
        }


def from_rounds(
    rounds: Sequence[Round], *, depth: int, first_tokens: int, seconds: float, first_seconds: float
) -> Stats:
    """Statistics of one row. ``depth``: D. ``first_tokens``: 1 if the prefill's token was kept."""
    live = [r for r in rounds if r.count > 0]
    return Stats(
        num_tokens=first_tokens + sum(r.count for r in live),
        round_tokens=sum(r.count for r in live),
        target_forwards=len(live),
        num_drafts=sum(r.drafted > 0 for r in live),
        num_draft_tokens=sum(r.drafted for r in live),
        num_accepted_tokens=sum(r.accepted for r in live),
        accepted_at=tuple(sum(r.accepted > i for r in live) for i in range(depth)),
        reached_at=tuple(
            sum(r.accepted >= i and min(r.reach, r.count) > i for r in live) for i in range(depth)
        ),
        seconds=seconds,
        first_seconds=first_seconds if first_tokens else 0.0,
        rows=min(first_tokens, 1),
        widths=_histogram((r.width, 1) for r in live),
        rests=sum(r.rested for r in live),
        said_seconds=sum(r.said for r in live),
        said_plain_seconds=sum(r.said_plain * r.count for r in live),
    )


def _histogram(counts: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sums by key, ascending."""
    sums: dict[int, int] = {}
    for key, count in counts:
        sums[key] = sums.get(key, 0) + count
    return tuple(sorted(sums.items()))


def total(stats: Iterable[Stats]) -> Stats:
    """Sum over rows that ran one after the other (times add up)."""
    items = list(stats)
    depth = max((len(s.accepted_at) for s in items), default=0)

    def column(name: str) -> tuple[int, ...]:
        return tuple(
            sum(getattr(s, name)[i] for s in items if i < len(getattr(s, name))) for i in range(depth)
        )

    listed = ("accepted_at", "reached_at", "widths")
    plain = [f.name for f in dataclasses.fields(Stats) if f.name not in listed]
    sums = {name: sum(getattr(s, name) for s in items) for name in plain}
    return Stats(
        **sums,
        accepted_at=column("accepted_at"),
        reached_at=column("reached_at"),
        widths=_histogram(pair for s in items for pair in s.widths),
    )
