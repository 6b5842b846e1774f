"""A method that a family of drafts brings: its name's settings, and what they are to the family.

Names and settings are refused before anything is loaded, so that neither this module nor the ``methods.py``
of a family's folder imports jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from eaglejax.config import SpeculativeConfig


@dataclasses.dataclass(frozen=True)
class DraftMethod:
    """A name for ``--method`` and ``--speculative-config``.

    ``settings``: the keys of a SpeculativeConfig that it knows, ``model`` apart. ``options``: what these are
    as options of ``load_draft``. ``check``: refuses settings that cannot be, before anything is loaded.
    ``in_target``: without a model, the draft is among the target's own files. ``draws``: sampled rows draw
    its drafts, always.
    """

    settings: tuple[str, ...]
    options: Callable[[SpeculativeConfig], dict[str, Any]]
    check: Callable[[SpeculativeConfig], None] = lambda config: None
    in_target: bool = False
    draws: bool = False
