"""The vocabulary map of an EAGLE-3 checkpoint: ``d2t`` and ``t2d``.

``d2t`` [Vd] holds *offsets*: draft id i stands for target id i + d2t[i]. ``t2d`` [V] marks the target ids
that the draft knows. A wrong map gives no error anywhere, only drafts that are never accepted, so both are
checked against each other.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from eaglejax.drafts.eagle.files.names import PlainStore
from eaglejax.errors import CheckpointError


def rising(values: np.ndarray) -> bool:
    """Whether ``values`` are strictly increasing."""
    return bool(np.all(np.diff(values) > 0))


def looks_absolute(offsets: np.ndarray, vocab: int) -> bool:
    """Whether a ``d2t`` could hold target ids as well as offsets.

    Offsets rise at every step only where no two known ids are neighbours, which no real vocabulary has.
    """
    return len(offsets) > 1 and rising(offsets) and bool(offsets[0] >= 0 and offsets[-1] < vocab)


def target_ids(store: PlainStore, vocab: int, draft: int, where: str) -> tuple[np.ndarray | None, str | None]:
    """(target ids [Vd] int64, None for the identity; a note or None) of ``draft`` ids out of ``vocab``.

    Raises CheckpointError for a map that is missing, out of range, not increasing, contradictory, or that
    holds absolute ids.
    """

    def fail(text: str) -> NoReturn:
        raise CheckpointError(f"{where}: {text}")

    names = store.names()
    known = np.flatnonzero(np.asarray(store.array("t2d")).astype(bool)) if "t2d" in names else None
    note = None
    if "d2t" in names:
        offsets = np.asarray(store.array("d2t"))
        ids = _from_offsets(offsets, vocab, draft, known, fail)
        if draft < vocab and known is None and not offsets.any():
            note = (
                f"d2t is all zeros and there is no t2d to tell: the draft's ids are read as target ids 0 to "
                f"{draft - 1}. A map that was lost when the draft was saved looks the same, and its drafts "
                "would all be wrong tokens"
            )
    elif draft == vocab:
        ids = np.arange(vocab)
    elif known is not None:
        ids, note = known, "there is no d2t; target ids follow from t2d"
    else:
        fail(
            f"the head has {draft} of {vocab} tokens but there is neither d2t nor t2d to say which; without "
            f"the map "
            "every draft would be a wrong token"
        )
    if known is not None and not np.array_equal(known, ids):
        fail(f"t2d marks {len(known)} tokens, which are not the {draft} that d2t and the head stand for")
    if len(ids) != draft:
        fail(f"t2d marks {len(ids)} tokens for a head of {draft}")
    return (None if draft == vocab else ids), note


def _from_offsets(
    offsets: np.ndarray, vocab: int, draft: int, known: np.ndarray | None, fail: object
) -> np.ndarray:
    assert callable(fail)
    if not np.issubdtype(offsets.dtype, np.integer):
        fail(f"d2t holds {offsets.dtype} values; it must hold integers")
    offsets = offsets.astype(np.int64)
    ids = np.arange(draft) + offsets
    if looks_absolute(offsets, vocab):
        absolute = known is None or (np.array_equal(known, offsets) and not np.array_equal(known, ids))
        if absolute:
            fail("d2t looks like absolute target ids; it must hold offsets (target id minus draft id)")
    hint = "d2t holds offsets (target id minus draft id)"
    if ids.min() < 0 or ids.max() >= vocab:
        fail(f"d2t leads to target id {ids.min() if ids.min() < 0 else ids.max()} of {vocab}. {hint}")
    if not rising(ids):
        fail(f"d2t does not lead to strictly increasing target ids. {hint}")
    return ids
