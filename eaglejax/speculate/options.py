"""How a batch is decoded: the one object of options, and the sizes that follow from it."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, TypedDict

from eaglejax.devices import Attention
from eaglejax.drafts.base import Proposer
from eaglejax.drafts.limits import MOST_NODES, check_count
from eaglejax.errors import ConfigError
from eaglejax.kv_format import KVFormat, kv_format
from eaglejax.models.target import Target
from eaglejax.nn.cache import CacheScales
from eaglejax.speculate.adaptive import Adaptive
from eaglejax.speculate.verify import METHODS
from eaglejax.speculate.widths import Widest, WidthPolicy

ROUNDS_A_CHUNK = 16
LARGEST_PREFILL = 512
MOST_ROUNDS, MOST_PREFILL, MOST_WIDTHS = 4096, 1 << 16, 16
"""Limits of options: rounds whose records are kept at a time, prompt tokens a forward, and widths, each of
which is compiled."""

SPECULATIONS = ("adaptive", "fixed")
SPECULATION_VARIABLE = "EAGLEJAX_SPECULATION"
"""The environment variable that names the speculation of those who ask for none."""
ADAPTIVE_WIDTHS = (1, 4, 8, 16)
"""Widths that adaptive speculation chooses from, besides the whole draft."""


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
    """How a batch is decoded; nothing here changes the distribution of the text.

    ``verification``: "token", or "block" for chains (see ``verify``). ``logprobs``: return log-probabilities.
    ``ignore_eos``: go on to the token limit. ``rounds_a_chunk``: rounds between looks at the host (stop
    strings, streaming). ``prefill_width``: most prompt tokens a forward, rounded up to a power of two.
    ``cache_dtype``: format of the target's keys and values, by name or dtype, see ``KVFormat`` (None: what
    the target's files ask for, else its dtype); ``cache_scales``: for int8-static, other scales than the
    target's own. ``speculation``: "adaptive" takes each round the width with most expected tokens a second by
    measured costs, 1 among them (see ``adaptive``; out of ``widths``, where given); "fixed" judges all that
    is drafted, or what ``widths`` and ``policy`` say (see ``Program``). None: as EAGLEJAX_SPECULATION says,
    else "fixed" where a policy is given and "adaptive" where not. ``attention``: how attention is
    computed (None: as the device's adapter chooses). A narrow cache gives the target another distribution,
    which drafts leave alone as they do any distribution. Raises ConfigError.
    """

    verification: str = "token"
    logprobs: bool = False
    ignore_eos: bool = False
    rounds_a_chunk: int = ROUNDS_A_CHUNK
    prefill_width: int = LARGEST_PREFILL
    cache_dtype: Any = None
    cache_scales: CacheScales | None = None
    attention: Attention | None = None
    speculation: str | None = None
    widths: tuple[int, ...] = ()
    policy: WidthPolicy = dataclasses.field(default_factory=Widest)

    def __post_init__(self) -> None:
        if self.verification not in METHODS:
            raise ConfigError(f"verification is {self.verification!r}; it is 'token' or 'block'")
        if self.speculation not in (None, *SPECULATIONS):
            raise ConfigError(f"speculation is {self.speculation!r}; it is 'adaptive' or 'fixed'")
        if self.speculation == "adaptive" and self.policy != Widest():
            raise ConfigError("adaptive speculation has a policy of its own; give a policy with 'fixed'")
        check_count("rounds_a_chunk", self.rounds_a_chunk, MOST_ROUNDS)
        check_count("prefill_width", self.prefill_width, MOST_PREFILL)
        if not isinstance(self.widths, tuple) or len(self.widths) > MOST_WIDTHS:
            raise ConfigError(f"widths are {self.widths!r:.80}; give a tuple of at most {MOST_WIDTHS}")
        if not all(type(w) is int and 1 <= w <= MOST_NODES for w in self.widths):
            raise ConfigError(
                f"widths are {self.widths!r:.80}; they count nodes, the root among them: 1 to {MOST_NODES}"
            )
        if self.cache_dtype is not None:
            object.__setattr__(self, "cache_dtype", kv_format(self.cache_dtype))

    @property
    def adaptive(self) -> bool:
        """Whether widths follow measured costs. Raises ConfigError for a value of EAGLEJAX_SPECULATION that
        means nothing."""
        if self.speculation is not None or self.policy != Widest():
            return self.speculation == "adaptive"
        named = os.environ.get(SPECULATION_VARIABLE) or SPECULATIONS[0]
        if named not in SPECULATIONS:
            raise ConfigError(f"{SPECULATION_VARIABLE} is {named!r}; it is 'adaptive' or 'fixed'")
        return named == "adaptive"

    def choices(self, proposer: Proposer, *, sampled: bool) -> tuple[tuple[int, ...], WidthPolicy]:
        """Widths and policy for drafts of ``proposer``; ``sampled``: whether some row is.

        What adaptive speculation does follows the whole batch and the clock. A text whose drafts are drawn
        would follow them too, so those are all judged.
        """
        if not self.adaptive:
            return self.widths, self.policy
        if proposer.nodes == 1:
            return (), Widest()
        if sampled and proposer.draws:
            return tuple(sorted(self.widths)[-1:]), Widest()
        return self.widths or (*ADAPTIVE_WIDTHS, proposer.nodes), Adaptive()


class DecodeChanges(TypedDict, total=False):
    """Fields of :class:`DecodeOptions` as keywords of a call, which replace those of the options given."""

    verification: str
    logprobs: bool
    ignore_eos: bool
    rounds_a_chunk: int
    prefill_width: int
    cache_dtype: Any
    cache_scales: CacheScales | None
    attention: Attention | None
    speculation: str | None
    widths: tuple[int, ...]
    policy: WidthPolicy


def cache_form(target: Target, options: DecodeOptions | None = None) -> tuple[KVFormat, CacheScales | None]:
    """Format and calibrated scales of the target's cache: what is asked for, else what the target's files ask
    for, else its dtype; int8-static takes the target's scales where none are given."""
    options = options or DecodeOptions()
    form = kv_format(options.cache_dtype or target.cache_format or target.dtype)
    if options.cache_scales is None and form.static:
        return form, target.cache_scales
    return form, options.cache_scales


def power_of_two(n: int, least: int) -> int:
    """The smallest power of two that is at least ``n`` and ``least``."""
    return 1 << max(n - 1, least - 1).bit_length()


def capacity_for(*forwards: tuple[int, int]) -> int:
    """Cache slots a row for forwards of which each writes so many tokens behind so many committed ones:
    (committed, written) at the most, over all rows.

    A forward writes all that it is given to every row, padding too, also to one that is done. So a prompt
    read by chunks of ``c`` beside rows that hold up to ``reach`` tokens needs ``(reach, c)``.
    """
    return power_of_two(max(map(sum, forwards)), 32)
