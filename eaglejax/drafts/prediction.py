"""Predicted output: the caller hands over text that the answer will mostly repeat (a file to be edited, say).

Every round the end of the committed text is looked for in the prediction, and what stands behind it there
becomes the draft. That one rule follows the prediction while the two agree and finds the way back after an
insertion, a deletion or a replacement, and it asks nothing of how the text was cut into tokens: where the
answer tokenises a word differently (its first token, often), the next few tokens agree again. No weights, no
draws: the distribution is one-hot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import pytree
from eaglejax.drafts.base import Draft, Observation, Proposal, Request
from eaglejax.drafts.limits import MOST_DEPTH, MOST_NGRAM, check_count
from eaglejax.drafts.ngram import (
    last_tokens,
    lookup,
    remember,
    suffix_overlap,
    take_from,
    with_root,
)
from eaglejax.drafts.static import OnChain, chain_draft
from eaglejax.errors import MismatchError
from eaglejax.sampling import RowSampling


@pytree.dataclass
class Predictions:
    """The predicted text of each row: ``tokens`` [B, P] int32, the first ``count`` [B] int32 are real."""

    tokens: jax.Array
    count: jax.Array


@pytree.dataclass
class PredictionState:
    """``predictions``: the rows' inputs. ``history`` [B, C] int32: the row's tokens at their positions.
    ``shift`` [B] int32: where the prediction is being followed, as (place in the prediction) - (position in
    the row). ``started`` [B] bool: a draft has been made."""

    predictions: Predictions
    history: jax.Array
    shift: jax.Array
    started: jax.Array


@dataclasses.dataclass(frozen=True)
class Prediction(OnChain[None, PredictionState]):
    """Drafts from the caller's prediction, a chain of up to ``length`` tokens.

    ``memory``: how many tokens of agreement are told apart. Raises ConfigError for settings beyond
    ``limits``.

    The order of preference in a round: the place in the prediction with the longest agreement (ties: the
    nearest at or after the followed place, then the nearest before it); without any, the row's own earlier
    text (:func:`~eaglejax.drafts.ngram.lookup`); without that too, the prediction goes on as if the last
    token had replaced the predicted one.
    """

    reads_predictions: ClassVar[bool] = True

    length: int = 15
    memory: int = 16

    def __post_init__(self) -> None:
        check_count("Prediction: length", self.length, MOST_DEPTH)
        check_count("Prediction: memory", self.memory, MOST_NGRAM)

    @property
    def draws(self) -> bool:
        """No: what is looked up follows from the text."""
        return False

    def inputs(self, requests: Sequence[Request], slots: int) -> Predictions:
        """The predicted token ids of each request as padded arrays.

        A request without a prediction, or with an empty one, uses prompt lookup alone. The width is padded to
        a power of two of at least 64, so that texts of different lengths share a compilation. Raises
        MismatchError for more requests than slots.
        """
        if len(requests) > slots:
            raise MismatchError(f"{len(requests)} requests do not fit {slots} rows")
        texts = [np.asarray(r.prediction or (), np.int32) for r in requests]
        longest = max((len(t) for t in texts), default=0)
        width = max(64, 1 << max(longest - 1, 0).bit_length())
        tokens = np.zeros((slots, width), np.int32)
        count = np.zeros((slots,), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
            count[row] = len(text)
        return Predictions(tokens=jnp.asarray(tokens), count=jnp.asarray(count))

    def init(self, params: None, *, batch: int, capacity: int, inputs: Any = ()) -> PredictionState:
        """An empty history; the prediction is followed from its start. Without ``inputs`` no row has one."""
        del params
        predictions = inputs or self.inputs((), batch)
        if predictions.tokens.shape[0] != batch:
            raise MismatchError(
                f"predictions for {predictions.tokens.shape[0]} rows do not fit a batch of {batch}"
            )
        return PredictionState(
            predictions=predictions,
            history=jnp.zeros((batch, capacity), jnp.int32),
            shift=jnp.zeros((batch,), jnp.int32),
            started=jnp.zeros((batch,), bool),
        )

    def observe(self, params: None, state: PredictionState, seen: Observation) -> PredictionState:
        """Write the committed tokens at their positions."""
        del params
        return dataclasses.replace(state, history=remember(state.history, seen))

    def propose(
        self,
        params: None,
        state: PredictionState,
        root: jax.Array,
        lengths: jax.Array,
        rows: RowSampling,
        keys: jax.Array,
    ) -> tuple[Draft, PredictionState]:
        """What follows the followed place of the prediction, or the row's own earlier text."""
        del params, rows, keys
        told = state.predictions
        text = with_root(state.history, root, lengths)
        # The first root is the first token of the answer, so it is expected to be the prediction's first.
        shift = jnp.where(state.started, state.shift, -lengths)
        expected = jnp.clip(lengths + shift, 0, told.count)

        place = jnp.arange(told.tokens.shape[1])
        tail = last_tokens(text, lengths, self.memory)
        # Agreement may reach back before the answer's start; the prompt often ends with the same words.
        overlap = suffix_overlap(told.tokens, tail, lengths + 1)
        away = place - expected[:, None]
        reach = place.shape[0]
        nearness = jnp.where(away >= 0, 2 * reach - away, reach + away)
        # The place after the last predicted token offers nothing, so a match that ends there is none.
        usable = (place + 1 < told.count[:, None]) & (overlap > 0)
        score = jnp.where(usable, overlap * (2 * reach + 1) + nearness, -1)
        end = jnp.argmax(score, axis=1).astype(jnp.int32)
        agreed = jnp.where(usable.any(1), jnp.take_along_axis(overlap, end[:, None], axis=1)[:, 0], 0)

        own, own_count, own_agreed = lookup(
            text, lengths, length=self.length, max_ngram=self.memory, min_ngram=1
        )
        nothing = (agreed == 0) & (own_agreed == 0)
        start = jnp.where(nothing, expected, end) + 1
        from_prediction = nothing | (agreed > 0)
        count = jnp.where(from_prediction, jnp.clip(told.count - start, 0, self.length), own_count)
        tokens = jnp.where(from_prediction[:, None], take_from(told.tokens, start, self.length), own)

        state = dataclasses.replace(
            state, shift=jnp.where(agreed > 0, end - lengths, shift), started=jnp.ones_like(state.started)
        )
        return chain_draft(root, tokens, count, Proposal()), state
