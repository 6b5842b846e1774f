"""Whether a draft guesses in parallel (P-EAGLE), and by which masks: a token and what it has for features.

Both must be there. A draft that lost either would load as an EAGLE-3 draft and feed on states that it was
never trained to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eaglejax.drafts.eagle.files.keys import MASK_KEYS
from eaglejax.drafts.eagle.files.names import MASK
from eaglejax.drafts.eagle.files.settings import KEY
from eaglejax.drafts.eagle.files.shapes import Shapes
from eaglejax.drafts.known import class_names, stated_types


def said_parallel(raw: Mapping[str, Any]) -> str | None:
    """What in config.json says that a draft guesses in parallel, None where nothing does."""
    for key, value in stated_types(raw):
        if value.lower().replace("-", "_") in ("peagle", "p_eagle", "parallel_eagle"):
            return f"{key} {value!r}"
    for value in class_names(raw):
        if value.lower().startswith(("peagle", "p_eagle", "paralleleagle", "parallel_eagle")):
            return f"architectures {value!r}"
    for key in ("parallel_drafting", "ptd_token_id", "pard_token"):
        if raw.get(key) not in (None, False):
            return f"{key} {raw[key]!r:.80}"
    return None


def mask_token(file: Shapes, version: int) -> int | None:
    """The id of the mask token, None for a draft whose steps read each other. Raises CheckpointError where
    the file and its config.json do not agree on which it is."""
    said = said_parallel(file.raw)
    recorded = file.settings.get("mask_id")
    if recorded is not None:
        said = f"{KEY}.mask_id {recorded}"
    held = file.has(MASK)
    if not said and not held:
        return None
    if version == 1:
        why = said or f"it holds {MASK}"
        file.fail(f"an EAGLE-1 draft that guesses in parallel ({why}); P-EAGLE is a form of EAGLE-3")
    if file.raw.get("parallel_drafting") is False:
        file.fail(
            f"config.json says parallel_drafting: false, but {f'says {said}' if said else f'holds {MASK}'}"
        )
    if not held:
        file.fail(
            f"lacks {MASK}, what stands for the features of unknown tokens; config.json says {said}, so that "
            "the draft guesses in parallel"
        )
    given = {key: file.raw[key] for key in MASK_KEYS if file.raw.get(key) is not None}
    if recorded is not None:
        given[f"{KEY}.mask_id"] = recorded
    if not given:
        file.fail(f"it holds {MASK}, but config.json names no mask token ({', '.join(MASK_KEYS)})")
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            file.fail(f"{key} is {value!r:.80}; it must be the id of a token")
    if len(set(given.values())) > 1:
        file.fail(f"config.json names several mask tokens: {given}")
    return next(iter(given.values()))
