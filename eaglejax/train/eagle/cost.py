"""What an EAGLE draft costs, and what its training takes, counted from shapes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.model import param_table
from eaglejax.pytree import leaf_paths
from eaglejax.train.family import DraftCost, TrainingSize
from eaglejax.train.settings import TrainSettings


def draft_cost(config: EagleConfig, dtype: Any) -> DraftCost:
    """The cost of a draft whose weights are kept in ``dtype``."""
    parameters = size = met = 0
    for path, info in leaf_paths(param_table(config, dtype)).items():
        count = math.prod(info.shape)
        parameters += count
        size += count * np.dtype(info.dtype).itemsize
        if len(info.shape) < 2 or not (path.startswith("layers.") or (path == "fc" and config.version == 1)):
            continue
        share = (config.experts_per_token, config.num_experts) if ".experts." in path else (1, 1)
        met += count * share[0] // share[1]
    met += config.hidden_size * config.draft_vocab_size
    return DraftCost(parameters, size, 2 * met)


def training_size(config: EagleConfig, settings: TrainSettings) -> TrainingSize:
    """Numbers shipped and trained, and bytes kept for the backward pass."""
    sizes = {path: math.prod(info.shape) for path, info in leaf_paths(param_table(config)).items()}
    kept = {"embed"} | (set() if settings.draft.train_head else {"head"})
    return TrainingSize(
        shipped=sum(sizes.values()),
        trained=sum(size for path, size in sizes.items() if path not in kept),
        activations=_activations(config, settings),
    )


def _activations(config: EagleConfig, settings: TrainSettings) -> int:
    """Bytes kept for the backward pass: per step and layer the projections and the attention weights; the
    logits of two steps in f32."""
    item = 2 if settings.run.compute_dtype == "bfloat16" else 4
    run, steps, length = settings.run, settings.objective.steps, settings.data.row_tokens
    wide = 2 * config.hidden_size + config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    a_token = (wide + 4 * config.hidden_size + 3 * config.intermediate_size) * item
    scores = 0 if run.remat else config.num_heads * length * 4
    a_row = length * (steps * config.num_layers * (a_token + scores) + 4 * config.draft_vocab_size * 4)
    return run.rows * a_row
