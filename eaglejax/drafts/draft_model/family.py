"""A smaller model with the target's tokenizer, as a family of drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from eaglejax.checkpoint.hf import DESCRIPTION
from eaglejax.checkpoint.quantized.summary import holds_target
from eaglejax.drafts.base import Bound
from eaglejax.drafts.draft_model.load import DraftModelFile, load_draft_model
from eaglejax.drafts.draft_model.methods import METHODS
from eaglejax.drafts.draft_model.proposer import DraftModel
from eaglejax.drafts.family import DraftFamily
from eaglejax.drafts.files import DraftFiles
from eaglejax.drafts.method import DraftMethod
from eaglejax.errors import ConfigError
from eaglejax.models.target import Target


class DraftModelFamily(DraftFamily):
    """Whole models, in any form that ``load_target`` reads."""

    name: ClassVar[str] = "whole model"
    proposer: ClassVar[type] = DraftModel
    file: ClassVar[type] = DraftModelFile
    methods: ClassVar[Mapping[str, DraftMethod]] = METHODS
    default: ClassVar[str] = "draft_model"
    alone: ClassVar[bool] = True

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
        quant: Any = None,
        **options: Any,
    ) -> Bound:
        """See ``load_draft_model``. A whole model reads nothing of its target, so that no rotation concerns
        it."""
        if align:
            raise ConfigError(f"{file.path} holds a whole model, which no rotation of the target concerns")
        if quant is not None:
            self.quantize(None, quant)
        return load_draft_model(draft or str(file.path), target, dtype=dtype, **options)

    def check(self, bound: Bound, target: Target) -> None:
        """Nothing to compare."""
