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
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.drafts.features import FeatureAdapter
from eaglejax.errors import ConfigError, MismatchError
from eaglejax.quant.online import plain
from eaglejax.rotation.basis import Basis
from eaglejax.rotation.rotate import product

Feature = Literal["boundary", "final"]
"""A hidden-state boundary, or the state behind the target's final norm."""


@dataclasses.dataclass(frozen=True)
class Reads:
    """What a draft takes from its target, which is all that a rotation of the target concerns: the
    ``features``, in the order of its adapter's maps, and whether the target's ``embedding`` and ``head`` are
    its own."""

    features: tuple[Feature, ...]
    embedding: bool
    head: bool


class Borrowing(Protocol):
    """Parameters of a draft that borrows: ``embed`` [V, H] and ``head`` ([H, V], or [V, H] when ``tied``) are
    the target's, None where the draft has its own; ``adapter`` stands in front of the target's features."""

    adapter: FeatureAdapter
    embed: Any
    head: Any
    tied: bool


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


def align_params(params: Any, config: Any, basis: Basis, *, parts: Collection[str] = PARTS) -> Any:
    """A draft of the original target, bound to the rotated one: maps in front of what it reads, and the
    borrowed embedding and head turned back (copies, in their dtype).

    ``params``: a dataclass with the fields of ``Borrowing``; ``config``: a ``family.DraftConfig``. ``parts``:
    which of ``PARTS`` to mend; less than all is for showing what each is worth. Raises ConfigError for a
    draft that is aligned already (``config.basis``) and MismatchError for a basis of another size.
    """
    check_alignable(config, basis)
    unknown = set(parts) - set(PARTS)
    if unknown:
        raise ConfigError(f"parts {sorted(unknown)} are not known; they are {', '.join(PARTS)}")
    changes: dict[str, Any] = {}
    if "features" in parts:
        kinds = {"final": final_map, "boundary": boundary_map}
        found = {kind: jnp.asarray(kinds[kind](basis), jnp.float32) for kind in set(config.reads.features)}
        changes["adapter"] = FeatureAdapter(target=tuple(found[kind] for kind in config.reads.features))
    if "embedding" in parts and params.embed is not None:
        changes["embed"] = original_embedding(plain(params.embed, jnp.float32), basis, params.embed.dtype)
    if "head" in parts and params.head is not None:
        head = plain(params.head, jnp.float32)
        head = head.T if params.tied else head
        changes |= {"head": original_head(head, basis, params.head.dtype), "tied": False}
    return dataclasses.replace(params, **changes)


def check_alignable(config: Any, basis: Basis) -> None:
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
