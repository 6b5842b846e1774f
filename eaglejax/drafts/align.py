"""Maps between a rotated target and a draft that was made for the original.

Row vectors; Q is the target's rotation, gamma the weight of its final norm, which sits in its head now::

                            original    rotated             back by
    residual, any boundary  x           x Q                 Q^T
    state behind last norm  gamma n(x)  n(x) Q              Q^T diag(gamma)
    embedding [V, H]        E           E Q                 Q^T, on the right
    head [H, V]             W           Q^T diag(gamma) W   diag(1 / gamma) Q, on the left

So a draft that reads boundaries (EAGLE-3, DFlash) needs Q alone, one that reads the last state (EAGLE-1,
Medusa) gamma too, and whoever borrows the embedding or the head needs these turned back. Only what comes
*from the target* is mapped: a draft's own states are in its own basis already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.features import FeatureAdapter
from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.errors import ConfigError, MismatchError
from eaglejax.quant.online import plain
from eaglejax.rotation.basis import Basis
from eaglejax.rotation.rotate import product

PARTS = ("features", "embedding", "head")
"""What an alignment mends: the features read from the target, and its embedding and head where borrowed."""


def boundary_map(basis: Basis) -> np.ndarray:
    """f64 [H, H] that takes a rotated target's residual stream to the original's: Q^T. For EAGLE-3 and
    DFlash, whatever the boundary."""
    return basis.matrix.astype(np.float64).T


def final_map(basis: Basis) -> np.ndarray:
    """f64 [H, H] that takes a rotated target's post-norm state to the original's: Q^T diag(gamma). For
    EAGLE-1 and Medusa. Raises ConfigError without gamma."""
    return boundary_map(basis) * basis.need_gamma()


def recycled_map(basis: Basis, gamma: np.ndarray | None = None) -> np.ndarray:
    """f64 [H, H], symmetric: Q^T diag(gamma) Q, which gives a rotated post-norm state its gamma back and
    leaves it rotated.

    For MTP modules that were rotated with the target (:func:`rotate_mtp`): step 0 reads the target's state
    and needs the target's gamma (None); a later step that feeds back the state behind the module's own norm
    needs that norm's ``gamma`` [H], and one that feeds back the raw residual needs no map.
    """
    q = basis.matrix.astype(np.float64)
    weight = basis.need_gamma() if gamma is None else np.asarray(gamma, np.float64)
    return (q.T * weight) @ q


def original_embedding(rows: Any, basis: Basis, dtype: Any) -> jax.Array:
    """Rows [..., H] of the original embedding from those of the rotated one."""
    return product(np.asarray(rows), boundary_map(basis), dtype)


def original_head(head: Any, basis: Basis, dtype: Any) -> jax.Array:
    """The original head [H, V] from the rotated one: diag(1 / gamma) Q W'.

    Raises MismatchError where gamma is 0: what the original head had there is gone.
    """
    gamma = basis.need_gamma()
    lost = np.flatnonzero(gamma == 0)
    if len(lost):
        raise MismatchError(
            f"the final norm's weight is 0 at {len(lost)} of {len(gamma)} dimensions (first: {lost[0]}), so "
            "the original head cannot be told from the rotated one; name the original target "
            "(--original-target)"
        )
    back = boundary_map(basis) / gamma  # transposed: Q^T diag(1 / gamma)
    return jnp.swapaxes(product(np.asarray(head).T, back, dtype), 0, 1)


def fold_fc(fc: Any, basis: Basis, norm: Any = None) -> np.ndarray:
    """f64 ``fc`` [A * H, Hd] for a rotated target, whatever the number A of boundaries: Q^T diag(norm_i) fc_i
    for the block of each.

    ``norm`` [A * H] or [A, H]: weights of a norm over the joined boundaries or over each, which then become
    1: they do not commute with the turn.
    """
    blocks = np.asarray(fc).astype(np.float64)
    blocks = blocks.reshape(-1, basis.size, blocks.shape[1])
    if norm is not None:
        blocks = blocks * np.asarray(norm).astype(np.float64).reshape(-1, basis.size, 1)
    return (boundary_map(basis) @ blocks).reshape(fc.shape)


def rotate_mtp(eh: Any, embed_norm: Any, hidden_norm: Any, basis: Basis) -> np.ndarray:
    """f64 projection [2 H, H] of an MTP module that is rotated with its target.

    ``eh`` [2 H, H] reads [embed_norm * n(e), hidden_norm * n(h)]; both norms (``gamma`` [H] each) are folded
    and become 1, both inputs and the output are turned. The module's layer is rotated as any of the target's
    and its last norm folded into its head; its state from the target goes through :func:`recycled_map`.
    """
    norms = np.concatenate([np.asarray(embed_norm), np.asarray(hidden_norm)])
    return fold_fc(eh, basis, norms) @ basis.matrix.astype(np.float64)


def align_params(
    params: EagleParams, config: EagleConfig, basis: Basis, *, parts: Collection[str] = PARTS
) -> EagleParams:
    """A draft of the original target, bound to the rotated one: maps in front of what it reads, and the
    borrowed embedding and head turned back (copies, in their dtype).

    ``parts``: which of ``PARTS`` to mend; less than all is for showing what each is worth. Raises ConfigError
    for a draft that is aligned already (``config.basis``) and MismatchError for a basis of another size.
    """
    check_alignable(config, basis)
    unknown = set(parts) - set(PARTS)
    if unknown:
        raise ConfigError(f"parts {sorted(unknown)} are not known; they are {', '.join(PARTS)}")
    changes: dict[str, Any] = {}
    if "features" in parts:
        found = final_map(basis) if config.reads_final else boundary_map(basis)
        one = jnp.asarray(found, jnp.float32)
        changes["adapter"] = FeatureAdapter(target=(one,) * max(config.num_aux, 1))
    if "embedding" in parts and params.embed is not None:
        changes["embed"] = original_embedding(plain(params.embed, jnp.float32), basis, params.embed.dtype)
    if "head" in parts and params.head is not None:
        head = plain(params.head, jnp.float32)
        head = head.T if params.tied else head
        changes |= {"head": original_head(head, basis, params.head.dtype), "tied": False}
    return dataclasses.replace(params, **changes)


def aligned(config: EagleConfig, basis: Basis) -> EagleConfig:
    """The configuration of a draft after :func:`align_params`."""
    return dataclasses.replace(config, basis=basis.id)


def check_alignable(config: EagleConfig, basis: Basis) -> None:
    """Refuse a second alignment, and a basis that cannot be the target's."""
    if config.basis is not None:
        same = "that very basis" if config.basis == basis.id else f"another one ({basis.id} is the target's)"
        raise ConfigError(
            f"the draft is aligned already, to {same}: its basis is {config.basis}. Aligning twice would "
            "turn it away again; start from the original draft"
        )
    if basis.size != config.target_hidden_size:
        raise MismatchError(
            f"the rotation turns {basis.size} dimensions, the draft reads features of "
            f"{config.target_hidden_size}"
        )
