"""The method that MTP modules bring, and the forms that they are written in. Nothing here imports jax."""

from __future__ import annotations

from collections.abc import Mapping

from eaglejax.drafts.method import DraftMethod
from eaglejax.drafts.trees import tree_method

FORM_NAMES = ("deepseek", "qwen", "mimo", "speculators", "eaglejax")
"""See ``files.layouts``."""

METHODS: Mapping[str, DraftMethod] = {"mtp": tree_method(in_target=True)}
"""By name."""
