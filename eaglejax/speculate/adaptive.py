"""The width that promises most tokens a second, round by round.

A round of width w yields one token a row and, besides, as many as drafts are accepted: in expectation the sum
of the judged nodes' chances. Their chances are estimated from past rounds of the same batch, by the node's
score and by its place among the best, which serves drafts that have no scores too. What a round costs at each
width is measured (``costs``) and part of the memory, so that another machine needs no other program.
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
PLACE_BINS = 6
"""Bin b holds places 2^b .. 2^(b+1) - 1 among the best nodes, the root being 0; the last one all behind."""
_PRIOR_ROUNDS = 2.0  # how much the first guess weighs
_GUESS = 0.8  # by which a node's chance falls short of its score, for each doubling of its place


@pytree.dataclass
class AdaptiveMemory:
    """``costs`` [K] f32: seconds of a round at each width of the menu, to scale. ``hits``, ``seen``
    [PLACE_BINS, SCORE_BINS] f32: drafts accepted and judged, fading. ``worth`` [] f32: tokens a second of
    rounds that drafted, fading, in units of those that do not. ``idle``, ``patience`` [] int32: rounds since
    the last draft, and rounds without one before another is tried. ``forced`` [] int32: index of the width to
    take whatever it promises, -1 for none.
    """

    costs: jax.Array
    hits: jax.Array
    seen: jax.Array
    worth: jax.Array
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
    patience: int = 16
    most_patience: int = 512

    def __post_init__(self) -> None:
        for name in ("memory", "patience", "most_patience"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"Adaptive: {name} is {value!r}; it must be an integer of 1 or more")

    def init(self, menu: tuple[int, ...]) -> AdaptiveMemory:
        """Costs that nobody has measured: a node more costs a twentieth of a round."""
        table = jnp.zeros((PLACE_BINS, SCORE_BINS))
        return AdaptiveMemory(
            costs=1.0 + 0.05 * (jnp.asarray(menu, jnp.float32) - 1),
            hits=table,
            seen=table,
            worth=jnp.float32(2.0),
            idle=jnp.int32(0),
            patience=jnp.int32(self.patience),
            forced=jnp.int32(-1),
        )

    def drafts(self, memory: AdaptiveMemory, menu: tuple[int, ...]) -> jax.Array:
        """While it pays, and now and then to see whether it does again."""
        del menu
        wants = (memory.worth >= 1) | (memory.idle >= memory.patience)
        return jnp.where(memory.forced >= 0, memory.forced > 0, wants)

    def choose(self, memory: AdaptiveMemory, menu: tuple[int, ...], scores: jax.Array) -> jax.Array:
        """The width with the most expected tokens a second, of equal ones the narrowest."""
        chance = expected(memory, scores)
        live = scores[:, 0] > 0
        total = live.sum() + jnp.cumsum(chance.sum(0))
        rate = total[jnp.asarray(menu) - 1] / memory.costs
        return jnp.where(memory.forced >= 0, memory.forced, jnp.argmax(rate)).astype(jnp.int32)

    def update(self, memory: AdaptiveMemory, menu: tuple[int, ...], judged: Judged) -> AdaptiveMemory:
        """Count what was judged; weigh what a round with a draft brought."""
        drafted = judged.width > 1
        place, score = _bins(judged.scores)
        fade = jnp.where(drafted, 1.0 - 1.0 / self.memory, 1.0)

        def count(table: jax.Array, which: jax.Array) -> jax.Array:
            return (table * fade).at[place, score].add(which.astype(jnp.float32))

        live = (judged.scores[:, 0] > 0).sum()
        tokens = (live + judged.accepted.sum()) / jnp.maximum(live, 1)
        cost = memory.costs[jnp.argmax(jnp.asarray(menu) == judged.width)] / memory.costs[0]
        # The first draft after a pause says more than what is remembered of the time before it.
        weight = jnp.where(memory.idle > 0, 0.6, 0.15)
        worth = jnp.where(drafted, memory.worth + weight * (tokens / cost - memory.worth), memory.worth)
        tried = drafted & (memory.idle > 0)
        longer = jnp.minimum(2 * memory.patience, self.most_patience)
        return AdaptiveMemory(
            costs=memory.costs,
            hits=count(memory.hits, judged.accepted & judged.judged),
            seen=count(memory.seen, judged.judged),
            worth=worth,
            idle=jnp.where(drafted, 0, memory.idle + 1),
            patience=jnp.where(worth >= 1, self.patience, jnp.where(tried, longer, memory.patience)).astype(
                jnp.int32
            ),
            forced=memory.forced,
        )


def expected(memory: AdaptiveMemory, scores: jax.Array) -> jax.Array:
    """[B, N] f32: the chance that each node is accepted, by the ``scores`` [B, N] of the best; 0 for the root
    and for what is no draft."""
    place, score = _bins(scores)
    guess = 2.0 ** -(jnp.arange(SCORE_BINS) + 0.5) * _GUESS ** jnp.arange(PLACE_BINS)[:, None]
    chance = (memory.hits + _PRIOR_ROUNDS * guess) / (memory.seen + _PRIOR_ROUNDS)
    draft = (jnp.arange(scores.shape[1]) > 0) & (scores > 0)
    return jnp.where(draft, chance[place, score], 0.0)


def _bins(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Place and score bins of every node [B, N]."""
    place = jnp.log2(jnp.maximum(jnp.arange(scores.shape[1]), 1)).astype(jnp.int32)
    score = jnp.floor(-jnp.log2(jnp.maximum(scores, 1e-9))).astype(jnp.int32)
    place = jnp.broadcast_to(jnp.minimum(place, PLACE_BINS - 1), scores.shape)
    return place, jnp.clip(score, 0, SCORE_BINS - 1)
