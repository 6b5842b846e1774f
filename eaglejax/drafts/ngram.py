"""Prompt lookup: the text so far is its own draft.

The last few tokens are searched for earlier in the row (prompt and output alike), and what followed them
there is proposed (Saxena 2023, "Prompt Lookup Decoding"; also called n-gram speculation): one continuation as
a chain, or several as a tree. No weights, no draws: the proposal is a function of the prefix, so its
distribution is one-hot.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax.drafts.base import Draft, Observation, Proposal, Proposer
from eaglejax.drafts.continuations import after, best_places, merged, pool
from eaglejax.drafts.limits import MOST_BRANCHING, MOST_DEPTH, MOST_NGRAM, MOST_NODES, check_count
from eaglejax.drafts.static import chain_draft
from eaglejax.errors import ConfigError
from eaglejax.sampling import RowSampling


def remember(history: jax.Array, seen: Observation) -> jax.Array:
    """``history`` [B, C] int32 (slot = position) with the observed tokens written at their positions."""
    place = jnp.arange(seen.tokens.shape[1])
    # A slot beyond the buffer is dropped by the scatter; a clamped slice update would shift the whole block.
    slot = jnp.where(place < seen.count[:, None], seen.start[:, None] + place, history.shape[1])
    row = jnp.arange(history.shape[0])[:, None]
    return history.at[row, slot].set(seen.tokens.astype(history.dtype), mode="drop")


def with_root(history: jax.Array, root: jax.Array, lengths: jax.Array) -> jax.Array:
    """``history`` [B, C] with ``root`` [B] at position ``lengths`` [B]."""
    return history.at[jnp.arange(history.shape[0]), lengths].set(root.astype(history.dtype), mode="drop")


def last_tokens(text: jax.Array, lengths: jax.Array, size: int) -> jax.Array:
    """[B, size]: token ``lengths[b] - i`` of ``text`` [B, C] in column i (column 0 is the newest)."""
    place = jnp.maximum(lengths[:, None] - jnp.arange(size), 0)
    return jnp.take_along_axis(text, place, axis=1)


def suffix_overlap(
    text: jax.Array, tail: jax.Array, tail_count: jax.Array, place: jax.Array | None = None
) -> jax.Array:
    """[B, S] int32: how many tokens of ``text`` [B, S] that end at each place agree with the tail, newest
    first.

    ``tail`` [B, G] int32 holds the newest token in column 0; its first ``tail_count`` [B] columns are real.
    ``place`` [B, S]: of each token in its own text, where several stand one behind the other.
    """
    place = jnp.arange(text.shape[1]) if place is None else place
    agree = jnp.ones(text.shape, bool)
    overlap = jnp.zeros(text.shape, jnp.int32)
    for i in range(tail.shape[1]):
        same = jnp.roll(text, i, axis=1) == tail[:, i : i + 1]
        agree &= same & (place >= i) & (i < tail_count[:, None])
        overlap += agree
    return overlap


def take_from(text: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """[B, size]: tokens ``start[b] + i`` of ``text`` [B, S]; places beyond the text repeat its last token."""
    place = jnp.minimum(start[:, None] + jnp.arange(size), text.shape[1] - 1)
    return jnp.take_along_axis(text, place, axis=1)


def lookup(
    text: jax.Array, lengths: jax.Array, *, length: int, max_ngram: int, min_ngram: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What followed the longest earlier occurrence of the text's end.

    ``text`` [B, C] int32 is real up to and including position ``lengths`` [B]. Among the earlier places
    where the last n tokens stood too, for the largest n in ``[min_ngram, max_ngram]`` that has any, the one
    is taken that can offer most tokens (up to ``length``) before the text ends, and the latest of those:
    recent text predicts best, but an occurrence that touches the end has little to say. An occurrence may
    overlap the end itself.

    Returns tokens [B, length], how many of them are real [B] (0: no match), and n [B] (0: no match).
    """
    tail = last_tokens(text, lengths, max_ngram)
    overlap = suffix_overlap(text, tail, lengths + 1)
    place = jnp.arange(text.shape[1])
    earlier = place < lengths[:, None]
    offer = jnp.clip(lengths[:, None] - place, 0, length)
    score = jnp.where(earlier & (overlap >= min_ngram), overlap * (length + 1) + offer, -1)
    end = text.shape[1] - 1 - jnp.argmax(score[:, ::-1], axis=1)
    best = jnp.take_along_axis(score, end[:, None], axis=1)[:, 0]
    found = best >= 0
    count = jnp.where(found, jnp.minimum(lengths - end, length), 0).astype(jnp.int32)
    size = jnp.where(found, best // (length + 1), 0).astype(jnp.int32)
    return take_from(text, end + 1, length), count, size


@dataclasses.dataclass(frozen=True)
class NGram(Proposer[None, jax.Array]):
    """Prompt lookup with a chain of up to ``length`` tokens, see :func:`lookup`, or a tree.

    ``max_ngram`` and ``min_ngram``: the longest and shortest suffix searched for, both included.
    ``candidates``: continuations, of which more than one are merged into a tree of the ``size`` likeliest
    nodes, root included (None: as many as two whole continuations have; see ``continuations``). Raises
    ConfigError for settings beyond ``limits``, ``min_ngram > max_ngram`` and a ``size`` beside one candidate.
    State: the row's tokens, [B, capacity] int32.
    """

    length: int = 7
    max_ngram: int = 5
    min_ngram: int = 1
    candidates: int = 1
    size: int | None = None

    def __post_init__(self) -> None:
        check_count("NGram: length", self.length, MOST_DEPTH)
        for name in ("max_ngram", "min_ngram"):
            check_count(f"NGram: {name}", getattr(self, name), MOST_NGRAM)
        check_count("NGram: candidates", self.candidates, MOST_BRANCHING)
        if self.min_ngram > self.max_ngram:
            raise ConfigError(
                f"NGram: min_ngram {self.min_ngram} exceeds max_ngram {self.max_ngram}; "
                "the shortest suffix cannot be longer than the longest"
            )
        if self.size is None:
            return
        if self.candidates == 1:
            raise ConfigError(
                f"NGram: size {self.size} counts the nodes of a tree of several candidates; one candidate is "
                "a chain, whose length says it all"
            )
        check_count("NGram: size, which counts the root,", self.size, MOST_NODES, least=2)

    @property
    def nodes(self) -> int:
        """N, root included."""
        whole = pool(self.candidates, self.length)
        return min(self.size or pool(2, self.length), whole)

    @property
    def depth(self) -> int:
        """D."""
        return min(self.length, self.nodes - 1)

    @property
    def chain(self) -> bool:
        """With one candidate."""
        return self.candidates == 1

    @property
    def draws(self) -> bool:
        """No: what is looked up follows from the text."""
        return False

    def init(self, params: None, *, batch: int, capacity: int, inputs: Any = ()) -> jax.Array:
        """An empty history, [batch, capacity] int32."""
        del params, inputs
        return jnp.zeros((batch, capacity), jnp.int32)

    def observe(self, params: None, state: jax.Array, seen: Observation) -> jax.Array:
        """Write the committed tokens at their positions."""
        del params
        return remember(state, seen)

    def propose(
        self,
        params: None,
        state: jax.Array,
        root: jax.Array,
        lengths: jax.Array,
        rows: RowSampling,
        keys: jax.Array,
    ) -> tuple[Draft, jax.Array]:
        """What followed the longest earlier occurrences; nodes without one are not valid."""
        del params, rows, keys
        text = with_root(state, root, lengths)
        if self.chain:
            tokens, count, _ = lookup(
                text, lengths, length=self.length, max_ngram=self.max_ngram, min_ngram=self.min_ngram
            )
            return chain_draft(root, tokens, count, Proposal()), state
        overlap = suffix_overlap(text, last_tokens(text, lengths, self.max_ngram), lengths + 1)
        left = jnp.maximum(lengths[:, None] - jnp.arange(text.shape[1]), 0)
        places, agreed = best_places(
            overlap, left, count=self.candidates, length=self.length, least=self.min_ngram
        )
        offered = jnp.take_along_axis(left, places, axis=1)
        tokens = after(text, places, self.length)
        return merged(root, tokens, offered, agreed, nodes=self.nodes), state
