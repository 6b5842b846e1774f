"""EAGLE-1, -2, -3, HASS and P-EAGLE as a family of drafts: the record that the rest knows them by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp

from eaglejax.config import AuxConvention
from eaglejax.drafts.eagle import probe
from eaglejax.drafts.eagle.align_file import align_file, write_aligned
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.load import bind, draft_plan, read_weights
from eaglejax.drafts.eagle.files.names import plain_name
from eaglejax.drafts.eagle.files.read import DraftFile, read_draft
from eaglejax.drafts.eagle.files.report import report, rows
from eaglejax.drafts.eagle.files.settings import KEY
from eaglejax.drafts.eagle.files.write import tensors_of_file, write_draft
from eaglejax.drafts.eagle.methods import FORM_NAMES, METHODS
from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.eagle.quantized import quantize_draft
from eaglejax.drafts.family import DraftFamily
from eaglejax.drafts.files import DraftFiles
from eaglejax.drafts.known import class_names, stated_types
from eaglejax.drafts.method import DraftMethod
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target
from eaglejax.rotation.basis import Basis


class EagleFamily(DraftFamily):
    """See the module's text."""

    name: ClassVar[str] = "EAGLE"
    proposer: ClassVar[type] = Eagle
    file: ClassVar[type] = DraftFile
    probe: ClassVar[Any] = probe
    methods: ClassVar[Mapping[str, DraftMethod]] = METHODS
    default: ClassVar[str] = "eagle"
    reading: ClassVar[tuple[str, ...]] = ("aux_convention", "aux")
    forms: ClassVar[tuple[str, ...]] = FORM_NAMES

    def declared(self, raw: Mapping[str, Any]) -> str | None:
        """A type or a class name with EAGLE in it, or eaglejax's own block about a head."""
        for key, value in stated_types(raw):
            if re.fullmatch(r"(?i)eagle[-_]?[123]?|hass|p[-_]?eagle|parallel[-_]?eagle", value):
                return f"{key} {value!r}"
        for value in class_names(raw):
            if re.search(r"(?i)eagle", value):
                return f"architectures {value!r}"
        block = raw.get(KEY)
        return KEY if isinstance(block, Mapping) and "head" in block else None

    def shown(self, files: DraftFiles) -> bool:
        """The layer that mixes token and feature: ``fc``, the feature's norm, or a first layer without a norm
        of its own in a file without a last one."""
        names = {plain_name(name) for name in files.names}
        if {"fc.weight", "layers.0.hidden_norm.weight"} & names:
            return True
        first = "layers.0.post_attention_layernorm.weight" in names
        return first and not {"layers.0.input_layernorm.weight", "norm.weight"} & names

    def read(
        self,
        files: DraftFiles,
        *,
        method: str = "auto",
        aux_convention: AuxConvention | None = None,
        aux: tuple[int, ...] | None = None,
        **reading: Any,
    ) -> DraftFile:
        """See ``files.read.read_draft``."""
        del reading
        version = {"eagle1": "eagle1", "eagle2": "eagle1", "eagle3": "eagle3"}.get(method, "auto")
        return read_draft(files, aux_convention=aux_convention or "auto", aux=aux, method=version)  # type: ignore[arg-type]

    def bind(self, file: DraftFile, target: Target, dtype: Any) -> tuple[EagleConfig, EagleParams]:
        """Boundaries filled in, weights read, borrowed parts joined."""
        config = file.config.fit(target.config)
        return config, bind(config, read_weights(file, dtype or target.dtype), target, file.ids)

    def quantize(self, params: EagleParams, quant: Any) -> EagleParams:
        """See ``quantized``."""
        return quantize_draft(params, quant)

    def own_embedding(self, params: EagleParams) -> Any:
        """The embedding among its weights."""
        return params.weights.get("embed")

    def doubts(self, file: DraftFile) -> tuple[str, ...]:
        """Keys that nobody knows, a map that may be lost."""
        return file.doubts

    def report(self, file: DraftFile, target: ModelConfig | None) -> dict[str, Any]:
        """What was understood, and whether ``target`` fits; nothing is missing in the file."""
        draft_plan(file, jnp.float32)
        return report(file, target)

    def rows(self, report: Mapping[str, Any]) -> list[tuple[str, str]]:
        """See ``files.report``."""
        return rows(report)

    def write(
        self, file: DraftFile, out: Path, *, to: str, target: Target | None, verifier: str | None
    ) -> list[str]:
        """See ``files.write.write_draft``; tensors keep their values and dtypes."""
        draft_plan(file, jnp.float32)
        return write_draft(
            out,
            file.config,
            tensors_of_file(file),
            file.ids,
            to=to,  # type: ignore[arg-type]
            target=target,
            source=file.raw,
            verifier=verifier,
        )

    def write_aligned(
        self, file: DraftFile, out: Path, target: Target, basis: Basis, *, original: Target | None, to: str
    ) -> list[str]:
        """See ``align_file``."""
        done = align_file(file, target, basis, original=original)
        return [*done.notes, *write_aligned(out, done, file, to=to, target=target)]  # type: ignore[arg-type]
