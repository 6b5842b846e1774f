"""What an engine counts."""

from __future__ import annotations

import dataclasses
from collections import Counter

from eaglejax.speculate.books import Generation


@dataclasses.dataclass
class Totals:
    """Sums over the requests that have ended, whatever their end. ``reasons``: how many by finish reason;
    ``accepted_at[i]``: rounds that accepted more than i drafts; ``preemptions`` of all requests."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = dataclasses.field(default_factory=list)
    reasons: Counter[str] = dataclasses.field(default_factory=Counter)
    preemptions: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0

    def add(self, result: Generation) -> None:
        """Count a request that has ended."""
        stats = result.stats
        self.prompt_tokens += result.prompt_tokens
        self.generated_tokens += len(result.token_ids)
        self.drafts += stats.num_drafts
        self.draft_tokens += stats.num_draft_tokens
        self.accepted_tokens += stats.num_accepted_tokens
        self.accepted_at += [0] * (len(stats.accepted_at) - len(self.accepted_at))
        for i, count in enumerate(stats.accepted_at):
            self.accepted_at[i] += count
        self.reasons[result.finish_reason] += 1
        self.seconds += stats.seconds
        self.first_seconds += stats.first_seconds
