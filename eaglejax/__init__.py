"""Lossless speculative decoding in JAX. In a notebook: ``import eaglejax as ej``.

The names below are imported when they are first used, so that a program that only reads a prompt file or
prints its help does not start jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from eaglejax import devices

# Before any import of jax: compiler flags are read while it starts.
devices.prepare()

if TYPE_CHECKING:
    from eaglejax.api import generate, load_target, stream
    from eaglejax.drafts.base import Bound
    from eaglejax.drafts.draft_model import DraftModel
    from eaglejax.drafts.ngram import NGram
    from eaglejax.drafts.prediction import Prediction
    from eaglejax.models.target import Target
    from eaglejax.sampling import Sampling
    from eaglejax.speculate.generate import Generation, Piece

_HOMES = {
    "Bound": "eaglejax.drafts.base",
    "DraftModel": "eaglejax.drafts.draft_model",
    "Generation": "eaglejax.speculate.generate",
    "NGram": "eaglejax.drafts.ngram",
    "Piece": "eaglejax.speculate.generate",
    "Prediction": "eaglejax.drafts.prediction",
    "Sampling": "eaglejax.sampling",
    "Target": "eaglejax.models.target",
    "generate": "eaglejax.api",
    "load_target": "eaglejax.api",
    "stream": "eaglejax.api",
}

__all__ = [
    "Bound",
    "DraftModel",
    "Generation",
    "NGram",
    "Piece",
    "Prediction",
    "Sampling",
    "Target",
    "generate",
    "load_target",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'eaglejax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
