"""How far a draft's distribution is from the target's, per position.

The draft knows Vd of the target's V tokens. The *teacher* is the target's distribution renormalised on those
Vd tokens; what the rest of the vocabulary holds enters only through ``inside``, the mass that the draft can
reach at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.train.objective import Loss
from kernels_pallas.soft_cross_entropy import soft_cross_entropy as soft_cross_entropy_rows


@pytree.dataclass
class Teacher:
    """``log_p`` [..., Vd] f32: log-softmax over the draft vocabulary. ``inside`` [...] f32: the target's
    probability of that vocabulary (1 when unknown or full)."""

    log_p: jax.Array
    inside: jax.Array


def teacher(logits: jax.Array, log_norm: jax.Array | None = None) -> Teacher:
    """From target ``logits`` [..., Vd] of the draft's tokens and all V logits' log-sum-exp, if known."""
    logits = logits.astype(jnp.float32)
    reach = jax.nn.logsumexp(logits, axis=-1)
    inside = jnp.ones_like(reach) if log_norm is None else jnp.exp(jnp.minimum(reach - log_norm, 0.0))
    return jax.lax.stop_gradient(Teacher(logits - reach[..., None], inside))


def acceptance(teach: Teacher, log_q: jax.Array) -> jax.Array:
    """Chance that speculative sampling keeps a draft from q: sum_v min(p, q), p unrenormalised; [...] f32."""
    return jnp.sum(jnp.minimum(jnp.exp(teach.log_p) * teach.inside[..., None], jnp.exp(log_q)), axis=-1)


def fused_cross_entropy(
    teach: Teacher, logits: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """-sum_v p log q (Li et al. 2025) of the draft's ``logits`` [..., Vd] f32, their likeliest index and
    ``acceptance``, from one look at each row: [...] f32, [...] int32, [...] f32.

    ``dtype``: in which a row's gradient is kept for the backward pass.
    """
    shape, size = logits.shape[:-1], logits.shape[-1]
    entropy, accept, best = soft_cross_entropy_rows(
        logits.reshape(-1, size), teach.log_p.reshape(-1, size), teach.inside.reshape(-1), dtype=dtype
    )
    return entropy.reshape(shape), best.reshape(shape), accept.reshape(shape)


def kl_divergence(teach: Teacher, log_q: jax.Array) -> jax.Array:
    """sum_v p log(p / q); its gradient is that of the soft cross entropy."""
    return jnp.sum(jnp.exp(teach.log_p) * (teach.log_p - log_q), axis=-1)


def total_variation(teach: Teacher, log_q: jax.Array) -> jax.Array:
    """Half of sum_v |p - q| over the draft vocabulary, p renormalised; 1 - acceptance when all mass is
    inside."""
    return 0.5 * jnp.sum(jnp.abs(jnp.exp(teach.log_p) - jnp.exp(log_q)), axis=-1)


POINTWISE: dict[str, Callable[[Teacher, jax.Array], jax.Array]] = {
    "kl": kl_divergence,
    "tv": total_variation,
}
"""Losses that are sums over positions, but for "soft_ce", which is ``fused_cross_entropy``."""


def masked_loss(
    kind: Loss,
    teach: Teacher,
    log_q: jax.Array,
    mask: jax.Array,
    *,
    kl_scale: float = 1.0,
    kl_decay: float = 1.0,
) -> jax.Array:
    """A loss other than "soft_ce" of the rows in ``mask`` [...] bool, summed (scalar f32).

    The two LK losses optimise the acceptance rate a itself, averaged over the masked rows: "lk_alpha" is
    -log a, "lk_lambda" is w KL + (1 - w)(1 - a) with w = kl_scale exp(-kl_decay a), which leans on KL while
    acceptance is low. Being functions of an average they are multiplied by the number of rows. Masked rows
    contribute neither value nor gradient, whatever they hold. The average is that of ``mask``: such a loss
    depends on what stands in one micro-batch.
    """
    if kind in POINTWISE:
        return jnp.sum(jnp.where(mask, POINTWISE[kind](teach, log_q), 0.0))
    rows = jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)
    mean = jnp.sum(jnp.where(mask, acceptance(teach, log_q), 0.0)) / rows
    if kind == "lk_alpha":
        value = -jnp.log(jnp.maximum(mean, 1e-6))
    else:
        divergence = jnp.sum(jnp.where(mask, kl_divergence(teach, log_q), 0.0)) / rows
        weight = jax.lax.stop_gradient(kl_scale * jnp.exp(-kl_decay * mean))
        value = weight * divergence + (1.0 - weight) * (1.0 - mean)
    return value * jnp.sum(mask, dtype=jnp.float32)


def dpace_weights(entropy: jax.Array, mask: jax.Array, alpha: float) -> jax.Array:
    """D-PACE's weights [K, ...] f32 of a block's K guesses, by how far along it drafts are likely to get.

    ``entropy`` [K, ...]: -log q of the text's own tokens; ``mask`` [K, ...] bool: trained guesses. With
    c_k = (1 - alpha) q_k + alpha, guess k weighs sum_{j >= k} prod_{i <= j} c_i: how likely a draft reaches
    it, times what is to be had from there on. Guesses out of ``mask`` weigh 0 and change no other's weight.
    No gradient passes.
    """
    confidence = jnp.where(mask, (1.0 - alpha) * jnp.exp(-entropy) + alpha, 1.0)
    reached = jnp.where(mask, jnp.cumprod(confidence, axis=0), 0.0)
    ahead = jnp.flip(jnp.cumsum(jnp.flip(reached, 0), axis=0), 0)
    return jax.lax.stop_gradient(jnp.where(mask, ahead, 0.0))


def smooth_l1(predicted: jax.Array, true: jax.Array) -> jax.Array:
    """Huber loss with beta 1 (Girshick 2015), averaged over the last axis; [...] f32."""
    d = jnp.abs(predicted.astype(jnp.float32) - true.astype(jnp.float32))
    return jnp.mean(jnp.where(d < 1.0, 0.5 * d * d, d - 0.5), axis=-1)


def balance(logits: jax.Array, mask: jax.Array, chosen: int) -> jax.Array:
    """Sum over the rows of ``mask`` [B, T] of how unevenly router ``logits`` [B, T, E] spread them; 1 a row
    when they spread evenly, E / ``chosen`` when all take the same experts.

    The Switch Transformer's product of load and probability (Fedus et al. 2021), taken within each text row
    as in DeepSeek-V3 and weighted by its number of masked positions, so that rows add up however they are
    batched.
    """
    experts = logits.shape[-1]
    where = mask[..., None].astype(jnp.float32)
    count = jnp.sum(where, axis=1)
    picked = jax.nn.one_hot(jax.lax.top_k(logits, chosen)[1], experts, dtype=jnp.float32).sum(axis=-2)
    load = jnp.sum(picked * where, axis=1) / jnp.maximum(count, 1.0) / chosen
    probability = jnp.sum(jax.nn.softmax(logits, axis=-1) * where, axis=1) / jnp.maximum(count, 1.0)
    return jnp.sum(count[:, 0] * experts * jnp.sum(load * probability, axis=-1))
