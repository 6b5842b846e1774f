"""EAGLE-1, EAGLE-2, EAGLE-3 and HASS as a family of drafts: the record that the rest knows them by."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, get_args

import jax.numpy as jnp

from eaglejax.config import AuxConvention, SpeculativeConfig
from eaglejax.drafts import trees
from eaglejax.drafts.eagle import probe
from eaglejax.drafts.eagle.align_file import align_file, write_aligned
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.load import bind, draft_plan, read_weights
from eaglejax.drafts.eagle.files.names import plain_name
from eaglejax.drafts.eagle.files.read import DraftFile, read_draft
from eaglejax.drafts.eagle.files.report import report, rows
from eaglejax.drafts.eagle.files.settings import KEY
from eaglejax.drafts.eagle.files.write import FORMS, tensors_of_file, write_draft
from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.family import DraftFamily, DraftMethod
from eaglejax.drafts.files import DraftFiles
from eaglejax.drafts.known import class_names, stated_types
from eaglejax.errors import ConfigError
from eaglejax.kv_format import uncalibrated_format
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target
from eaglejax.rotation.basis import Basis

_STATIC = ("num_speculative_tokens", "speculative_token_tree", "draft_sample", "draft_temperature")
_DYNAMIC = ("tree_depth", "tree_branching", "tree_nodes")
_ANY_TREE = ("min_confidence", "kv_cache_dtype")
_EVERY = (*_STATIC, *_DYNAMIC, *_ANY_TREE, "aux_convention")
_OPTIONS = {
    "draft_sample": "sample",
    "draft_temperature": "temperature",
    "min_confidence": "min_confidence",
    "kv_cache_dtype": "cache_dtype",
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
        uncalibrated_format(config.kv_cache_dtype)
    trees.check(config)


class EagleFamily(DraftFamily):
    """See the module's text."""

    name: ClassVar[str] = "EAGLE"
    proposer: ClassVar[type] = Eagle
    file: ClassVar[type] = DraftFile
    probe: ClassVar[Any] = probe
    methods: ClassVar[Mapping[str, DraftMethod]] = {
        "eagle": DraftMethod(_EVERY, _options("auto", "dynamic"), _check),
        "eagle1": DraftMethod((*_STATIC, *_ANY_TREE), _options("eagle1", "static"), _check),
        "eagle2": DraftMethod((*_DYNAMIC, *_ANY_TREE), _options("eagle2", "dynamic"), _check),
        "eagle3": DraftMethod(_EVERY, _options("eagle3", "dynamic"), _check),
    }
    default: ClassVar[str] = "eagle"
    reading: ClassVar[tuple[str, ...]] = ("aux_convention", "aux")
    forms: ClassVar[tuple[str, ...]] = tuple(FORMS)

    def declared(self, raw: Mapping[str, Any]) -> str | None:
        """A type or a class name with EAGLE in it, or eaglejax's own block about a head."""
        for key, value in stated_types(raw):
            if re.fullmatch(r"(?i)eagle[-_]?[123]?|hass", value):
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
