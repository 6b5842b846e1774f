"""Suffix decoding: what was answered before is a draft of what is answered now (Oliaro et al. 2024).

The end of a row's text is searched for in the row itself and in the answers of earlier requests, and what
followed at the best places is merged into a tree (``drafts.continuations``). The device searches a window of
earlier answers that the row brought along; which answers stand in it, a store on the host chooses when the
row begins. The longer the agreement, the more is drafted, so that a text that repeats nothing costs little.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import pytree
from eaglejax.drafts.base import Draft, Observation, Proposer, Request
from eaglejax.drafts.continuations import after, best_places, merged, offers, pool
from eaglejax.drafts.limits import MOST_BRANCHING, MOST_DEPTH, MOST_NODES, MOST_PREDICTED, check_count
from eaglejax.drafts.ngram import last_tokens, remember, suffix_overlap, with_root
from eaglejax.drafts.suffix.store import Store
from eaglejax.errors import ConfigError, MismatchError
from eaglejax.sampling import RowSampling


@pytree.dataclass
class Answers:
    """Earlier answers, one behind the other: ``tokens``, ``place`` (of a token in its text) and ``left``
    (tokens behind it there), each [B, W] int32; zeros behind the last."""

    tokens: jax.Array
    place: jax.Array
    left: jax.Array


@pytree.dataclass
class SuffixState:
    """``answers``: what the row brought along; ``history`` [B, C] int32: its tokens at their positions."""

    answers: Answers
    history: jax.Array


@dataclasses.dataclass(frozen=True)
class Suffix(Proposer):
    """A tree of up to ``size`` nodes, root included, out of up to ``places`` continuations.

    ``length``: most tokens on a path. ``max_tree_depth``: tokens of agreement and of the drafts behind them
    together; ``max_spec_factor``: drafts for each token of agreement; ``min_token_prob``: nodes that fewer of
    the weighed continuations go through are left out. ``max_cached_requests``: answers that the store keeps
    (0: none, and only the row's own text is searched). ``window``: tokens of earlier answers that a row
    brings along. ``store``: its memory across requests, made anew where none is given; two proposers with the
    same settings are equal, whatever they remember. Raises ConfigError for settings that cannot be.

    A sampled row draws by what is drafted, so its seed gives the same text again only beside the same store;
    its distribution is the target's whatever the store holds.
    """

    size: int = 16
    length: int = 12
    places: int = 8
    max_tree_depth: int = 24
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1
    max_cached_requests: int = 10_000
    window: int = 4096
    store: Store = dataclasses.field(default=None, compare=False, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for name, least, most in (
            ("length", 1, MOST_DEPTH),
            ("places", 1, MOST_BRANCHING),
            ("window", 1, MOST_PREDICTED),
            ("size", 2, MOST_NODES),
            ("max_tree_depth", 2, MOST_DEPTH),
            ("max_cached_requests", 0, 2**31 - 1),
        ):
            check_count(f"Suffix: {name}", getattr(self, name), most, least=least)
        if not 0 < self.max_spec_factor < math.inf:
            raise ConfigError(
                f"Suffix: max_spec_factor is {self.max_spec_factor}; it must be a positive number"
            )
        if not 0 <= self.min_token_prob <= 1:
            raise ConfigError(f"Suffix: min_token_prob is {self.min_token_prob}; it must lie in [0, 1]")
        if not self.offers.any():
            raise ConfigError(
                f"Suffix: max_spec_factor {self.max_spec_factor} drafts nothing behind any agreement within "
                f"max_tree_depth {self.max_tree_depth}"
            )
        if self.store is None:
            object.__setattr__(self, "store", Store(self.max_cached_requests))

    @property
    def offers(self) -> np.ndarray:
        """[max_tree_depth + 1] int32: most drafts behind n tokens of agreement."""
        return np.minimum(offers(self.max_tree_depth, self.max_spec_factor), self.length)

    @property
    def nodes(self) -> int:
        """N, root included."""
        return min(self.size, pool(self.places, int(self.offers.max())))

    @property
    def depth(self) -> int:
        """D."""
        return min(int(self.offers.max()), self.nodes - 1)

    @property
    def draws(self) -> bool:
        """No: what is looked up follows from texts."""
        return False

    @property
    def chain(self) -> bool:
        """Never: siblings stand between the nodes of a path."""
        return False

    def inputs(self, requests: Sequence[Request], slots: int) -> Answers:
        """The earlier answers that are most like each request; see ``Store.alike``."""
        self.refuse_predictions(requests)
        if len(requests) > slots:
            raise MismatchError(f"{len(requests)} requests do not fit {slots} rows")
        tokens, place, left = np.zeros((3, slots, self.window if self.max_cached_requests else 0), np.int32)
        for row, request in enumerate(requests):
            at = 0
            for text in self.store.alike(request.prompt, tokens.shape[1]):
                here = slice(at, at + len(text))
                tokens[row, here] = text
                place[row, here] = np.arange(len(text))
                left[row, here] = np.arange(len(text))[::-1]
                at += len(text)
        return Answers(*map(jnp.asarray, (tokens, place, left)))

    def learn(self, row: Request, tokens: Sequence[int]) -> None:
        """Remember what was answered, for requests that begin later."""
        self.store.learn(row, tokens)

    def init(self, params: Any, *, batch: int, capacity: int, inputs: Any = ()) -> SuffixState:
        """An empty history; without ``inputs`` no row has earlier answers."""
        del params
        answers = inputs or self.inputs((), batch)
        if answers.tokens.shape[0] != batch:
            raise MismatchError(f"answers for {answers.tokens.shape[0]} rows do not fit a batch of {batch}")
        return SuffixState(answers, jnp.zeros((batch, capacity), jnp.int32))

    def observe(self, params: Any, state: SuffixState, seen: Observation) -> SuffixState:
        """Write the committed tokens at their positions."""
        del params
        return dataclasses.replace(state, history=remember(state.history, seen))

    def propose(
        self,
        params: Any,
        state: SuffixState,
        root: jax.Array,
        lengths: jax.Array,
        rows: RowSampling,
        keys: jax.Array,
    ) -> tuple[Draft, SuffixState]:
        """What followed the longest agreements, in the row and in earlier answers; at equal length the row's
        own text says more."""
        del params, rows, keys
        told, own = state.answers, with_root(state.history, root, lengths)
        tail = last_tokens(own, lengths, self.max_tree_depth)
        place = jnp.arange(own.shape[1])
        overlap = jnp.where(place < lengths[:, None], suffix_overlap(own, tail, lengths + 1), 0)
        text, left = own, jnp.maximum(lengths[:, None] - place, 0)
        if self.max_cached_requests:
            far = suffix_overlap(told.tokens, tail, lengths + 1, told.place)
            overlap = jnp.concatenate([far, overlap], axis=1)
            left = jnp.concatenate([told.left, left], axis=1)
            text = jnp.concatenate([told.tokens, own], axis=1)
        length = int(self.offers.max())
        places, agreed = best_places(overlap, left, count=self.places, length=length)
        offered = jnp.minimum(jnp.take_along_axis(left, places, axis=1), jnp.asarray(self.offers)[agreed])
        draft = merged(
            root,
            after(text, places, length),
            offered,
            agreed,
            nodes=self.nodes,
            min_probability=self.min_token_prob,
        )
        return draft, state
