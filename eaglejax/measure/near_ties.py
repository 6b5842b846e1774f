"""Is a speculative run's text the autoregressive one, and if not, is a near tie the reason?

A verification multiplies several rows where autoregressive decoding multiplies one, so sums are rounded in
another order and two almost equal logits may change places. Such a flip is told from an error by its size:
the answer is run through the target once more, as one plain causal forward, and at every token that is not
the forward's first choice the gap between the two logits is taken. A gap within the tolerance is a near tie,
a larger one a failure. Where the answer leaves the autoregressive one for the first time the gap is between
those two tokens; after that the texts differ, and each token is held against the first choice given its own
prefix.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.interop.parity.compare import TIE as TOLERANCE
from eaglejax.models import decoder
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target
from eaglejax.nn.cache import Cache
from eaglejax.nn.visible import Causal
from eaglejax.speculate.generate import cache_form, power_of_two

CODE_TOLERANCE = {8: (0.05, 0.5), 4: (0.5, 4.0), 3: (2.0, 5.0)}
"""Widest near tie by the bits of a narrow cache, in float32 and in 16 bits: numbers that differ by rounding
may get different codes, whose steps are far larger. About twice what was seen (docs/quantization.md)."""

WIDTH = 64
"""Tokens a forward, so that the logits of a large vocabulary stay small."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Answers held against the autoregressive ones.

    ``answers``: how many were compared; ``differing``: how many have other tokens. ``gaps``: one a flip, in
    logits.
    """

    tolerance: float
    answers: int = 0
    differing: int = 0
    gaps: tuple[float, ...] = ()

    @property
    def identical(self) -> bool:
        """Every token is the autoregressive one, near ties apart."""
        return all(gap <= self.tolerance for gap in self.gaps)

    def to_json(self) -> dict[str, Any]:
        """The fields that bench and demo print for a method."""
        return {
            "identical_to_ar": self.identical,
            "compared": self.answers,
            "differing": self.differing,
            "flips": len(self.gaps),
            "largest_flip_gap": max(self.gaps, default=0.0),
            "tie_tolerance": self.tolerance,
        }


def tolerance(target: Target) -> float:
    """The widest near tie of ``target``, by its dtype and its cache."""
    form = cache_form(target)[0]
    own = TOLERANCE[target.dtype.name]
    return own if form.plain else CODE_TOLERANCE[form.bits][target.dtype.itemsize == 2]


def compare(
    so_far: Comparison, target: Target, prompt: Sequence[int], plain: Sequence[int], drafted: Sequence[int]
) -> Comparison:
    """``so_far`` and one more greedy answer: ``drafted`` token ids to ``prompt``, where AR gave ``plain``."""
    so_far = dataclasses.replace(so_far, answers=so_far.answers + 1)
    if list(plain) == list(drafted):
        return so_far
    gaps = flip_gaps(target, prompt, plain, drafted)
    return dataclasses.replace(so_far, differing=so_far.differing + 1, gaps=(*so_far.gaps, *gaps))


def flip_gaps(
    target: Target, prompt: Sequence[int], plain: Sequence[int], drafted: Sequence[int]
) -> list[float]:
    """The gap of each flip of ``drafted``, which differs from ``plain``; infinite where one ends early."""
    common = min(len(plain), len(drafted))
    first = next((i for i in range(common) if plain[i] != drafted[i]), None)
    if first is None:
        # Equal as far as both go: stopping is a function of the tokens, so no tie explains another length.
        return [float("inf")]
    best, own, rival = score(target, prompt, drafted, plain[first])
    return gaps_from(best, own, float(rival[first]), first)


def gaps_from(best: np.ndarray, own: np.ndarray, rival: float, first: int) -> list[float]:
    """Gaps from the logits of one forward over the drafted answer.

    ``best``, ``own`` [T]: the largest logit and that of the answer's token at each place; ``rival``: that of
    AR's token at ``first``, the first difference. What is not a number counts as infinite.
    """
    later = best[first + 1 :] - own[first + 1 :]
    gaps = [abs(rival - float(own[first])), *(float(gap) for gap in later if gap != 0)]
    return [gap if np.isfinite(gap) else float("inf") for gap in gaps]


def score(
    target: Target, prompt: Sequence[int], answer: Sequence[int], rival: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Largest logit, the answer's and ``rival``'s at each place of ``answer``, [T] f32 each."""
    tokens = [*prompt, *answer]
    ask = tokens[1:]
    capacity = power_of_two(len(ask) + WIDTH, WIDTH)
    cache = decoder.init_cache(target.config, 1, capacity, *cache_form(target))
    columns: list[Any] = []
    for begin in range(0, len(ask), WIDTH):
        count = min(WIDTH, len(ask) - begin)
        part = np.zeros((2, WIDTH), np.int32)
        part[0, :count], part[1, :count] = tokens[begin : begin + count], ask[begin : begin + count]
        column, cache = _score_part(
            target.config, target.params, cache, *jax.device_put((part[:1], part[1:], np.int32(rival), count))
        )
        columns.append(np.asarray(column)[:, :count])
    best, own, rivals = np.concatenate(columns, axis=1)[:, len(prompt) - 1 :]
    return best, own, rivals


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _score_part(
    config: ModelConfig,
    params: Any,
    cache: Cache,
    tokens: jax.Array,
    ask: jax.Array,
    rival: jax.Array,
    count: Any,
) -> tuple[jax.Array, Cache]:
    """[3, WIDTH] f32: at each place the largest logit, that of ``ask`` [1, WIDTH] and that of ``rival``."""
    places = jnp.arange(WIDTH)
    out = decoder.forward(params, config, tokens, cache.lengths[:, None] + places, cache, Causal())
    logits = decoder.unembed(params, config, out.hidden)[0]
    own = jnp.take_along_axis(logits, ask[0][:, None], axis=1)[:, 0]
    return jnp.stack([logits.max(-1), own, logits[:, rival]]), out.cache.advance(jnp.full((1,), count))
