"""DFlash as a family of drafts: the record that the rest knows them by."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from eaglejax.drafts.align import check_alignable, fold_fc, original_embedding, original_head
from eaglejax.drafts.borrow import head_matrix
from eaglejax.drafts.dflash import probe
from eaglejax.drafts.dflash.config import DFlashConfig
from eaglejax.drafts.dflash.files import DFlashFile, join, read_file, read_weights, write_weights
from eaglejax.drafts.dflash.methods import FORM_NAMES, METHODS
from eaglejax.drafts.dflash.model import DFlashParams
from eaglejax.drafts.dflash.proposer import DFlash
from eaglejax.drafts.family import DraftFamily
from eaglejax.drafts.files import DraftFiles
from eaglejax.drafts.known import class_names, stated_types
from eaglejax.drafts.method import DraftMethod
from eaglejax.drafts.tree import chain
from eaglejax.errors import ConfigError, EaglejaxError
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target
from eaglejax.quant.online import plain
from eaglejax.rotation.basis import Basis
from eaglejax.rotation.tables import check_rotation


class DFlashFamily(DraftFamily):
    """See the module's text."""

    name: ClassVar[str] = "DFlash"
    proposer: ClassVar[type] = DFlash
    file: ClassVar[type] = DFlashFile
    probe: ClassVar[Any] = probe
    methods: ClassVar[Mapping[str, DraftMethod]] = METHODS
    default: ClassVar[str] = "dflash"
    forms: ClassVar[tuple[str, ...]] = FORM_NAMES

    def declared(self, raw: Mapping[str, Any]) -> str | None:
        """A type or a class name of DFlash, or its block of settings."""
        for key, value in stated_types(raw):
            if value.lower() == "dflash":
                return f"{key} {value!r}"
        for value in class_names(raw):
            if re.search(r"(?i)dflash", value):
                return f"architectures {value!r}"
        return "dflash_config" if raw.get("dflash_config") else None

    def shown(self, files: DraftFiles) -> bool:
        """One norm over the fused features for all layers, and layers that read H."""
        names = {re.sub(r"^(model|draft_model)\.", "", name) for name in files.names}
        return {"hidden_norm.weight", "fc.weight", "layers.0.self_attn.q_proj.weight"} <= names

    def read(self, files: DraftFiles, *, method: str = "auto", **reading: Any) -> DFlashFile:
        """See ``files.read_file``."""
        del method, reading
        return read_file(files)

    def bind(self, file: DFlashFile, target: Target, dtype: Any) -> tuple[DFlashConfig, DFlashParams]:
        """Weights read, borrowed parts joined."""
        config = file.config.fit(target.config)
        return config, join(config, read_weights(file, dtype or target.dtype), target)

    def reach(self, config: DFlashConfig, length: int) -> int:
        """See ``DFlashConfig.reach``."""
        return config.reach(length)

    def make(self, config: DFlashConfig, options: Mapping[str, Any]) -> DFlash:
        """The whole block as a chain, unless a tree is asked for."""
        return DFlash(config, **{"tree": chain(config.block - 1), **options})

    def own_embedding(self, params: DFlashParams) -> Any:
        """The embedding among its weights."""
        return params.weights.get("embed")

    def report(self, file: DFlashFile, target: ModelConfig | None) -> dict[str, Any]:
        """What was understood, and whether ``target`` fits."""
        fits: dict[str, Any] | None = None
        if target is not None:
            try:
                file.config.fit(target)
                fits = {"fits": True, "why_not": None}
            except EaglejaxError as error:
                fits = {"fits": False, "why_not": str(error)}
        return {
            "path": str(file.path),
            "method": self.default,
            "layout": file.form,
            "config": dataclasses.asdict(file.config),
            "parameters": sum(int(np.prod(file.store.shape(n))) for n in file.store.names()),
            "notes": list(file.notes),
            "target": fits,
        }

    def rows(self, report: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(heading, text) of what a person sees of a report."""
        config = report["config"]
        out = [
            ("method", str(report["method"])),
            ("form", str(report["layout"])),
            ("block", f"{config['block']} tokens, {config['block'] - 1} of them guessed"),
            ("layers", f"{config['num_layers']}, {config['hidden_size']} wide"),
            ("boundaries", ", ".join(map(str, config["aux"]))),
            ("parameters", f"{report['parameters']:,}"),
        ]
        if report["target"] is not None:
            out.append(("target", "fits" if report["target"]["fits"] else report["target"]["why_not"]))
        return [*out, *(("note", note) for note in report["notes"])]

    def write(
        self, file: DFlashFile, out: Path, *, to: str, target: Target | None, verifier: str | None
    ) -> list[str]:
        """See ``files.write_weights``; tensors keep their values and dtypes."""
        del target
        weights = read_weights(file, file.store.dtype("fc.weight"))
        return write_weights(out, file.config, weights, to=to, source=file.raw, verifier=verifier)

    def write_aligned(
        self, file: DFlashFile, out: Path, target: Target, basis: Basis, *, original: Target | None, to: str
    ) -> list[str]:
        """The maps of the boundaries fold into ``fc``; a borrowed embedding and head are written out as they
        were before the rotation."""
        check_alignable(file.config, basis)
        config, weights = file.config.fit(target.config), dict(read_weights(file, jnp.float32))
        if original is not None and original.basis is not None:
            raise ConfigError(
                f"{original.name} is rotated itself (basis {original.basis}); name the original"
            )
        if original is not None:
            whose = f"the embedding of {original.name}"
            check_rotation(original.params["embed"], target, basis, whose=whose, sure=True)
        if "embed" in weights:
            check_rotation(weights["embed"], target, basis, whose="the draft's embedding")
        weights["fc"] = jnp.asarray(fold_fc(weights["fc"], basis), jnp.float32)
        notes = [f"the map of {len(config.aux)} boundaries was folded into fc"]
        whence = "turned back" if original is None else f"taken from {original.name}"
        if not config.own_embedding:
            weights["embed"] = (
                original_embedding(plain(target.params["embed"], jnp.float32), basis, np.float32)
                if original is None
                else plain(original.params["embed"])
            )
            notes.append(f"the embedding, which the draft borrows, was {whence} and written out")
        if not config.own_head:
            head = head_matrix(original or target, dtype=jnp.float32)
            weights["head"] = original_head(head, basis, np.float32) if original is None else head
            notes.append(f"the head, which the draft borrows, was {whence} and written out")
        config = dataclasses.replace(config, basis=basis.id, own_embedding=True, own_head=True)
        return [*notes, *write_weights(out, config, weights, to=to, source=file.raw)]
