"""The width that promises most tokens a second, round by round.

A round of width w yields one token a row and, besides, as many as drafts are accepted: in expectation the sum
of the judged nodes' chances. Their chances are estimated from past rounds, by the node's score (the draft's
confidence in it) and by its depth, which serves drafts that have no scores too. What a round costs at each
width is measured (``costs``) and part of the memory, so that another machine needs no other program.

What is chosen follows measured times and the whole batch, so it may decide about nothing but speed. Greedy
texts and those whose drafts are a function of the text do not depend on it (``verify``); where drafts of a
batch are drawn, all of them are judged (``DecodeOptions.choices``).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.errors import ConfigError
from eaglejax.speculate.widths import Judged, WidthPolicy

SCORE_BINS = 8
"""Bin b holds scores in (2^-(b+1), 2^-b], the last one all below."""
DEPTH_BINS = 8
"""Bin b holds depth b + 1, the last one all below."""
_PRIOR_ROUNDS = 2.0  # how much the first guess weighs
_GUESS = 0.9  # by which a node's chance falls short of its score, for each step of its depth
_CARRIED = 20.0  # rounds of earlier batches that an estimate begins with
_FREE = 1.02  # a draft that makes no round dearer than this is never left out
_MOST_ROUNDS = 7.0  # that the estimate of what drafting brings looks back, about
_UNSEEN = 0.25  # of how fast estimates fade while they are tested, how fast while they are not
_WORTH = 1.5  # the first guess of what drafting brings, as much as two rounds say


@pytree.dataclass
class AdaptiveMemory:
    """``costs`` [1 + K] f32: seconds, to scale, of a round without a draft and of one with a draft at each
    width of the menu. ``hits``, ``seen``
    [DEPTH_BINS, SCORE_BINS] f32: drafts accepted and judged, fading. ``worth`` [] f32: tokens a second of
    rounds that drafted, fading, in units of those that do not; ``rounds`` [] f32: how many it stands for,
    at most as many as its weight lets count. ``idle``, ``patience`` [] int32: rounds since the last draft,
    and rounds without one before another is tried. ``forced`` [] int32: index into ``costs`` of what to do
    whatever it promises, -1 for none.
    """

    costs: jax.Array
    hits: jax.Array
    seen: jax.Array
    worth: jax.Array
    rounds: jax.Array
    idle: jax.Array
    patience: jax.Array
    forced: jax.Array


@dataclasses.dataclass(frozen=True)
class Adaptive(WidthPolicy[AdaptiveMemory]):
    """Each round the width with the most expected tokens a second; none is drafted while that costs speed.

    ``memory``: rounds over which estimates fade. ``patience``, ``most_patience``: rounds without a draft
    before one is tried again, doubled each time that it does not pay, up to the second. Raises ConfigError.
    """

    memory: int = 100
    patience: int = 8
    most_patience: int = 512

    def __post_init__(self) -> None:
        for name in ("memory", "patience", "most_patience"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"Adaptive: {name} is {value!r}; it must be an integer of 1 or more")

    def init(self, menu: tuple[int, ...]) -> AdaptiveMemory:
        """Costs that nobody has measured: a node more costs a twentieth of a round."""
        table = jnp.zeros((DEPTH_BINS, SCORE_BINS))
        return AdaptiveMemory(
            costs=jnp.asarray([1.0, *(1.0 + 0.05 * width for width in menu)], jnp.float32),
            hits=table,
            seen=table,
            worth=jnp.float32(_WORTH),
            rounds=jnp.float32(2.0),
            idle=jnp.int32(0),
            patience=jnp.int32(self.patience),
            forced=jnp.int32(-1),
        )

    def drafts(self, memory: AdaptiveMemory, menu: tuple[int, ...]) -> jax.Array:
        """While it pays or costs next to nothing, and now and then to see whether it does again."""
        del menu
        free = memory.costs[1] <= _FREE * memory.costs[0]
        wants = free | (memory.worth >= 1) | (memory.idle >= memory.patience)
        return jnp.where(memory.forced >= 0, memory.forced > 0, wants)

    def choose(
        self, memory: AdaptiveMemory, menu: tuple[int, ...], scores: jax.Array, depths: jax.Array
    ) -> jax.Array:
        """The width with the most expected tokens a second, of equal ones the narrowest."""
        chance = expected(memory, scores, depths)
        live = scores[:, 0] > 0
        total = live.sum() + jnp.cumsum(chance.sum(0))
        rate = total[jnp.asarray(menu) - 1] / memory.costs[1:]
        return jnp.where(memory.forced > 0, memory.forced - 1, jnp.argmax(rate)).astype(jnp.int32)

    def update(self, memory: AdaptiveMemory, menu: tuple[int, ...], judged: Judged) -> AdaptiveMemory:
        """Count what was judged; weigh what a round with a draft brought."""
        drafted = judged.drafted
        depth, score = _bins(judged.scores, judged.depths)
        # Rounds that judge nothing learn nothing, but what is old is looked at again in the end.
        fade = jnp.where(judged.width > 1, 1.0 - 1.0 / self.memory, 1.0 - _UNSEEN / self.memory)
        fade = jnp.where(drafted, fade, 1.0)

        def count(table: jax.Array, which: jax.Array) -> jax.Array:
            return (table * fade).at[depth, score].add(which.astype(jnp.float32))

        live = (judged.scores[:, 0] > 0).sum()
        tokens = (live + judged.accepted.sum()) / jnp.maximum(live, 1)
        cost = memory.costs[1 + jnp.argmax(jnp.asarray(menu) == judged.width)] / memory.costs[0]
        # The first draft after a pause says more than what is remembered of the time before it.
        rounds = jnp.where(memory.idle > 0, 0.67, jnp.minimum(memory.rounds, _MOST_ROUNDS))
        weight = 1.0 / (rounds + 1.0)
        worth = jnp.where(drafted, memory.worth + weight * (tokens / cost - memory.worth), memory.worth)
        tried = drafted & (memory.idle > 0)
        longer = jnp.minimum(2 * memory.patience, self.most_patience)
        return AdaptiveMemory(
            costs=memory.costs,
            hits=count(memory.hits, judged.accepted & judged.judged),
            seen=count(memory.seen, judged.judged),
            worth=worth,
            rounds=jnp.where(drafted, rounds + 1.0, memory.rounds),
            idle=jnp.where(drafted, 0, memory.idle + 1),
            patience=jnp.where(worth >= 1, self.patience, jnp.where(tried, longer, memory.patience)).astype(
                jnp.int32
            ),
            forced=memory.forced,
        )


def expected(memory: AdaptiveMemory, scores: jax.Array, depths: jax.Array) -> jax.Array:
    """[B, N] f32: the chance that each node is accepted, by the ``scores`` and ``depths`` [B, N] of the best;
    0 for the root and for what is no draft."""
    depth, score = _bins(scores, depths)
    guess = 2.0 ** -(jnp.arange(SCORE_BINS) + 0.5) * _GUESS ** jnp.arange(DEPTH_BINS)[:, None]
    chance = (memory.hits + _PRIOR_ROUNDS * guess) / (memory.seen + _PRIOR_ROUNDS)
    # A draft is not accepted before the one above it, which tells of depths that were not judged yet.
    chance = jax.lax.cummin(chance, axis=0)
    draft = (jnp.arange(scores.shape[1]) > 0) & (scores > 0)
    return jnp.where(draft, chance[depth, score], 0.0)


def carried(memory: AdaptiveMemory, before: AdaptiveMemory) -> AdaptiveMemory:
    """A fresh ``memory`` with what ``before``, of an earlier batch of the kind, has learnt; weighed so that
    other texts soon count more."""
    share = _CARRIED / jnp.maximum(before.seen[0].sum(), _CARRIED)
    return dataclasses.replace(
        memory,
        hits=before.hits * share,
        seen=before.seen * share,
        worth=before.worth,
        rounds=jnp.minimum(before.rounds, 3.0),
        patience=before.patience,
        idle=before.idle,
    )


def _bins(scores: jax.Array, depths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Depth and score bins of every node [B, N]."""
    score = jnp.floor(-jnp.log2(jnp.maximum(scores, 1e-9))).astype(jnp.int32)
    return jnp.clip(depths - 1, 0, DEPTH_BINS - 1), jnp.clip(score, 0, SCORE_BINS - 1)
