"""The methods that EAGLE drafts bring, their settings, and the forms that they are written in. Nothing here
imports jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from eaglejax.config import AuxConvention, SpeculativeConfig
from eaglejax.drafts import trees
from eaglejax.drafts.method import DraftMethod
from eaglejax.errors import ConfigError

FormName = Literal["safeailab", "sglang", "speculators", "modelopt", "eaglejax"]
FORM_NAMES: tuple[FormName, ...] = get_args(FormName)
"""See ``files.write``."""

_STATIC = ("num_speculative_tokens", "speculative_token_tree", "draft_sample", "draft_temperature")
_DYNAMIC = ("tree_depth", "tree_branching", "tree_nodes")
_ANY_TREE = ("min_confidence", "kv_cache_dtype", "draft_quant")
_EVERY = (*_STATIC, *_DYNAMIC, *_ANY_TREE, "aux_convention")
_OPTIONS = {
    "draft_sample": "sample",
    "draft_temperature": "temperature",
    "min_confidence": "min_confidence",
    "kv_cache_dtype": "cache_dtype",
    "draft_quant": "quant",
    "aux_convention": "aux_convention",
}


def _options(method: str, default: trees.Default) -> Callable[[SpeculativeConfig], dict[str, Any]]:
    def options(config: SpeculativeConfig) -> dict[str, Any]:
        given = {new: value for key, new in _OPTIONS.items() if (value := getattr(config, key)) is not None}
        return {"method": method, "tree": trees.tree_of(config, default), **given}

    return options


def _check(config: SpeculativeConfig) -> None:
    if config.aux_convention not in (None, *get_args(AuxConvention)):
        raise ConfigError(
            f"aux_convention is {config.aux_convention!r}; it is one of {', '.join(get_args(AuxConvention))}"
        )
    if config.kv_cache_dtype is not None:
        from eaglejax.kv_format import uncalibrated_format

        uncalibrated_format(config.kv_cache_dtype)
    if config.draft_quant is not None:
        from eaglejax.quant.schemes import draft_scheme

        draft_scheme(config.draft_quant)
    trees.check(config)


METHODS: Mapping[str, DraftMethod] = {
    "eagle": DraftMethod(_EVERY, _options("auto", "dynamic"), _check),
    "eagle1": DraftMethod((*_STATIC, *_ANY_TREE), _options("eagle1", "static"), _check),
    "eagle2": DraftMethod((*_DYNAMIC, *_ANY_TREE), _options("eagle2", "dynamic"), _check),
    "eagle3": DraftMethod(_EVERY, _options("eagle3", "dynamic"), _check),
}
"""By name; ``eagle`` takes whatever the draft's tensors say."""
