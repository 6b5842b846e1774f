"""The method that DFlash drafts bring, and the forms that they are written in. Nothing here imports jax."""

from __future__ import annotations

from collections.abc import Mapping

from eaglejax.drafts.method import DraftMethod
from eaglejax.drafts.trees import tree_method

FORM_NAMES = ("dflash", "speculators")
"""See ``files``."""

METHODS: Mapping[str, DraftMethod] = {"dflash": tree_method()}
"""By name."""
