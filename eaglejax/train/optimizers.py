"""Optimisers as Optax chains: AdamW (Loshchilov & Hutter 2019) and Muon (Jordan et al. 2024)."""

from __future__ import annotations

import optax

from eaglejax.train.settings import OptimizerSettings


def schedule(settings: OptimizerSettings, updates: int) -> optax.Schedule:
    """Learning rate of each update, counted from 0: linear warm-up, then the chosen fall, which ends at
    ``updates``."""
    peak, rest = settings.learning_rate, updates - settings.warmup
    if settings.schedule == "constant":
        after: optax.Schedule = optax.constant_schedule(peak)
    elif settings.schedule == "linear":
        after = optax.linear_schedule(peak, peak * settings.final, rest)
    else:
        after = optax.cosine_decay_schedule(peak, rest, settings.final)
    # The first update already moves: warm-up starts one step above zero.
    first = peak / (settings.warmup + 1)
    return optax.join_schedules(
        [optax.linear_schedule(first, peak, settings.warmup), after], [settings.warmup]
    )


def optimizer(settings: OptimizerSettings, updates: int) -> optax.GradientTransformation:
    """Clipping by global norm and the optimiser under its schedule.

    Muon orthogonalises the momentum of matrices (five Newton-Schulz steps) and scales it so that its root
    mean square is that of an AdamW step (Liu et al. 2025); one learning rate thus serves both kinds of
    parameters. What is no matrix gets AdamW with Nesterov momentum, as Optax has it.
    """
    rate = schedule(settings, updates)
    if settings.name == "muon":
        inner = optax.contrib.muon(
            rate,
            beta=settings.beta2,
            weight_decay=settings.weight_decay,
            adam_b1=settings.beta1,
            adam_b2=settings.beta2,
            consistent_rms=0.2,
        )
    else:
        inner = optax.adamw(rate, settings.beta1, settings.beta2, weight_decay=settings.weight_decay)
    return optax.chain(optax.clip_by_global_norm(settings.clip), inner) if settings.clip else inner
