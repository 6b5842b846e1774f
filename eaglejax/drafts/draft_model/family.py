"""A smaller model with the target's tokenizer, as a family of drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from eaglejax.checkpoint.hf import DESCRIPTION
from eaglejax.checkpoint.quantized.summary import holds_target
from eaglejax.config import SpeculativeConfig
from eaglejax.drafts.base import Bound
from eaglejax.drafts.draft_model.load import DraftModelFile, load_draft_model
from eaglejax.drafts.draft_model.proposer import DraftModel
from eaglejax.drafts.family import DraftFamily, DraftMethod
from eaglejax.drafts.files import DraftFiles
from eaglejax.drafts.limits import MOST_DEPTH, check_count
from eaglejax.errors import ConfigError
from eaglejax.kv_format import uncalibrated_format
from eaglejax.models.target import Target


def _options(config: SpeculativeConfig) -> dict[str, Any]:
    named = {"length": config.num_speculative_tokens, "cache_dtype": config.kv_cache_dtype}
    return {name: value for name, value in named.items() if value is not None}


def _check(config: SpeculativeConfig) -> None:
    if config.num_speculative_tokens is not None:
        check_count("num_speculative_tokens", config.num_speculative_tokens, MOST_DEPTH)
    if config.kv_cache_dtype is not None:
        uncalibrated_format(config.kv_cache_dtype)


class DraftModelFamily(DraftFamily):
    """Whole models, in any form that ``load_target`` reads."""

    name: ClassVar[str] = "whole model"
    proposer: ClassVar[type] = DraftModel
    file: ClassVar[type] = DraftModelFile
    methods: ClassVar[Mapping[str, DraftMethod]] = {
        "draft_model": DraftMethod(("num_speculative_tokens", "kv_cache_dtype"), _options, _check)
    }
    default: ClassVar[str] = "draft_model"

    def shown(self, files: DraftFiles) -> bool:
        """A GGUF file, a quantised folder, or a folder with an embedding, a first layer and a last norm."""
        if files.gguf or (files.path / DESCRIPTION).is_file():
            return True
        return (files.path / "config.json").is_file() and holds_target(files.path, files.names)

    def read(self, files: DraftFiles, *, method: str = "auto", **reading: Any) -> DraftModelFile:
        """Nothing is read ahead: the model is loaded as any target is."""
        del method, reading
        return DraftModelFile(files.path)

    def load(
        self,
        file: DraftModelFile,
        target: Target,
        *,
        dtype: Any = None,
        align: bool = False,
        draft: str = "",
        **options: Any,
    ) -> Bound:
        """See ``load_draft_model``. A whole model reads nothing of its target, so that no rotation concerns
        it."""
        if align:
            raise ConfigError(f"{file.path} holds a whole model, which no rotation of the target concerns")
        return load_draft_model(draft or str(file.path), target, dtype=dtype, **options)

    def check(self, bound: Bound, target: Target) -> None:
        """Nothing to compare."""
