"""What a run asks of a loss. Nothing here imports jax: a run's file is refused before."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from eaglejax.errors import ConfigError

Loss = Literal["soft_ce", "kl", "tv", "lk_alpha", "lk_lambda", "hard_ce"]
"""Distances between the distributions; "hard_ce" is -log q of the text's own token instead."""

Alignment = Literal["tight", "inputs", "unshifted"]
"""Which rows of a batch are trained, see ``batch.row_mask``."""

MOST_STEPS = 64
"""Chain steps that are unrolled."""

Algorithm = Literal["eagle3", "eagle1", "hass", "peagle", "mtp", "dflash", "medusa"]


@dataclasses.dataclass(frozen=True)
class Objective:
    """Which loss.

    ``steps``: K, chain steps unrolled (1 for EAGLE-1), or heads (Medusa). ``step_decay``: step k weighs
    ``step_decay ** k`` unless ``step_weights`` names the weights, or ``position_weights`` is "dpace": then
    each row's confidence in "hard_ce" tokens, smoothed by ``dpace_alpha``, weighs its steps (see
    ``losses.dpace_weights``). ``loss``: distance between the distributions. ``kl_scale``, ``kl_decay``: of
    "lk_lambda". ``alignment``: see ``batch.row_mask``. ``normaliser``: "tokens" divides each step's sum by
    the number of its trained rows in the whole update; "positions" divides by all B * T positions, padding
    and prompts included (SpecForge).
    ``out_of_vocabulary``: what happens to rows whose
    likeliest target token the draft does not know: "drop" them from the loss, or "keep" them (renormalised).
    ``noise``: half-width of the uniform noise added to the features. ``feature_weight``, ``token_weight``: of
    EAGLE-1's two terms. ``top_weight``, ``top_tokens``: of HASS's third. ``balance_weight``: of the term that
    spreads tokens over the experts of a draft that has them, see ``losses.balance``.
    """

    algorithm: Algorithm = "eagle3"
    steps: int = 5
    step_decay: float = 0.8
    step_weights: tuple[float, ...] = ()
    position_weights: Literal["steps", "dpace"] = "steps"
    dpace_alpha: float = 0.5
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
            ("position_weights", ("steps", "dpace")),
            ("out_of_vocabulary", ("drop", "keep")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"objective.{name} {getattr(self, name)!r} is not known; use one of {', '.join(known)}"
                )
        if not 1 <= self.steps <= MOST_STEPS:
            raise ConfigError(
                f"objective.steps is {self.steps}; at least one step and at most {MOST_STEPS} are trained"
            )
        if self.algorithm == "eagle1" and self.steps != 1:
            raise ConfigError(
                f"EAGLE-1 trains one step, not {self.steps}; its form with more steps is algorithm = 'hass'"
            )
        if self.step_weights and self.step_decay != Objective.step_decay:
            raise ConfigError("objective.step_decay has no effect beside objective.step_weights; give one")
        if self.step_weights and len(self.step_weights) != self.steps:
            raise ConfigError(f"{len(self.step_weights)} step_weights for {self.steps} steps; give one each")
        if self.position_weights == "dpace":
            if self.loss != "hard_ce":
                raise ConfigError(
                    "objective.position_weights 'dpace' goes by the confidence in the text's own tokens; it "
                    "needs objective.loss 'hard_ce'"
                )
            if self.step_weights or self.step_decay not in (1.0, Objective.step_decay):
                raise ConfigError(
                    "objective.position_weights 'dpace' weighs the steps itself; leave out step_weights and "
                    "step_decay"
                )
            if not 0 < self.dpace_alpha <= 1:
                raise ConfigError(f"objective.dpace_alpha is {self.dpace_alpha}; it lies in (0, 1]")
        if any(w < 0 for w in self.weights) or not any(self.weights):
            raise ConfigError(f"step weights {list(self.weights)} must not be negative, nor all zero")
        for names, used, where in (
            (("loss",), not self.regresses, "algorithm = 'eagle3', 'peagle', 'mtp', 'dflash' or 'medusa'"),
            (("kl_scale", "kl_decay"), self.loss == "lk_lambda", "loss = 'lk_lambda'"),
            (("dpace_alpha",), self.position_weights == "dpace", "position_weights = 'dpace'"),
            (("feature_weight", "token_weight"), self.regresses, "algorithm = 'eagle1' or 'hass'"),
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
        if self.regresses and not any(weights):
            raise ConfigError("all weights of the objective are 0; nothing is trained")

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each step."""
        if self.position_weights == "dpace":
            return (1.0,) * self.steps
        return self.step_weights or tuple(self.step_decay**k for k in range(self.steps))

    @property
    def regresses(self) -> bool:
        """Whether drafts learn to predict the target's final state, which its own head then reads (EAGLE-1,
        HASS)."""
        return self.algorithm in ("eagle1", "hass")
