"""The weights of an EAGLE draft, and what they borrow of a target."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.checkpoint.tables import Assignment, materialize, plan
from eaglejax.drafts.borrow import target_head
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.names import IGNORABLE, rules
from eaglejax.drafts.eagle.files.read import DraftFile
from eaglejax.drafts.eagle.model import EagleParams, Weights, param_table
from eaglejax.errors import ConfigError
from eaglejax.models.target import Target
from eaglejax.pytree import unflatten


def draft_plan(file: DraftFile, dtype: Any) -> tuple[Weights, list[Assignment]]:
    """(parameter table, which tensors make which leaf). Raises CheckpointError for a missing or unexpected
    tensor."""
    table = param_table(file.config, dtype)
    unused = [re.escape(name) for name in file.unused]
    assignments = plan(
        table, rules(file.config.aux_norm), file.store, where=str(file.path), ignorable=(*IGNORABLE, *unused)
    )
    return table, assignments


def read_weights(file: DraftFile, dtype: Any) -> Weights:
    """The draft's own weights in ``dtype``; nothing is read unless everything is there."""
    table, assignments = draft_plan(file, dtype)
    return unflatten(table, {a.leaf: jnp.asarray(materialize(a, file.store)) for a in assignments})


def bind(config: EagleConfig, weights: Weights, target: Target, ids: np.ndarray | None = None) -> EagleParams:
    """Weights joined with what they borrow of ``target`` (the same arrays, not copies).

    ``ids`` [Vd]: target id of each draft id, strictly increasing; None when they are the same. With
    ``target_rows`` the Vd rows of the target's head are taken once, here: Vd * H numbers more in memory, in
    the target's dtype, which is what a shipped head would take.
    """
    if (ids is not None) != config.reduced:
        raise ConfigError("ids go with a reduced draft vocabulary, and a reduced draft vocabulary needs them")
    if ids is not None:
        known = np.asarray(ids)
        if known.shape != (config.draft_vocab_size,) or not np.all(np.diff(known) > 0):
            raise ConfigError(f"ids must be {config.draft_vocab_size} strictly increasing target ids")
        if known[0] < 0 or known[-1] >= config.vocab_size:
            raise ConfigError(
                f"ids run from {known[0]} to {known[-1]}; the target knows 0..{config.vocab_size - 1}"
            )
    head, tied = (None, False) if config.own_head else target_head(target, ids)
    return EagleParams(
        weights=weights,
        embed=None if config.own_embedding else target.params["embed"],
        head=head,
        ids=None if ids is None else jax.device_put(np.asarray(ids, np.int32)),
        tied=tied,
    )
