"""Multi-token prediction modules as a family of drafts: the record that the rest knows them by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from eaglejax.checkpoint.hf import MARKER as KEY
from eaglejax.drafts.base import Bound
from eaglejax.drafts.family import DraftFamily
from eaglejax.drafts.files import DraftFiles, opened
from eaglejax.drafts.known import class_names, stated_types
from eaglejax.drafts.method import DraftMethod
from eaglejax.drafts.mtp import probe
from eaglejax.drafts.mtp.config import MtpConfig, Recycle
from eaglejax.drafts.mtp.files.align import aligned
from eaglejax.drafts.mtp.files.layouts import OWN, plain_name
from eaglejax.drafts.mtp.files.load import bind, fit
from eaglejax.drafts.mtp.files.read import KIND, MtpFile, layouts_in, read_modules
from eaglejax.drafts.mtp.files.write import write_file, write_weights
from eaglejax.drafts.mtp.methods import FORM_NAMES, METHODS
from eaglejax.drafts.mtp.model import MtpParams
from eaglejax.drafts.mtp.proposer import Mtp
from eaglejax.drafts.tree import chain
from eaglejax.errors import CheckpointError, ConfigError, EaglejaxError
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target, weight_dtype
from eaglejax.rotation.basis import Basis

_TYPES = r"(deepseek|mimo|glm4_moe|glm4_moe_lite|qwen3_next|qwen3_5|ernie|longcat_flash)_mtp|mtp"


class MtpFamily(DraftFamily):
    """See the module's text."""

    name: ClassVar[str] = "MTP"
    proposer: ClassVar[type] = Mtp
    file: ClassVar[type] = MtpFile
    probe: ClassVar[Any] = probe
    methods: ClassVar[Mapping[str, DraftMethod]] = METHODS
    default: ClassVar[str] = "mtp"
    reading: ClassVar[tuple[str, ...]] = ("recycle",)
    forms: ClassVar[tuple[str, ...]] = FORM_NAMES

    def declared(self, raw: Mapping[str, Any]) -> str | None:
        """A type or a class of modules, or eaglejax's own block about them."""
        for key, value in stated_types(raw):
            if re.fullmatch(_TYPES, value.lower().replace("-", "_")):
                return f"{key} {value!r}"
        for value in class_names(raw):
            if re.search(r"MTP|(?i:nextn)", value):
                return f"architectures {value!r}"
        block = raw.get(KEY)
        return KEY if isinstance(block, Mapping) and block.get("kind") == KIND else None

    def shown(self, files: DraftFiles) -> bool:
        """Modules without a model around them."""
        names = [plain_name(name) for name in files.names]
        first = any(name.startswith("layers.0.") for name in names)
        alone = not first or "layers.0.eh_proj.weight" in names
        return alone and (bool(layouts_in(names)) or "eh_proj.weight" in names)

    def within(self, files: DraftFiles) -> bool:
        """Whether a target keeps modules among its tensors."""
        return bool(layouts_in([plain_name(name) for name in files.names]))

    def read(
        self, files: DraftFiles, *, method: str = "auto", recycle: Recycle | None = None, **reading: Any
    ) -> MtpFile:
        """See ``files.read.read_modules``."""
        del method, reading
        return read_modules(files, whole=not (self.declared(files.raw) or self.shown(files)), recycle=recycle)

    def bind(self, file: MtpFile, target: Target, dtype: Any) -> tuple[MtpConfig, MtpParams]:
        """The kind of layer found, weights read, borrowed parts joined."""
        return bind(file, target, dtype or target.dtype)

    def reach(self, config: MtpConfig, length: int) -> int:
        """See ``MtpConfig.reach``."""
        return config.reach(length)

    def make(self, config: MtpConfig, options: Mapping[str, Any]) -> Mtp:
        """As many drafts in a row as there are modules, unless a tree is asked for."""
        return Mtp(config, **{"tree": chain(config.modules), **options})

    def own_embedding(self, params: MtpParams) -> Any:
        """The embedding among its weights."""
        return params.weights.get("embed")

    def report(self, file: MtpFile, target: ModelConfig | None) -> dict[str, Any]:
        """What was understood, and whether ``target`` fits."""
        fits: dict[str, Any] | None = None
        if target is not None:
            try:
                fit(file, target)
                fits = {"fits": True, "why_not": None}
            except EaglejaxError as error:
                fits = {"fits": False, "why_not": str(error)}
        return {
            "path": str(file.path),
            "method": self.default,
            "layout": file.layout,
            "modules": len(file.numbers),
            "recycle": file.recycle,
            "parameters": sum(int(np.prod(file.store.shape(n))) for n in file.store.names()),
            "basis": file.basis,
            "notes": list(file.notes),
            "target": fits,
        }

    def rows(self, report: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(heading, text) of what a person sees of a report."""
        out = [
            ("method", str(report["method"])),
            ("layout", str(report["layout"])),
            ("modules", str(report["modules"])),
            ("handed on", f"the state {report['recycle'].replace('_', ' ')}".replace("norm", "the norm")),
            ("parameters", f"{report['parameters']:,}"),
        ]
        if report["target"] is not None:
            out.append(("target", "fits" if report["target"]["fits"] else report["target"]["why_not"]))
        return [*out, *(("note", note) for note in report["notes"])]

    def write(
        self, file: MtpFile, out: Path, *, to: str, target: Target | None, verifier: str | None
    ) -> list[str]:
        """See ``files.write.write_file``."""
        return write_file(file, out, to=to, target=target, verifier=verifier)

    def write_aligned(
        self, file: MtpFile, out: Path, target: Target, basis: Basis, *, original: Target | None, to: str
    ) -> list[str]:
        """See ``files.align.aligned``; the own form alone has a place for the map of the target's state."""
        if to != OWN:
            raise ConfigError(f"the {to} form has no place for the map of a rotated target; use {OWN}")
        config, weights, notes = aligned(file, target, basis, original=original)
        return [*notes, *write_weights(out, config, weights, source=file.raw)]


def load_mtp(target: Target, *, dtype: Any = None, recycle: Recycle | None = None, **options: Any) -> Bound:
    """The modules in the target's own checkpoint, ready for ``generate(..., proposer=...)``.

    ``dtype``: of their weights (None: the target's); ``recycle``: see ``MtpConfig``; ``options``: settings of
    ``Mtp`` (tree, sample, temperature, min_confidence, cache_dtype). Raises ConfigError for a target that was
    read from no files and CheckpointError where they hold no modules.
    """
    files = opened(target.need_source().path)
    if files.gguf:
        raise CheckpointError(f"{files.path} is a GGUF file, whose MTP modules are not read")
    family = MtpFamily()
    file = family.read(files, recycle=recycle)
    held = target.dtype if dtype is None else weight_dtype(dtype)
    return family.load(file, target, dtype=held, draft=target.name, **options)
