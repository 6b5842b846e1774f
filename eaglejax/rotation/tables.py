"""Is one embedding a rotation of another? By geometry.

A rotation moves every row of the embedding and no angle between two: E' = E Q has other rows than E and the
same Gram matrix, E' E'^T = E E^T.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from eaglejax.errors import MismatchError
from eaglejax.models.target import Target
from eaglejax.nn.linear import PackedWeight, embedding
from eaglejax.rotation.basis import Basis

ROWS = 384
"""Embedding rows that are compared."""
SAME_ROWS, OTHER_ROWS = 0.2, 0.5
"""Relative difference of the rows below which they are the same (quantised ones differ by less), and above
which they are others; two unrelated tables differ by about 1.4."""
SAME_GRAM = 0.1
"""Relative difference of the Gram matrices below which the angles are the same; unrelated tables differ by
about 1.4."""

Relation = Literal["same", "rotated", "different"]


@dataclasses.dataclass(frozen=True)
class Tables:
    """Two embeddings compared on the same rows.

    ``rows``: how many. ``row_difference``: ||A - B|| / ||B||. ``gram_difference``: the same for the Gram
    matrices without their diagonals (row lengths, which most tables share, prove nothing). ``relation``: what
    follows.
    """

    rows: int
    row_difference: float
    gram_difference: float
    relation: Relation

    def __str__(self) -> str:
        return (
            f"{self.rows} embedding rows differ by {self.row_difference:.1%}, the angles between them by "
            f"{self.gram_difference:.1%}"
        )


def compare_tables(draft: Any, target: Any, turn: np.ndarray | None = None) -> Tables | None:
    """How the embeddings [V, H] of a draft, perhaps times a rotation ``turn`` [H, H], and of a target relate;
    None for other shapes, which cannot be compared. Tables that differ by a factor alone count as the
    same."""
    if draft.shape != target.shape:
        return None
    vocab = draft.shape[0]
    # The angles between a few hundred rows are proof enough; more would cost time alone.
    ids = np.unique(np.linspace(0, vocab - 1, min(vocab, ROWS)).astype(np.int32))
    a, b = (table_rows(table, ids) for table in (draft, target))
    a = a if turn is None else a @ turn
    size_a, size_b = np.linalg.norm(a), np.linalg.norm(b)
    if not (np.isfinite(size_a) and np.isfinite(size_b)) or min(size_a, size_b) == 0:
        return None
    a, b = a / size_a, b / size_b
    rows = float(np.linalg.norm(a - b))
    gram_a, gram_b = a @ a.T, b @ b.T
    off = ~np.eye(len(ids), dtype=bool)
    angles = float(np.linalg.norm(gram_b[off]))
    gram = float(np.linalg.norm((gram_a - gram_b)[off])) / max(angles, 1e-30)
    relation: Relation = "different"
    if rows < SAME_ROWS:
        relation = "same"
    elif rows > OTHER_ROWS and gram < SAME_GRAM:
        relation = "rotated"
    return Tables(len(ids), rows, gram, relation)


def table_rows(table: Any, ids: np.ndarray) -> np.ndarray:
    """Rows ``ids`` of an embedding, quantised or not, f64."""
    picked = embedding(table, jnp.asarray(ids)) if isinstance(table, PackedWeight) else table[ids]
    return np.asarray(picked).astype(np.float64)


def check_rotation(original: Any, target: Target, basis: Basis, *, whose: str, sure: bool = False) -> None:
    """Refuse a ``basis`` that does not take the embedding ``original`` [V, H] to that of the rotated
    ``target``: the transpose, say, or the matrix of another rotation.

    A table with other angles than the target's proves nothing, as a draft may have trained its own; with
    ``sure``, for that of the original model, it is refused as well. ``whose`` names it. Raises MismatchError.
    """
    found = compare_tables(original, target.params["embed"], basis.matrix.astype(np.float64))
    if found is not None and found.relation == "rotated":
        raise MismatchError(
            f"the rotation {basis.id} of {target.name} does not take {whose} to the target's: turned by it, "
            f"{found}. It is the matrix of another rotation, or its transpose; export the right one"
        )
    if sure and (found is None or found.relation != "same"):
        raise MismatchError(
            f"{whose} is not what {target.name} was rotated from"
            + (f": turned by its rotation, {found}" if found is not None else ": it has another shape")
        )
