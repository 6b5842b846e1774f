"""An EAGLE draft with its matrices in 8 or 4 bits.

Where a processor is bound by what it reads, a draft step costs as much as its bytes. What a draft guesses is
judged whatever it was computed in, so that rounding changes how much is accepted and never the text's law.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.pytree import leaf_paths, unflatten
from eaglejax.quant.online import plain
from eaglejax.quant.quantize import quantize_array
from eaglejax.quant.schemes import Scheme, draft_scheme, matches

FLOAT = ("embed", "feature_map", "*.router", "*norm")
"""Paths of matrices that stay float: read by row, computed in f32, or no matrix at all."""


def quantize_draft(params: EagleParams, quant: str | Scheme) -> EagleParams:
    """``params`` with the draft's own matrices in ``quant`` (``schemes.draft_scheme``), rows of the target's
    head that were taken for a reduced vocabulary among them; what it shares with the target stays as it is.
    Raises ConfigError for a scheme that does not fit a matrix."""
    scheme = draft_scheme(quant)

    def held(path: str, leaf: Any) -> Any:
        if leaf.ndim < 2 or matches(path, FLOAT):
            return leaf
        return quantize_array(leaf, scheme, where=f"the draft's {path}")

    found = {path: held(path, leaf) for path, leaf in leaf_paths(params.weights).items()}
    head = params.head
    if head is not None and params.ids is not None:
        head = quantize_array(plain(head), scheme, transposed=params.tied, where="the draft's head")
    return dataclasses.replace(params, weights=unflatten(params.weights, found), head=head)
