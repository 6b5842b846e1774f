"""Drafts that are accepted far less than chance: said once, with the command that finds out why.

Most faults of a target and a draft (another basis, another target, a wrong vocabulary map) leave the text
right and cost acceptance alone, so that nothing else would ever show them.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable

from eaglejax.drafts.base import Bound
from eaglejax.drafts.registry import family_of
from eaglejax.models.target import Target
from eaglejax.speculate.books import Generation

LEAST_ROUNDS, DOUBT = 32, 0.02
"""Rounds below which nothing is said, and how probable so few right drafts may be by chance."""


@dataclasses.dataclass
class _Tally:
    """What a bound draft has done so far, over all calls. ``rounds`` proposed something, in ``accepted`` of
    them the first draft was right; ``tokens``: what the answers hold."""

    rounds: int = 0
    accepted: int = 0
    tokens: Counter[int] = dataclasses.field(default_factory=Counter)
    said: bool = False

    @property
    def expected(self) -> float:
        """First drafts that would be right if each were the most frequent token of the answers."""
        most = max(self.tokens.values(), default=0)
        return self.rounds * most / max(self.tokens.total(), 1)

    @property
    def far_below_chance(self) -> bool:
        """Whether less than half as many were right, and so few are improbable (by Poisson's law)."""
        if self.rounds < LEAST_ROUNDS or self.accepted >= self.expected / 2:
            return False
        term = tail = math.exp(-self.expected)
        for k in range(1, self.accepted + 1):
            term *= self.expected / k
            tail += term
        return tail < DOUBT


_tallies: weakref.WeakKeyDictionary[Bound, _Tally] = weakref.WeakKeyDictionary()


def watch(bound: object, target: Target, results: Iterable[Generation]) -> None:
    """Count ``results`` of a draft with files; warn, once, when its first drafts are right less than half as
    often as always guessing the answers' most frequent token would be."""
    if not isinstance(bound, Bound) or (family := family_of(bound.proposer)) is None:
        return
    tally = _tallies.setdefault(bound, _Tally())
    for result in results:
        tally.rounds += result.stats.num_drafts
        tally.accepted += result.stats.accepted_at[0] if result.stats.accepted_at else 0
        tally.tokens.update(result.token_ids)
    if tally.said or not tally.far_below_chance:
        return
    tally.said = True
    command = ["eaglejax", "diagnose", "--target", target.name, "--draft", bound.source or "DRAFT"]
    why = (
        f"`{shlex.join(command)}` finds out why (with --original-target, if the target may be another than "
        "the one that it was made for, or that one rotated)"
        if family.probe is not None
        else "it is no draft for this target"
    )
    warnings.warn(
        f"the draft {bound.source or ''} is accepted far less than chance: in {tally.rounds} rounds its "
        f"first guess was right {tally.accepted} times, and always guessing the answers' most frequent token "
        f"would have been about {tally.expected:.0f} times. The text is right all the same; {why}",
        stacklevel=3,
    )
