"""MTP modules aligned once and written: the map of the target's state stands beside the weights, because the
same weights also read the modules' own states, which are in the original basis whatever the target does."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from eaglejax.drafts.align import check_alignable, final_map, original_embedding, original_head
from eaglejax.drafts.borrow import head_matrix
from eaglejax.drafts.mtp.config import MtpConfig
from eaglejax.drafts.mtp.files.load import bind
from eaglejax.drafts.mtp.files.read import MtpFile
from eaglejax.drafts.mtp.model import Weights
from eaglejax.errors import ConfigError
from eaglejax.models.target import Target
from eaglejax.quant.online import plain
from eaglejax.rotation.basis import Basis
from eaglejax.rotation.tables import check_rotation


def aligned(
    file: MtpFile, target: Target, basis: Basis, *, original: Target | None = None
) -> tuple[MtpConfig, Weights, list[str]]:
    """(configuration, weights, what was done) of modules that read the rotated ``target``, whose basis is
    ``basis``, as they read the original one.

    ``original``: the model before the rotation; the embedding and the head that the modules borrow are then
    taken from it instead of being turned back. Raises ConfigError for modules that are aligned already and
    MismatchError for a basis, or an original, that is not the target's.
    """
    config, params = bind(file, target, jnp.float32)
    check_alignable(config, basis)
    if original is not None and original.basis is not None:
        raise ConfigError(
            f"{original.name} is rotated itself (basis {original.basis}); name the original model"
        )
    weights: Weights = dict(params.weights)
    if original is not None:
        whose = f"the embedding of {original.name}"
        check_rotation(original.params["embed"], target, basis, whose=whose, sure=True)
    if "embed" in weights:
        check_rotation(weights["embed"], target, basis, whose="the embedding of the modules")
    weights["feature_map"] = jnp.asarray(final_map(basis), jnp.float32)
    notes = ["the map of the target's last state stands beside the weights (feature_map)"]
    whence = "turned back" if original is None else f"taken from {original.name}"
    if not config.own_embedding:
        weights["embed"] = (
            original_embedding(plain(target.params["embed"], jnp.float32), basis, np.float32)
            if original is None
            else plain(original.params["embed"])
        )
        notes.append(f"the embedding, which the modules borrow, was {whence} and written out")
    if not config.own_head:
        head: Any = head_matrix(original or target, dtype=jnp.float32)
        head = original_head(head, basis, np.float32) if original is None else head
        weights["modules"] = [{**module, "head": head} for module in weights["modules"]]
        notes.append(f"the head, which the modules borrow, was {whence} and written out")
    config = dataclasses.replace(config, basis=basis.id, feature_map=True, own_embedding=True, own_head=True)
    return config, weights, notes
