"""The method that a whole model as the draft brings. Nothing here imports jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eaglejax.config import SpeculativeConfig
from eaglejax.drafts.limits import MOST_DEPTH, check_count
from eaglejax.drafts.method import DraftMethod


def _options(config: SpeculativeConfig) -> dict[str, Any]:
    named = {"length": config.num_speculative_tokens, "cache_dtype": config.kv_cache_dtype}
    return {name: value for name, value in named.items() if value is not None}


def _check(config: SpeculativeConfig) -> None:
    if config.num_speculative_tokens is not None:
        check_count("num_speculative_tokens", config.num_speculative_tokens, MOST_DEPTH)
    if config.kv_cache_dtype is not None:
        from eaglejax.kv_format import uncalibrated_format

        uncalibrated_format(config.kv_cache_dtype)


METHODS: Mapping[str, DraftMethod] = {
    "draft_model": DraftMethod(("num_speculative_tokens", "kv_cache_dtype"), _options, _check, draws=True)
}
"""By name."""
