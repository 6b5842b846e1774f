"""The loss of a chain of draft steps, whatever network made their states: EAGLE's unrolled passes, or the
modules of an MTP draft.

Row t of step k predicts the distribution of x_{t+2+k}; see ``train.batch`` for the alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax.errors import ConfigError
from eaglejax.train.batch import Batch, row_mask, shift
from eaglejax.train.losses import (
    Teacher,
    acceptance,
    dpace_weights,
    fused_cross_entropy,
    masked_loss,
    smooth_l1,
    teacher,
)
from eaglejax.train.objective import Objective
from eaglejax.train.objectives import Head, Metrics

Logits = Callable[[Any, jax.Array, int], jax.Array]
"""(parameters, states [B, T, H] of a step, step) -> logits [B, T, Vd] f32."""

_KEPT_LOGITS = 1 << 29
"""Bytes of float32 draft logits that an update may hold between its two passes."""


def noisy(features: jax.Array, objective: Objective, key: jax.Array | None) -> jax.Array:
    """``features`` with the objective's uniform noise (EAGLE, Li et al. 2024), as they are without a key."""
    if objective.noise <= 0 or key is None:
        return features
    noise = jax.random.uniform(key, features.shape, jnp.float32, -objective.noise, objective.noise)
    return (features.astype(jnp.float32) + noise).astype(features.dtype)


def chain_loss(
    objective: Objective,
    head: Head,
    batch: Batch,
    rows: jax.Array,
    params: Any,
    states: Sequence[jax.Array],
    logits: Logits,
    *,
    balance: Callable[[int, jax.Array], jax.Array | float] | None = None,
) -> tuple[jax.Array, Metrics]:
    """(loss, metrics) of one micro-batch whose steps have ``states`` [B, T, H] each, which ``logits`` reads
    with ``params``.

    ``rows`` [K] f32: trained rows of each step in the *whole* update (all micro-batches, all devices; see
    ``trained_rows``), the denominators, so that the sum over micro-batches is the loss of the update.
    ``balance``: of a step and its mask [B, T], what is added to its summed loss, weighted by
    ``balance_weight``. Raises ConfigError for a batch without the target's last state, and for "hard_ce" with
    a reduced vocabulary.
    """
    if batch.hidden is None:
        raise ConfigError("the batch lacks the target's last state, which the teacher is made of")
    if objective.loss == "hard_ce" and head.ids is not None:
        raise ConfigError("objective.loss 'hard_ce' asks for the text's own tokens, for the whole vocabulary")
    everything = teacher(head.logits(batch.hidden), batch.log_norm)
    best, known = _targets(everything, head, batch)
    total = jnp.zeros((), jnp.float32)
    starts = alive = row_mask(batch, 0)
    parts: list[dict[str, jax.Array]] = []
    entropies, masks = [], []
    for k, (state, weight) in enumerate(zip(states, objective.weights, strict=True)):
        mask = _mask(objective, batch, known, k)
        value, guess, kept, entropy = _step_loss(params, logits, objective, everything, batch, state, mask, k)
        even = 0.0 if balance is None else objective.balance_weight * balance(k, mask)
        if objective.position_weights == "dpace":
            assert entropy is not None  # the loss is "hard_ce"
            entropies.append(entropy)
            masks.append(mask)
            total = total + weight * even / jnp.maximum(rows[k], 1.0)
        else:
            total = total + weight * (value + even) / jnp.maximum(rows[k], 1.0)
        judged = row_mask(batch, k)
        guess = guess if head.ids is None else jnp.take(head.ids, guess)
        right = judged & (guess == shift(best, 1 + k))
        alive = alive & right
        parts.append(
            {
                "loss": value,
                "rows": _sum(mask),
                "hits": _sum(right),
                "judged": _sum(judged),
                "chain": _sum(alive),
                "accept": jnp.sum(jnp.where(judged, kept, 0.0)),
            }
        )
    if entropies:
        trained, each = jnp.stack(masks), jnp.stack(entropies)
        weighed = dpace_weights(each, trained, objective.dpace_alpha) * jnp.where(trained, each, 0.0)
        total = total + jnp.sum(jnp.sum(weighed, axis=(1, 2)) / jnp.maximum(rows, 1.0))
    stacked = {name: jnp.stack([p[name] for p in parts]) for name in parts[0]}
    metrics = Metrics(chains=_sum(starts), **stacked)
    return total, jax.lax.stop_gradient(metrics)


