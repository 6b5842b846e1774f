"""What a draft is trained for: EAGLE-3, EAGLE-1 and HASS as settings of one loss over unrolled steps.

EAGLE-3 (Li et al. 2025): K steps, each scored by the distance between the laws. EAGLE-1 (Li et al. 2024): one
step, scored by the distance between the predicted and the true feature, plus a small cross entropy through
the target's head. HASS (Zhang et al. 2024): EAGLE-1's loss at K steps, each fed the states of the one before,
plus a cross entropy on the target's ten likeliest tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.drafts.eagle.unroll import StepAttention, step_attention, unroll
from eaglejax.errors import ConfigError
from eaglejax.nn.linear import linear
from eaglejax.train.batch import Alignment, Batch, row_mask, shift
from eaglejax.train.losses import (
    Loss,
    Teacher,
    acceptance,
    balance,
    fused_cross_entropy,
    masked_loss,
    smooth_l1,
    teacher,
)

Algorithm = Literal["eagle3", "eagle1", "hass"]
OBJECTIVES: dict[str, tuple[str, ...]] = {"EAGLE": get_args(Algorithm)}
"""The algorithms that train each family of drafts, by ``DraftFamily.name``; others are run only."""

_KEPT_LOGITS = 1 << 29
"""Bytes of float32 draft logits that an update may hold between its two passes."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """Which loss.

    ``steps``: K, chain steps unrolled (1 for EAGLE-1). ``step_decay``: step k weighs ``step_decay ** k``
    unless ``step_weights`` names the weights. ``loss``: distance between the laws. ``kl_scale``,
    ``kl_decay``: of "lk_lambda". ``alignment``: see ``batch.row_mask``. ``normaliser``: "tokens" divides each
    step's sum by the number of its trained rows in the whole update; "positions" divides by all B * T
    positions, padding and prompts included (SpecForge). ``out_of_vocabulary``: what happens to rows whose
    likeliest target token the draft does not know: "drop" them from the loss, or "keep" them (renormalised).
    ``noise``: half-width of the uniform noise added to the features. ``feature_weight``, ``token_weight``: of
    EAGLE-1's two terms. ``top_weight``, ``top_tokens``: of HASS's third. ``balance_weight``: of the term that
    spreads tokens over the experts of a draft that has them, see ``losses.balance``.
    """

    algorithm: Algorithm = "eagle3"
    steps: int = 5
    step_decay: float = 0.8
    step_weights: tuple[float, ...] = ()
    loss: Loss = "soft_ce"
    kl_scale: float = 1.0
    kl_decay: float = 1.0
    alignment: Alignment = "tight"
    normaliser: Literal["tokens", "positions"] = "tokens"
    out_of_vocabulary: Literal["drop", "keep"] = "drop"
    noise: float = 0.0
    feature_weight: float = 1.0
    token_weight: float = 0.1
    top_weight: float = 1.0
    top_tokens: int = 10
    balance_weight: float = 0.01

    def __post_init__(self) -> None:
        for name, known in (
            ("algorithm", get_args(Algorithm)),
            ("loss", get_args(Loss)),
            ("alignment", get_args(Alignment)),
            ("normaliser", ("tokens", "positions")),
            ("out_of_vocabulary", ("drop", "keep")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"objective.{name} {getattr(self, name)!r} is not known; use one of {', '.join(known)}"
                )
        if self.steps < 1:
            raise ConfigError(f"objective.steps is {self.steps}; at least one step is trained")
        if self.algorithm == "eagle1" and self.steps != 1:
            raise ConfigError(
                f"EAGLE-1 trains one step, not {self.steps}; its form with more steps is algorithm = 'hass'"
            )
        if self.step_weights and self.step_decay != Objective.step_decay:
            raise ConfigError("objective.step_decay has no effect beside objective.step_weights; give one")
        if self.step_weights and len(self.step_weights) != self.steps:
            raise ConfigError(f"{len(self.step_weights)} step_weights for {self.steps} steps; give one each")
        if any(w < 0 for w in self.weights) or not any(self.weights):
            raise ConfigError(f"step weights {list(self.weights)} must not be negative, nor all zero")
        for names, used, where in (
            (("loss",), self.algorithm == "eagle3", "algorithm = 'eagle3'"),
            (("kl_scale", "kl_decay"), self.loss == "lk_lambda", "loss = 'lk_lambda'"),
            (("feature_weight", "token_weight"), self.version == 1, "algorithm = 'eagle1' or 'hass'"),
            (("top_weight", "top_tokens"), self.algorithm == "hass", "algorithm = 'hass'"),
        ):
            for name in names:
                if not used and getattr(self, name) != getattr(Objective, name):
                    raise ConfigError(f"objective.{name} has an effect with {where} alone")
        for name in ("kl_scale", "kl_decay", "noise", "feature_weight", "token_weight", "top_weight"):
            if getattr(self, name) < 0:
                raise ConfigError(f"objective.{name} is {getattr(self, name)}; it must not be negative")
        if self.balance_weight < 0 or self.top_tokens < 1:
            raise ConfigError(
                "objective.balance_weight must not be negative and objective.top_tokens at least 1"
            )
        weights = [self.feature_weight, self.token_weight]
        weights += [self.top_weight] if self.algorithm == "hass" else []
        if self.version == 1 and not any(weights):
            raise ConfigError("all weights of the objective are 0; nothing is trained")

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each step."""
        return self.step_weights or tuple(self.step_decay**k for k in range(self.steps))

    @property
    def version(self) -> int:
        """EAGLE version of the drafts it trains."""
        return 3 if self.algorithm == "eagle3" else 1


