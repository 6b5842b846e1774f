"""A cascade: several proposers draft every round, and one tree of the nodes most likely accepted is judged.

Where they leave a likely branch open, the parts that read tokens alone go on behind it (``extend``).

What a part says of its nodes is no measure for another part's (an n-gram match says nothing, a network is
overconfident), so each row keeps count of what came of each part's nodes, by what the part had said of them,
and goes by that. Counted are all nodes that a part drafted, those too that were not judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.drafts.base import Bound, Draft, Needs, Observation, Proposer, Request
from eaglejax.drafts.cascade.extend import Behind, extended, open_branches
from eaglejax.drafts.cascade.merge import Pool, distinct, merge, pooled, right
from eaglejax.drafts.limits import MOST_BRANCHING, MOST_NODES, check_count
from eaglejax.errors import ConfigError
from eaglejax.sampling import RowSampling

BINS = 8
"""Of what a part says of a node given its parent; of a part that says nothing, of its depth."""
_PRIOR = 3.0  # how many nodes the first guess weighs
_FADE = 0.97  # of the counts, each round
_UNSAID = 0.7  # first guess of a node of which its part says nothing


@pytree.dataclass
class CascadeState:
    """``parts``: the states of the parts. ``hits``, ``seen`` [B, S, BINS] f32: nodes that came and nodes that
    could be judged, fading, of each part and then of each that goes on behind others' guesses. ``pool``: the
    last round's nodes; ``at`` [B] int32: the position of its root, -1 before any."""

    parts: tuple[Any, ...]
    hits: jax.Array
    seen: jax.Array
    pool: Pool
    at: jax.Array