def trained_rows(objective: Objective, head: Head, batch: Batch) -> jax.Array:
    """Denominators [K] f32 of one micro-batch under the normaliser; to be summed over the update."""
    if objective.normaliser == "positions":
        return jnp.full((objective.steps,), float(batch.tokens.size), jnp.float32)
    known = None
    if objective.out_of_vocabulary == "drop" and batch.top is not None and head.ids is not None:
        known = _is_known(batch.top, head.ids)
    return jnp.stack([_sum(_mask(objective, batch, known, k)) for k in range(objective.steps)])


def _sum(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.float32)


def _shifted(teach: Teacher, by: int) -> Teacher:
    return Teacher(shift(teach.log_p, by), shift(teach.inside, by))


def _is_known(top: jax.Array, ids: jax.Array) -> jax.Array:
    """Whether each target id [B, T] is in the draft's vocabulary ``ids`` [Vd], ascending."""
    at = jnp.clip(jnp.searchsorted(ids, top), 0, ids.shape[0] - 1)
    return jnp.take(ids, at) == top


def _targets(teach: Teacher, head: Head, batch: Batch) -> tuple[jax.Array, jax.Array | None]:
    """The target's likeliest id at every row, and whether the draft knows it (None: it does).

    Without ``batch.top`` the likeliest *known* token stands in for it, so that unknown ones go unnoticed.
    """
    if batch.top is not None:
        return batch.top, None if head.ids is None else _is_known(batch.top, head.ids)
    best = jnp.argmax(teach.log_p, axis=-1)
    return (best if head.ids is None else jnp.take(head.ids, best)), None


def _mask(objective: Objective, batch: Batch, known: jax.Array | None, step: int) -> jax.Array:
    mask = row_mask(batch, step, objective.alignment)
    if known is None or objective.out_of_vocabulary == "keep":
        return mask
    return mask & shift(known, 1 + step)


def _step_loss(
    params: Any,
    logits_of: Logits,
    objective: Objective,
    everything: Teacher,
    batch: Batch,
    state: jax.Array,
    mask: jax.Array,
    step: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """(summed loss of one step, the draft's likeliest token [B, T] int32 as an index into its vocabulary, the
    chance that its sampled draft is kept [B, T], with "hard_ce" the loss of each row [B, T])."""

    def score(params: Any, state: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        each = None
        logits = logits_of(params, state, step)
        teach = _shifted(everything, 1 + step)
        if objective.loss == "soft_ce":
            entropy, *figures = fused_cross_entropy(teach, logits, state.dtype)
            value = jnp.sum(jnp.where(mask, entropy, 0.0))
        elif objective.loss == "hard_ce":
            log_q = jax.nn.log_softmax(logits, axis=-1)
            label = shift(batch.tokens, 2 + step)[..., None]
            each = -jnp.take_along_axis(log_q, label, axis=-1)[..., 0]
            value = jnp.sum(jnp.where(mask, each, 0.0))
            figures = [jnp.argmax(log_q, axis=-1), acceptance(teach, log_q)]
        else:
            log_q = jax.nn.log_softmax(logits, axis=-1)
            value = masked_loss(
                objective.loss,
                teach,
                log_q,
                mask,
                kl_scale=objective.kl_scale,
                kl_decay=objective.kl_decay,
            )
            figures = [jnp.argmax(log_q, axis=-1), acceptance(teach, log_q)]
        guess, kept = map(jax.lax.stop_gradient, figures)
        if not objective.regresses:
            return value, guess, kept, each
        assert batch.hidden is not None
        value *= objective.token_weight
        distance = smooth_l1(state, shift(batch.hidden, 1 + step))
        value += objective.feature_weight * jnp.sum(jnp.where(mask, distance, 0.0))
        if objective.algorithm == "hass":
            log_q = jax.nn.log_softmax(logits, axis=-1)
            log_p, at = jax.lax.top_k(teach.log_p, min(objective.top_tokens, teach.log_p.shape[-1]))
            likeliest = -jnp.sum(jnp.exp(log_p) * jnp.take_along_axis(log_q, at, axis=-1), axis=-1)
            value += objective.top_weight * jnp.sum(jnp.where(mask, likeliest, 0.0))
        return value, guess, kept, each

    with jax.named_scope(f"loss_{step}"):
        # Logits over the vocabulary are the largest arrays of an update. Where they are too large to be kept
        # for the backward pass, they are computed again there, for a third more of the head's work.
        kept = 4 * objective.steps * state.shape[0] * state.shape[1] * everything.log_p.shape[-1]
        return (score if kept <= _KEPT_LOGITS else jax.checkpoint(score))(params, state)
