"""What a draft is trained for: EAGLE-3, EAGLE-1, HASS and P-EAGLE as settings of one loss over steps.

EAGLE-3 (Li et al. 2025): K steps, each scored by the distance between the distributions. EAGLE-1 (Li et al.
2024): one step, scored by the distance between the predicted and the true feature, plus a small cross
entropy through the target's head. HASS (Zhang et al. 2024): EAGLE-1's loss at K steps, each fed the states
of the one before, plus a cross entropy on the target's ten likeliest tokens. P-EAGLE (Hui et al. 2026):
EAGLE-3's loss at K steps, of which all but the first read masks. Its authors train step k at a share r^k of
the positions, drawn anew each time, to save memory; here each step is trained everywhere and weighs r^k
(``step_decay``), which has the same expectation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.drafts.eagle.unroll import unroll
from eaglejax.drafts.passes import StepAttention, step_attention
from eaglejax.errors import ConfigError
from eaglejax.train.batch import Batch, shift
from eaglejax.train.chain import chain_loss, noisy
from eaglejax.train.losses import balance
from eaglejax.train.objective import Objective
from eaglejax.train.objectives import Head, Metrics


def objective_loss(
    params: EagleParams,
    config: EagleConfig,
    objective: Objective,
    head: Head,
    batch: Batch,
    rows: jax.Array,
    key: jax.Array | None = None,
    attention: StepAttention = step_attention,
) -> tuple[jax.Array, Metrics]:
    """(loss, metrics) of one micro-batch.

    ``rows`` [K] f32: trained rows of each step in the *whole* update (all micro-batches, all devices; see
    ``trained_rows``), the denominators, so that the sum over micro-batches is the loss of the update. ``key``
    draws the feature noise. ``attention``: see ``training_attention``.
    """
    features = _joined(batch.hidden) if config.reads_final else batch.aux
    if features is None or batch.hidden is None:
        raise ConfigError("the batch lacks the target's features that this draft reads")
    features = noisy(features, objective, key)
    routed: list[list[jax.Array]] = []
    states = unroll(
        params,
        config,
        features.astype(eagle_model.dtype_of(params.weights)),
        shift(batch.tokens, 1),
        objective.steps,
        positions=batch.positions,
        documents=batch.documents,
        attention=attention,
        through_time=objective.algorithm != "hass",
        routing=routed,
    )

    def logits(params: EagleParams, state: jax.Array, step: int) -> jax.Array:
        del step
        return eagle_model.logits(params, config, state)

    def spread(step: int, mask: jax.Array) -> jax.Array | float:
        return _balance(config, routed[step], mask)

    return chain_loss(objective, head, batch, rows, params, states, logits, balance=spread)


def _balance(config: EagleConfig, routed: list[jax.Array], mask: jax.Array) -> jax.Array | float:
    """Sum over layers with experts of ``losses.balance`` of the trained rows; 0 for a dense draft."""
    if config.moe is None:
        return 0.0
    return sum((balance(logits, mask, config.experts_per_token) for logits in routed), start=jnp.float32(0))


def _joined(hidden: jax.Array | None) -> jax.Array | None:
    return None if hidden is None else hidden[:, :, None]
