"""The families of drafts that can be trained."""

from __future__ import annotations

from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.train.dflash.family import DFlashTraining
from eaglejax.train.eagle.family import EagleTraining
from eaglejax.train.family import TrainingFamily
from eaglejax.train.medusa.family import MedusaTraining
from eaglejax.train.mtp.family import MtpTraining
from eaglejax.train.objective import Objective

OBJECTIVES: dict[str, TrainingFamily] = {
    family.name: family for family in (EagleTraining(), MtpTraining(), DFlashTraining(), MedusaTraining())
}
"""How each family of drafts is trained, by ``DraftFamily.name``; others are run only."""


def training_of(config: Any) -> TrainingFamily:
    """The family whose configuration this is. Raises ConfigError for none."""
    for family in OBJECTIVES.values():
        if isinstance(config, family.config):
            return family
    raise ConfigError(f"there is no objective to train drafts with a {type(config).__name__}")


def training_by(objective: Objective) -> TrainingFamily:
    """The family that an objective trains. Raises ConfigError for none."""
    for family in OBJECTIVES.values():
        if objective.algorithm in family.algorithms:
            return family
    raise ConfigError(f"objective.algorithm {objective.algorithm!r} trains no family of drafts")
