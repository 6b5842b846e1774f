"""A draft aligned once and written: it then loads as any other, here and, for EAGLE-3, elsewhere.

What a draft reads at boundaries folds into ``fc``. EAGLE-1's ``fc`` also reads the draft's own states, which
are in the original basis whatever the target does, so its map travels beside the weights. The embedding and
the head that it borrowed are written out as they were before the rotation: V * H and H * Vd numbers.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.drafts.align import (
    boundary_map,
    check_alignable,
    final_map,
    fold_fc,
    original_embedding,
    original_head,
)
from eaglejax.drafts.borrow import head_matrix
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.load import read_weights
from eaglejax.drafts.eagle.files.read import DraftFile
from eaglejax.drafts.eagle.files.write import tensors_of_weights, write_draft
from eaglejax.drafts.eagle.methods import FormName
from eaglejax.drafts.eagle.model import Weights, cast
from eaglejax.errors import ConfigError, MismatchError
from eaglejax.models.target import Target
from eaglejax.quant.online import plain
from eaglejax.rotation.basis import Basis
from eaglejax.rotation.rotate import norm_weight
from eaglejax.rotation.tables import check_rotation

NORM_ERROR = 0.02
"""How far an exported norm may be from the original's, over its largest weight; bfloat16 takes 0.004."""


@dataclasses.dataclass(frozen=True)
class AlignedDraft:
    """An aligned draft: ``weights`` are in the dtypes to be written, ``notes`` say what was done."""

    config: EagleConfig
    weights: Weights
    ids: np.ndarray | None
    notes: tuple[str, ...]


def align_file(
    file: DraftFile, target: Target, basis: Basis, *, original: Target | None = None
) -> AlignedDraft:
    """Align the draft in ``file`` to the rotated ``target``, whose basis is ``basis``.

    ``original``: the model before the rotation; borrowed parts are then taken from it instead of being turned
    back. Raises ConfigError for a draft that is aligned already and MismatchError for one of another model,
    an original of another and a basis that is not the target's (``detect.check_rotation``).
    """
    check_alignable(file.config, basis)
    if original is not None and original.basis is not None:
        raise ConfigError(
            f"{original.name} is rotated itself (basis {original.basis}); name the original model"
        )
    config = file.config.fit(target.config)
    weights: Weights = dict(read_weights(file, jnp.float32))
    if original is not None:
        embed = original.params["embed"]
        check_rotation(embed, target, basis, whose=f"the embedding of {original.name}", sure=True)
        gamma = norm_weight(original.params["norm"], original.config)
        most = NORM_ERROR * np.max(np.abs(gamma))
        if basis.gamma is not None and not np.allclose(basis.gamma, gamma, rtol=0, atol=most):
            raise MismatchError(
                f"the weight of the final norm that {target.name} exports beside its rotation is not that of "
                f"{original.name}; leave it out of the file, and the original's will be used"
            )
    if "embed" in weights:
        check_rotation(weights["embed"], target, basis, whose="the draft's embedding")
    changes: dict[str, Any] = {"basis": basis.id}
    notes = []
    if config.reads_final:
        weights["feature_map"] = final_map(basis).astype(np.float32)
        changes["feature_map"] = True
        notes.append("the map of the target's last state stands beside the weights (feature_map)")
    else:
        norm = weights.get("aux_norm")
        weights["fc"] = fold_fc(weights["fc"], basis, norm).astype(np.float32)
        notes.append(f"the map of {config.num_aux} boundaries was folded into fc")
        if config.parallel:
            # What stands for unknown features is read through the folded map as known ones are.
            mask = np.asarray(weights["mask"], np.float64).reshape(config.num_aux, -1)
            weights["mask"] = (mask @ boundary_map(basis).T).reshape(-1).astype(np.float32)
            notes.append("the masks' features were turned with them")
        if norm is not None:
            weights["aux_norm"] = jnp.ones_like(norm)
            notes.append("the norms before fc were folded into it: they do not commute with a rotation")
    whence = "turned back" if original is None else f"taken from {original.name}"
    if not config.own_embedding:
        weights["embed"] = (
            original_embedding(plain(target.params["embed"], jnp.float32), basis, np.float32)
            if original is None
            else plain(original.params["embed"])
        )
        changes["own_embedding"] = True
        notes.append(f"the embedding, which the draft borrows, was {whence} and written out")
    if not config.own_head:
        head = head_matrix(original or target, file.ids, jnp.float32)
        weights["head"] = original_head(head, basis, np.float32) if original is None else head
        changes |= {"own_head": True, "target_rows": False}
        notes.append(f"the head, which the draft borrows, was {whence} and written out")
    config = dataclasses.replace(config, **changes)
    weights = jax.tree.map(
        np.asarray, cast(weights, config, file.store.dtype("layers.0.self_attn.o_proj.weight"))
    )
    return AlignedDraft(config, weights, file.ids, tuple(notes))


def write_aligned(
    out: Path,
    draft: AlignedDraft,
    file: DraftFile,
    *,
    to: FormName = "eaglejax",
    target: Target | None = None,
) -> list[str]:
    """Write an aligned draft to the new folder ``out``; ``file`` is what it was made from. See
    ``write_draft``."""
    tensors = tensors_of_weights(draft.config, draft.weights)
    return write_draft(out, draft.config, tensors, draft.ids, to=to, target=target, source=file.raw)
