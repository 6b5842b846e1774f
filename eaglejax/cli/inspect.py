"""``eaglejax inspect``: what a draft's checkpoint was understood to be, and which target it fits; or how a
target's folder is quantised and rotated."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import rich.table
import tyro

from eaglejax.checkpoint.sources import resolve
from eaglejax.cli import show
from eaglejax.cli.methods import draft_reading
from eaglejax.config import AuxConvention
from eaglejax.drafts.places import draft_path
from eaglejax.drafts.registry import read_draft, recognise
from eaglejax.errors import ConfigError

if TYPE_CHECKING:
    from eaglejax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Say what a draft checkpoint is: method, shapes, flags, vocabulary map, feature layers, what it
    borrows. Of a target: layout, schemes, basis, cache, bytes."""

    draft: Annotated[str, tyro.conf.Positional]
    """Folder or Hub id of the draft, or of a target."""
    target: str | None = None
    """Check the fit with this target (its configuration alone is read)."""
    aux_convention: AuxConvention = "auto"
    """What layer ids in the draft's config count: hidden-state boundaries, or blocks (their output is
    meant)."""
    aux: tuple[int, ...] | None = None
    """Hidden-state boundaries to read instead of what the draft's config says (0 = embedding)."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else there."""

    def run(self) -> int:
        """The command. Exit status 1 when a target is named and the draft does not fit it."""
        draft_path(self.draft)
        if self.target is not None:
            resolve(self.target)
        from eaglejax.drafts.draft_model.proposer import DraftModel
        from eaglejax.drafts.files import opened

        files = opened(self.draft)
        family = recognise(files)
        if family.proposer is DraftModel:
            return self._target(files.path)
        family, file = read_draft(self.draft, **draft_reading(self.aux_convention, self.aux))
        report = family.report(file, None if self.target is None else target_config(self.target))
        if self.json:
            show.print_json(report)
        else:
            table = rich.table.Table(show_header=False, title=report["path"], title_justify="left")
            for heading, text in family.rows(report):
                table.add_row(heading, text)
            show.stderr().print(table)
        return 0 if report["target"] is None or report["target"]["fits"] else 1

    def _target(self, folder: Path) -> int:
        if self.target is not None or self.aux is not None:
            raise ConfigError(f"{folder} holds a target; --target and --aux are for drafts")
        from eaglejax.checkpoint.quantized.summary import summary

        report = {"path": str(folder), **summary(folder)}
        if self.json:
            show.print_json(report)
        else:
            _print_target(report)
        return 0


def target_config(spec: str) -> ModelConfig:
    """A target's configuration without its weights."""
    source = resolve(spec)
    from eaglejax.checkpoint.gguf.metadata import config_from_metadata
    from eaglejax.checkpoint.gguf.reader import GGUFFile
    from eaglejax.checkpoint.hf import read_config
    from eaglejax.models.families import from_hf

    raw = config_from_metadata(GGUFFile(source.path)) if source.kind == "gguf" else read_config(source.path)
    return from_hf(raw)


def _print_target(report: dict[str, Any]) -> None:
    table = rich.table.Table(show_header=False, title=report["path"], title_justify="left")
    form = "not quantised" if report["form"] == "plain" else f"in the {report['form']} form"
    table.add_row("model", f"{report['family']}, {form}, {report['bytes'] / 1e6:.1f} MB")
    for scheme, count in report["schemes"].items():
        where = [f"{kind} ({n[scheme]})" for kind, n in report["kinds"].items() if scheme in n]
        table.add_row(scheme, f"{count} matrices: {', '.join(where)}")
    plain = [f"{kind} ({count})" for kind, count in report["plain"].items()]
    table.add_row("as they were", ", ".join(plain) or "none")
    table.add_row("keys, values", report["cache"] or "as asked for when it runs")
    table.add_row("basis", report["basis"] or "the original one: not rotated")
    if report["basis"]:
        table.add_row("rotation", report["rotation"] or "NOT exported: no draft can be aligned to it without")
    show.stderr().print(table)