@dataclasses.dataclass(frozen=True)
class Cascade(Proposer):
    """``parts`` draft side by side; at most ``size`` nodes, root included, are judged. ``branches``: how many
    guesses a round, of those that nothing is drafted behind, are gone on with by the parts that read tokens
    alone (lookups, predictions); 0: none.

    Parts whose drafts are a function of the text alone can be merged (lookups, predictions, networks without
    ``sample``). Raises ConfigError for fewer than two parts, for one that drafts nothing or takes what was
    committed for its own draft, for cascades within a cascade, and for branches that no part could go on
    with; when it first drafts, for a part that draws its drafts.
    """

    parts: tuple[Proposer, ...]
    size: int = 24
    branches: int = 0

    def __post_init__(self) -> None:
        if len(self.parts) < 2:
            raise ConfigError(f"a cascade has two parts or more, not {len(self.parts)}")
        for part in self.parts:
            if isinstance(part, Cascade) or not part.depth or part.keeps_own_drafts:
                raise ConfigError(f"{type(part).__name__} cannot be part of a cascade")
        check_count("Cascade: size, which counts the root,", self.size, MOST_NODES, least=2)
        check_count("Cascade: branches", self.branches, MOST_BRANCHING, least=0)
        if self.branches and not self.second:
            raise ConfigError(
                "no part of the cascade reads tokens alone, as ngram, suffix and prediction do, so none can "
                "go on behind another's guesses; branches must be 0"
            )

    @property
    def second(self) -> tuple[int, ...]:
        """The parts of the second stage, by their place in ``parts``."""
        return tuple(i for i, part in enumerate(self.parts) if self.branches and not part.needs.taps)

    @property
    def pool(self) -> int:
        """Nodes that are drafted, roots left out."""
        beside = sum(part.nodes - 1 for part in self.parts)
        behind = min(self.branches, beside) * sum(self.parts[i].nodes - 1 for i in self.second)
        return beside + behind

    @property
    def reach(self) -> int:
        """Depth of the deepest node that is drafted."""
        behind = max((self.parts[i].depth for i in self.second), default=0)
        return max(part.depth for part in self.parts) + behind

    @property
    def nodes(self) -> int:
        """N, root included."""
        return min(self.size, 1 + self.pool)

    @property
    def depth(self) -> int:
        """D."""
        return min(self.reach, self.nodes - 1)

    @property
    def chain(self) -> bool:
        """Never."""
        return False

    @property
    def draws(self) -> bool:
        """No: parts that draw cannot be merged."""
        return False

    @property
    def needs(self) -> Needs:
        """What any part reads, each once."""
        return Needs(tuple(dict.fromkeys(tap for part in self.parts for tap in part.needs.taps)))

    @property
    def reads_predictions(self) -> bool:  # type: ignore[override]
        """Whether a part does."""
        return any(part.reads_predictions for part in self.parts)

    def inputs(self, requests: Sequence[Request], slots: int) -> tuple[Any, ...]:
        """Those of every part; a prediction goes to the parts that read one."""
        if not self.reads_predictions:
            self.refuse_predictions(requests)
        bare = [dataclasses.replace(request, prediction=None) for request in requests]
        return tuple(part.inputs(requests if part.reads_predictions else bare, slots) for part in self.parts)

    def learn(self, row: Request, tokens: Sequence[int]) -> None:
        """Every part learns."""
        for part in self.parts:
            part.learn(row, tokens)

    def init(self, params: Any, *, batch: int, capacity: int, inputs: Any = ()) -> CascadeState:
        """The parts' states, and no node counted yet."""
        params = self._params(params)
        inputs = inputs or ((),) * len(self.parts)
        # A part's largest draft may stand behind as many tokens as the cascade's can.
        room = capacity + max(max(part.nodes for part in self.parts) - self.nodes, 0)
        states = tuple(
            part.init(own, batch=batch, capacity=room, inputs=brought)
            for part, own, brought in zip(self.parts, params, inputs, strict=True)
        )
        none = jnp.zeros((batch, self.pool), jnp.int32)
        empty = Pool(none, none - 1, none + 1, none > 0, none, none.astype(jnp.float32))
        table = jnp.zeros((batch, len(self.parts) + len(self.second), BINS))
        return CascadeState(states, table, table, empty, jnp.full((batch,), -1, jnp.int32))

    def observe(self, params: Any, state: CascadeState, seen: Observation) -> CascadeState:
        """Let every part read, and count what came of the last drafts."""
        taps, states = self.needs.taps, []
        for part, own, memory in zip(self.parts, self._params(params), state.parts, strict=True):
            wanted = [taps.index(tap) for tap in part.needs.taps]
            features = (
                seen.features[:, :, jnp.asarray(wanted)] if wanted and seen.features is not None else None
            )
            states.append(part.observe(own, memory, dataclasses.replace(seen, features=features)))
        # The tokens behind the drafts' root, which need not be the first that were committed.
        behind = (state.at - seen.start)[:, None] + jnp.arange(self.reach)
        width = seen.following.shape[1]
        truth = jnp.take_along_axis(seen.following, jnp.clip(behind, 0, width - 1), axis=1)
        fits = (state.at >= 0) & (state.at >= seen.start) & (state.at < seen.start + seen.count)
        known = jnp.where(fits, seen.start + seen.count - state.at, 0)
        came, judged = right(state.pool, truth, known)
        row, bins = jnp.arange(truth.shape[0])[:, None], _bins(state.pool)

        def counted(table: jax.Array, which: jax.Array) -> jax.Array:
            faded = jnp.where(fits[:, None, None], _FADE * table, table)
            return faded.at[row, state.pool.source, bins].add(which.astype(jnp.float32))

        return dataclasses.replace(
            state,
            parts=tuple(states),
            hits=counted(state.hits, came & judged),
            seen=counted(state.seen, judged),
            at=jnp.where(fits, -1, state.at),
        )

    def propose(
        self,
        params: Any,
        state: CascadeState,
        root: jax.Array,
        lengths: jax.Array,
        rows: RowSampling,
        keys: jax.Array,
    ) -> tuple[Draft, CascadeState]:
        """The likeliest nodes of all parts. Raises ConfigError for a part that draws its drafts."""
        drafts, states = [], []
        for part, own, memory in zip(self.parts, self._params(params), state.parts, strict=True):
            draft, memory = part.propose(own, memory, root, lengths, rows, keys)
            if draft.proposal.q is not None:
                raise ConfigError(
                    f"{type(part).__name__} draws its drafts, which a cascade cannot merge with others'; let "
                    "it take the likeliest, or use it alone"
                )
            drafts.append(draft)
            states.append(memory)
        pool = pooled(drafts)
        if self.second:
            deepest = max(part.depth for part in self.parts)
            found = distinct(pool, _chance(state, pool), deepest)
            nodes, chance = open_branches(found, self.branches)
            behind = Behind.nodes(root, lengths, pool, nodes, deepest)
            owned = self._params(params)
            more = [behind.draft(self.parts[i], owned[i], states[i], rows, keys) for i in self.second]
            pool = extended(pool, nodes, chance, more, len(self.parts))
        draft = merge(root, pool, _chance(state, pool), nodes=self.nodes, depth=self.depth)
        return draft, dataclasses.replace(state, parts=tuple(states), pool=pool, at=lengths)

    def _params(self, params: Any) -> tuple[Any, ...]:
        return (None,) * len(self.parts) if params is None else params


def _chance(state: CascadeState, pool: Pool) -> jax.Array:
    """[B, M] f32: that each node is accepted once its parent is, by what came of its like."""
    row = jnp.arange(pool.tokens.shape[0])[:, None]
    guess = jnp.where(pool.chance < 0, _UNSAID, pool.chance)
    hits, seen = (table[row, pool.source, _bins(pool)] for table in (state.hits, state.seen))
    return (hits + _PRIOR * guess) / (seen + _PRIOR)


def _bins(pool: Pool) -> jax.Array:
    by_chance = jnp.floor(pool.chance * BINS).astype(jnp.int32)
    return jnp.clip(jnp.where(pool.chance < 0, pool.depth - 1, by_chance), 0, BINS - 1)


def cascade(*parts: Proposer | Bound, size: int = 24, branches: int = 0) -> Bound:
    """A :class:`Cascade` of proposers, with weights (what ``load_draft`` returns) or without."""
    bound = [part if isinstance(part, Bound) else Bound(part) for part in parts]
    wrong = [b.proposer for b in bound if not isinstance(b.proposer, Proposer)]
    if wrong:
        raise ConfigError(f"a part of a cascade is {wrong[0]!r}; give proposers, or what load_draft returned")
    named = [b.source for b in bound if b.source]
    return Bound(
        Cascade(tuple(b.proposer for b in bound), size, branches),
        tuple(b.params for b in bound),
        source=" + ".join(named) or None,
    )
