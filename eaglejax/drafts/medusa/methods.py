"""The method that Medusa heads bring, and the forms that they are written in. Nothing here imports jax."""

from __future__ import annotations

from collections.abc import Mapping

from eaglejax.drafts.method import DraftMethod
from eaglejax.drafts.trees import tree_method

FORM_NAMES = ("medusa", "vllm", "eaglejax")
"""See ``files.write``."""

METHODS: Mapping[str, DraftMethod] = {"medusa": tree_method(cache=False)}
"""By name."""
