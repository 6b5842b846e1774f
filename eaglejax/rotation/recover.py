"""The rotation of a target whose tool did not export it, from the embeddings of the original and the rotated.

Orthogonal Procrustes (Schönemann 1966): the Q that takes E closest to E' is U V^T of the singular value
decomposition E^T E' = U S V^T. Unlike a least-squares fit it is a rotation whatever the rounding.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from eaglejax.errors import MismatchError
from eaglejax.models.target import Target
from eaglejax.rotation.basis import Basis
from eaglejax.rotation.rotate import norm_weight
from eaglejax.rotation.tables import table_rows

ROWS = 1 << 15
"""Embedding rows that are fitted, spread over the vocabulary."""
LARGEST_ERROR = 0.05
"""Relative error above which one embedding is no rotation of the other; 8-bit rounding stays below 0.02."""


@dataclasses.dataclass(frozen=True)
class Recovered:
    """A recovered ``basis``, its error ||E Q - E'|| / ||E'|| and how many ``rows`` it was fitted on."""

    basis: Basis
    error: float
    rows: int


def recover_rotation(original: np.ndarray, rotated: np.ndarray) -> tuple[np.ndarray, float]:
    """(Q f64 [H, H], relative error) of two tables [V, H] of the same rows.

    Raises MismatchError when the rows do not span the space: then many rotations fit and none is the right
    one.
    """
    a, b = original.astype(np.float64), rotated.astype(np.float64)
    u, s, vt = np.linalg.svd(a.T @ b)
    if not s[-1] > 1e-10 * s[0]:
        raise MismatchError(
            f"{len(a)} embedding rows do not span {a.shape[1]} dimensions: they do not determine the rotation"
        )
    q = u @ vt
    return q, float(np.linalg.norm(a @ q - b) / np.linalg.norm(b))


def recover_basis(original: Target, rotated: Target) -> Recovered:
    """The basis that takes ``original`` to ``rotated``. Raises MismatchError when no rotation does."""
    before, after = original.params["embed"], rotated.params["embed"]
    if before.shape != after.shape:
        raise MismatchError(
            f"the embeddings have shapes {tuple(before.shape)} and {tuple(after.shape)}: not one model "
            "before and after a rotation"
        )
    ids = np.unique(np.linspace(0, before.shape[0] - 1, min(before.shape[0], ROWS)).astype(np.int32))
    q, error = recover_rotation(table_rows(before, ids), table_rows(after, ids))
    if not error < LARGEST_ERROR:
        raise MismatchError(
            f"no rotation takes the embedding of {original.name} to that of {rotated.name}: the best leaves "
            f"{error:.1%}. Are they the same model before and after?"
        )
    if np.max(np.abs(q - np.eye(len(q)))) < 1e-3:
        # Norms may have been folded all the same, which turns nothing.
        q = np.eye(len(q))
    gamma = norm_weight(original.params["norm"], original.config)
    return Recovered(Basis(q.astype(np.float32), gamma.astype(np.float32)), error, len(ids))
