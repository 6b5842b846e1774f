"""What a draft costs, counted from its shapes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.model import param_table
from eaglejax.pytree import leaf_paths


@dataclasses.dataclass(frozen=True)
class DraftCost:
    """``parameters``: numbers that the draft ships, ``bytes`` what they take. ``step_flops``: operations of
    one chain step for one token (two a weight that it meets: of experts those it passes, and the head, the
    target's too where it is borrowed); attention over the text, which grows with it, is left out."""

    parameters: int
    bytes: int
    step_flops: int


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
