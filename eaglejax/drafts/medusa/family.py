"""Medusa heads as a family of drafts: the record that the rest knows them by."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from eaglejax.drafts import trees
from eaglejax.drafts.align import check_alignable, final_map, original_head
from eaglejax.drafts.borrow import head_matrix
from eaglejax.drafts.family import DraftFamily
from eaglejax.drafts.files import DraftFiles
from eaglejax.drafts.known import class_names, stated_types
from eaglejax.drafts.medusa import probe
from eaglejax.drafts.medusa.config import MedusaConfig
from eaglejax.drafts.medusa.files.load import bind, fit, head_plan, read_weights
from eaglejax.drafts.medusa.files.names import layout_of, plain_name
from eaglejax.drafts.medusa.files.read import KEY, KIND, MedusaFile, read_heads
from eaglejax.drafts.medusa.files.write import OWN, write_heads
from eaglejax.drafts.medusa.methods import FORM_NAMES, METHODS
from eaglejax.drafts.medusa.model import MedusaParams, cast
from eaglejax.drafts.medusa.proposer import Medusa
from eaglejax.drafts.method import DraftMethod
from eaglejax.drafts.places import lone_heads
from eaglejax.drafts.tree import StaticTree, from_choices
from eaglejax.errors import ConfigError, EaglejaxError
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target
from eaglejax.rotation.basis import Basis
from eaglejax.rotation.tables import check_rotation


class MedusaFamily(DraftFamily):
    """See the module's text."""

    name: ClassVar[str] = "Medusa"
    proposer: ClassVar[type] = Medusa
    file: ClassVar[type] = MedusaFile
    probe: ClassVar[Any] = probe
    methods: ClassVar[Mapping[str, DraftMethod]] = METHODS
    default: ClassVar[str] = "medusa"
    forms: ClassVar[tuple[str, ...]] = FORM_NAMES

    def declared(self, raw: Mapping[str, Any]) -> str | None:
        """A type, a class name or a number of heads that says Medusa, or the project's own block."""
        for key, value in stated_types(raw):
            if value.lower() == KIND:
                return f"{key} {value!r}"
        for value in class_names(raw):
            if re.search(r"(?i)medusa", value):
                return f"architectures {value!r}"
        for key in ("medusa_num_heads", "medusa_num_layers"):
            if raw.get(key) is not None:
                return f"{key} {raw[key]!r:.80}"
        block = raw.get(KEY)
        return KEY if isinstance(block, Mapping) and block.get("kind") == KIND else None

    def shown(self, files: DraftFiles) -> bool:
        """A file of heads alone, or residual blocks among the tensors."""
        if files.gguf:
            return False
        if lone_heads(files.path) is not None:
            return True
        return layout_of({plain_name(name) for name in files.names}) is not None

    def read(self, files: DraftFiles, *, method: str = "auto", **reading: Any) -> MedusaFile:
        """See ``files.read.read_heads``."""
        del method, reading
        return read_heads(files)

    def bind(self, file: MedusaFile, target: Target, dtype: Any) -> tuple[MedusaConfig, MedusaParams]:
        """Weights read, the target's head joined where it is borrowed."""
        config = fit(file, target.config)
        return config, bind(config, read_weights(file, dtype or target.dtype), target, file.ids)

    def reach(self, config: MedusaConfig, length: int) -> int:
        """See ``MedusaConfig.reach``."""
        return config.reach(length)

    def make(self, config: MedusaConfig, options: Mapping[str, Any]) -> Medusa:
        """The usual fixed tree, as deep as there are heads, unless a tree is asked for."""
        return Medusa(config, **{"tree": usual_tree(config), **options})

    def report(self, file: MedusaFile, target: ModelConfig | None) -> dict[str, Any]:
        """What was understood, and whether ``target`` fits; nothing is missing in the file."""
        head_plan(file, jnp.float32)
        fits: dict[str, Any] | None = None
        if target is not None:
            try:
                fit(file, target)
                fits = {"fits": True, "why_not": None}
            except EaglejaxError as error:
                fits = {"fits": False, "why_not": str(error)}
        shapes = [file.store.shape(name) for name in file.store.names()]
        return {
            "path": str(file.path),
            "method": self.default,
            "layout": file.layout,
            "config": dataclasses.asdict(file.config),
            "parameters": sum(int(np.prod(shape)) for shape in shapes),
            "basis": file.config.basis,
            "notes": list(file.notes),
            "target": fits,
        }

    def rows(self, report: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(heading, text) of what a person sees of a report."""
        config = report["config"]
        output = {"each": "one each", "shared": "one for all", "target": "the target's"}[config["output"]]
        out = [
            ("method", f"{report['method']} ({report['layout']})"),
            ("shape", f"{config['heads']} heads of {config['layers']} blocks, H {config['hidden_size']}"),
            ("vocabulary", f"{config['draft_vocab_size']} tokens, matrix to it: {output}"),
            ("parameters", f"{report['parameters']:,}"),
        ]
        if report["basis"] is not None:
            out.append(("basis", f"the state of a target rotated to {report['basis']}"))
        if report["target"] is not None:
            fits = report["target"]
            out.append(("target", "fits" if fits["fits"] else f"NO: {fits['why_not']}"))
        return [*out, *(("note", note) for note in report["notes"])]

    def write(
        self, file: MedusaFile, out: Path, *, to: str, target: Target | None, verifier: str | None
    ) -> list[str]:
        """See ``files.write.write_heads``; tensors keep their values and dtypes."""
        weights = read_weights(file, _dtype(file))
        config = file.config if target is None else fit(file, target.config)
        return write_heads(out, config, weights, file.ids, to=to, target=target, verifier=verifier)

    def write_aligned(
        self, file: MedusaFile, out: Path, target: Target, basis: Basis, *, original: Target | None, to: str
    ) -> list[str]:
        """The map of the target's last state beside the weights, and a borrowed matrix turned back, or taken
        from ``original``, and written out. The own form alone has a place for that."""
        if to != OWN:
            raise ConfigError(
                f"the {to} form has no place for the map of a rotated target's state; use {OWN}"
            )
        config = fit(file, target.config)
        check_alignable(config, basis)
        weights = dict(read_weights(file, jnp.float32))
        weights["feature_map"] = jnp.asarray(final_map(basis), jnp.float32)
        notes = ["the map of the target's last state stands beside the weights (feature_map)"]
        changes: dict[str, Any] = {"basis": basis.id, "feature_map": True}
        if original is not None:
            if original.basis is not None:
                raise ConfigError(
                    f"{original.name} is rotated itself (basis {original.basis}); name the original model"
                )
            whose = f"the embedding of {original.name}"
            check_rotation(original.params["embed"], target, basis, whose=whose, sure=True)
        if config.output == "target":
            head: Any = head_matrix(original or target, file.ids, jnp.float32)
            weights["out"] = original_head(head, basis, np.float32) if original is None else head
            changes["output"] = "shared"
            whence = "turned back" if original is None else f"taken from {original.name}"
            notes.append(
                f"the matrix to the vocabulary, which the heads borrow, was {whence} and written out"
            )
        config = dataclasses.replace(config, **changes)
        return [*notes, *write_heads(out, config, cast(weights, config, _dtype(file)), file.ids)]


def _dtype(file: MedusaFile) -> np.dtype:
    """That of the first tensor of numbers."""
    names = [name for name in file.store.names() if name.endswith(".weight")]
    return file.store.dtype(sorted(names)[0])


def usual_tree(config: MedusaConfig) -> StaticTree:
    """The usual fixed tree without what lies deeper than there are heads, or wants more children than they
    know tokens."""
    fits = [
        path
        for path in trees.STATIC_TREE.paths
        if len(path) <= config.heads and max(path) < config.draft_vocab_size
    ]
    return from_choices(fits)
