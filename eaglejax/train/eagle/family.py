"""How EAGLE drafts are trained: the record that the trainer knows them by."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from eaglejax.drafts.base import Bound
from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.load import bind
from eaglejax.drafts.eagle.files.write import tensors_of_weights, write_draft
from eaglejax.drafts.eagle.model import EagleParams, param_table
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.tree import StaticTree
from eaglejax.models.target import Target
from eaglejax.train.attention import training_attention
from eaglejax.train.batch import Batch
from eaglejax.train.chain import trained_rows
from eaglejax.train.eagle.cost import draft_cost, training_size
from eaglejax.train.eagle.objective import objective_loss
from eaglejax.train.eagle.start import existing_draft, new_draft, planned_config
from eaglejax.train.family import (
    Draft,
    DraftCost,
    Remember,
    TrainingFamily,
    TrainingSize,
    Weights,
    require_whole,
)
from eaglejax.train.objective import Objective
from eaglejax.train.objectives import Head, Metrics
from eaglejax.train.samples import Sample
from eaglejax.train.settings import TrainSettings


class EagleTraining(TrainingFamily):
    """EAGLE-3, EAGLE-1, HASS and P-EAGLE; see ``train.eagle.objective``."""

    name: ClassVar[str] = "EAGLE"
    config: ClassVar[type] = EagleConfig
    algorithms: ClassVar[tuple[str, ...]] = ("eagle3", "eagle1", "hass", "peagle")

    def planned(self, settings: TrainSettings, target: Target, file: Any = None) -> EagleConfig:
        """A new draft's shape follows the target's where the settings say nothing."""
        return planned_config(settings, target, file)

    def prepare(
        self,
        config: EagleConfig,
        settings: TrainSettings,
        target: Target,
        samples: Sequence[Sample],
        file: Any,
        remember: Remember,
    ) -> Draft:
        """See ``train.eagle.start``."""
        if file is None:
            return new_draft(config, settings, target, samples, remember)
        return existing_draft(config, settings, target, samples, file)

    def taps(self, config: EagleConfig) -> tuple[int, ...]:
        """EAGLE-3's boundaries; drafts of the final state alone have none."""
        return config.aux

    def loss(
        self,
        weights: Weights,
        config: EagleConfig,
        objective: Objective,
        frozen: EagleParams,
        head: Head,
        batch: Batch,
        rows: jax.Array,
        key: jax.Array | None = None,
        *,
        compute_dtype: Any,
        remat: bool = False,
        mesh: Mesh | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """``objective_loss``; the ``weights`` within ``frozen`` are ignored."""
        params = dataclasses.replace(frozen, weights=eagle_model.cast(weights, config, compute_dtype))
        attend = training_attention(batch.documents, windows=any(config.windows), remat=remat, mesh=mesh)
        return objective_loss(params, config, objective, head, batch, rows, key, attend)

    def trained_rows(self, objective: Objective, head: Head, batch: Batch) -> jax.Array:
        """Rows of each chain step that its alignment and the draft's vocabulary leave."""
        return trained_rows(objective, head, batch)

    def bound(
        self, config: EagleConfig, weights: Weights, target: Target, ids: np.ndarray | None, tree: StaticTree
    ) -> Bound:
        """A greedy ``Eagle`` that grows ``tree``."""
        own = eagle_model.cast(weights, config, target.dtype)
        return Bound(Eagle(config, tree), bind(config, own, target, ids))

    def write(
        self, folder: Path, config: EagleConfig, weights: Weights, ids: np.ndarray | None, *, dtype: Any
    ) -> None:
        """The project's own form, which holds every draft (``eaglejax convert`` writes the others')."""
        require_whole(weights, param_table(config))
        found = jax.tree.map(np.asarray, eagle_model.cast(weights, config, dtype))
        write_draft(folder, config, tensors_of_weights(config, found), ids, to="eaglejax")

    def cost(self, config: EagleConfig, dtype: Any) -> DraftCost:
        """Counted from its table of weights."""
        return draft_cost(config, dtype)

    def size(self, config: EagleConfig, settings: TrainSettings) -> TrainingSize:
        """Counted from its table of weights and the shapes of one pass."""
        return training_size(config, settings)