@pytree.dataclass
class Metrics:
    """Sums over trained rows, one entry a step [K] f32, so that batches and devices add up.

    ``loss``: the unweighted loss sum, ``rows`` its trained rows. ``hits``: rows whose likeliest token is the
    target's, a token that the draft does not know being a miss; ``judged``: rows it is counted over (those of
    "tight" alignment whatever the loss leaves out). ``chain``: hits at this and every earlier step of the
    chain. ``chains``: rows that start a chain, [] f32. ``accept``: sum of the chance that a sampled draft is
    kept.
    """

    loss: jax.Array
    rows: jax.Array
    hits: jax.Array
    judged: jax.Array
    chain: jax.Array
    chains: jax.Array
    accept: jax.Array


@pytree.dataclass
class Head:
    """How target logits over the draft's tokens come about: ``weight`` [Ht, Vd] ([Vd, Ht] when ``tied``), the
    id map [Vd] (None: all ids), a softcap."""

    weight: jax.Array
    ids: jax.Array | None = None
    softcap: float | None = pytree.static(default=None)
    tied: bool = pytree.static(default=False)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., Vd] f32 of ``hidden`` [..., Ht], which is after the target's final norm."""
        hidden = hidden.astype(self.weight.dtype)
        out = linear(hidden, self.weight, transposed=self.tied, dtype=jnp.float32)
        return out if self.softcap is None else self.softcap * jnp.tanh(out / self.softcap)


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
    draws the feature noise. ``attention``: see ``train.attention``.
    """
    features = _joined(batch.hidden) if config.reads_final else batch.aux
    if features is None or batch.hidden is None:
        raise ConfigError("the batch lacks the target's features that this draft reads")
    if objective.noise > 0 and key is not None:
        noise = jax.random.uniform(key, features.shape, jnp.float32, -objective.noise, objective.noise)
        features = (features.astype(jnp.float32) + noise).astype(features.dtype)
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
    everything = teacher(head.logits(batch.hidden), batch.log_norm)
    best, known = _targets(everything, head, batch)
    total = jnp.zeros((), jnp.float32)
    starts = alive = row_mask(batch, 0)
    parts: list[dict[str, jax.Array]] = []
    for k, (state, weight) in enumerate(zip(states, objective.weights, strict=True)):
        mask = _mask(objective, batch, known, k)
        value, guess, kept = _step_loss(params, config, objective, everything, batch, state, mask, k)
        summed = value + objective.balance_weight * _balance(config, routed[k], mask)
        total = total + weight * summed / jnp.maximum(rows[k], 1.0)
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


def _balance(config: EagleConfig, routed: list[jax.Array], mask: jax.Array) -> jax.Array | float:
    """Sum over layers with experts of ``losses.balance`` of the trained rows; 0 for a dense draft."""
    if config.moe is None:
        return 0.0
    return sum((balance(logits, mask, config.experts_per_token) for logits in routed), start=jnp.float32(0))


def _joined(hidden: jax.Array | None) -> jax.Array | None:
    return None if hidden is None else hidden[:, :, None]


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
    params: EagleParams,
    config: EagleConfig,
    objective: Objective,
    everything: Teacher,
    batch: Batch,
    state: jax.Array,
    mask: jax.Array,
    step: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(summed loss of one step, the draft's likeliest token [B, T] int32 as an index into its vocabulary, the
    chance that its sampled draft is kept [B, T])."""

    def score(params: EagleParams, state: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits = eagle_model.logits(params, config, state)
        teach = _shifted(everything, 1 + step)
        if objective.loss == "soft_ce":
            entropy, *figures = fused_cross_entropy(teach, logits, state.dtype)
            value = jnp.sum(jnp.where(mask, entropy, 0.0))
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
        if objective.version == 3:
            return value, guess, kept
        assert batch.hidden is not None
        value *= objective.token_weight
        distance = smooth_l1(state, shift(batch.hidden, 1 + step))
        value += objective.feature_weight * jnp.sum(jnp.where(mask, distance, 0.0))
        if objective.algorithm == "hass":
            log_q = jax.nn.log_softmax(logits, axis=-1)
            log_p, at = jax.lax.top_k(teach.log_p, min(objective.top_tokens, teach.log_p.shape[-1]))
            likeliest = -jnp.sum(jnp.exp(log_p) * jnp.take_along_axis(log_q, at, axis=-1), axis=-1)
            value += objective.top_weight * jnp.sum(jnp.where(mask, likeliest, 0.0))
        return value, guess, kept

    with jax.named_scope(f"loss_{step}"):
        # Logits over the vocabulary are the largest arrays of an update. Where they are too large to be kept
        # for the backward pass, they are computed again there, for a third more of the head's work.
        kept = 4 * objective.steps * state.shape[0] * state.shape[1] * config.draft_vocab_size
        return (score if kept <= _KEPT_LOGITS else jax.checkpoint(score))(params, state)
