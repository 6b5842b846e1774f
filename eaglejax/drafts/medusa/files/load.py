"""The weights of Medusa heads, and what they borrow of a target."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.checkpoint.tables import Assignment, materialize, plan
from eaglejax.drafts.borrow import target_head
from eaglejax.drafts.medusa.config import MedusaConfig
from eaglejax.drafts.medusa.files.names import TOKEN_MAP, rules
from eaglejax.drafts.medusa.files.read import MedusaFile
from eaglejax.drafts.medusa.model import MedusaParams, Weights, param_table
from eaglejax.errors import ConfigError, MismatchError
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target
from eaglejax.pytree import unflatten


def fit(file: MedusaFile, target: ModelConfig) -> MedusaConfig:
    """The heads' configuration on ``target``. Raises MismatchError for heads of another model."""
    config = file.config
    if config.hidden_size != target.hidden_size:
        raise MismatchError(
            f"{file.path} holds heads that read {config.hidden_size} numbers, the target's state has "
            f"{target.hidden_size}: they are another target's"
        )
    known, vocab = config.draft_vocab_size, target.vocab_size
    if file.stated_vocab not in (None, vocab) or (file.ids is None and known != vocab):
        raise MismatchError(
            f"{file.path} holds heads of another vocabulary: of {file.stated_vocab or known} tokens, the "
            f"target has {vocab}"
        )
    if file.ids is not None and file.ids[-1] >= vocab:
        raise MismatchError(
            f"{file.path} holds heads that know token {file.ids[-1]}; the target has {vocab} tokens"
        )
    softcap = target.final_softcap if config.output == "target" else config.softcap
    return dataclasses.replace(config, vocab_size=vocab, softcap=softcap)


def head_plan(file: MedusaFile, dtype: Any) -> tuple[Weights, list[Assignment]]:
    """(parameter table, which tensors make which leaf). Raises CheckpointError for a missing or unexpected
    tensor and for one of another shape."""
    table = param_table(file.config, dtype)
    ignorable = (TOKEN_MAP,)
    return table, plan(
        table, rules(file.config, file.layout), file.store, where=str(file.path), ignorable=ignorable
    )


def read_weights(file: MedusaFile, dtype: Any) -> Weights:
    """The heads' own weights in ``dtype``; nothing is read unless everything is there."""
    table, assignments = head_plan(file, dtype)
    return unflatten(table, {a.leaf: jnp.asarray(materialize(a, file.store)) for a in assignments})


def bind(
    config: MedusaConfig, weights: Weights, target: Target, ids: np.ndarray | None = None
) -> MedusaParams:
    """Weights joined with what they borrow of ``target``; ``ids`` [Vd] are strictly increasing target ids,
    None for all. Raises ConfigError for ids that are not those of ``config``."""
    if (ids is not None) != config.reduced:
        raise ConfigError("ids go with a reduced draft vocabulary, and a reduced draft vocabulary needs them")
    if ids is not None and (len(ids) != config.draft_vocab_size or not np.all(np.diff(ids) > 0)):
        raise ConfigError(f"ids must be {config.draft_vocab_size} strictly increasing target ids")
    head, tied = (None, False) if config.output != "target" else target_head(target, ids)
    known = None if ids is None else jax.device_put(np.asarray(ids, np.int32))
    return MedusaParams(weights, head=head, ids=known, tied=tied)
