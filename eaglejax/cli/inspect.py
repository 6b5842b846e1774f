"""``eaglejax inspect``: what a draft's checkpoint was understood to be, and which target it fits; or how a
target's folder is quantised and rotated; or, of a config.json alone, what model it describes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import rich.table
import tyro

from eaglejax.checkpoint.files import read_json
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
    borrows. Of a target: layout, schemes, basis, cache, bytes. Of a target's config.json without weights:
    its shape, kinds of layers, parameters, memory a token and what would run."""

    draft: Annotated[str, tyro.conf.Positional]
    """Folder or Hub id of the draft, or of a target; or a target's config.json."""
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
        bare = _bare_config(self.draft)
        if bare is not None:
            return self._planned(bare)
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

    def _planned(self, file: Path) -> int:
        if self.target is not None or self.aux is not None:
            raise ConfigError(
                f"{file} describes a target, without weights; --target and --aux are for drafts"
            )
        raw = read_json(file)
        from eaglejax.models.describe import described
        from eaglejax.models.families import from_hf

        config = from_hf(raw)
        text = raw.get("text_config", raw)
        modules = text.get("num_nextn_predict_layers", text.get("mtp_num_hidden_layers"))
        report = {"path": str(file), **described(config), "draft_layers": modules or 0}
        if self.json:
            show.print_json(report)
        else:
            _print_planned(report)
        return 0

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


def _bare_config(spec: str) -> Path | None:
    """The config.json that ``spec`` names, or that its folder holds without any weights beside it."""
    path = Path(spec).expanduser()
    if path.is_file():
        return path if path.name == "config.json" else None
    file = path / "config.json"
    weights = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".index.json")
    if not file.is_file() or any(p.name.endswith(weights) for p in path.iterdir()):
        return None
    return file


def _print_planned(report: dict[str, Any]) -> None:
    table = rich.table.Table(show_header=False, title=report["path"], title_justify="left")
    table.add_row("model", f"{report['family']}: a configuration without weights")
    heads = f"{report['heads']} heads over {report['kv_heads']}"
    table.add_row("shape", f"{report['layers']} layers of {report['hidden_size']}, {heads}")
    table.add_row(
        "vocabulary, context", f"{report['vocab_size']:,} ids, {report['max_position']:,} positions"
    )
    table.add_row("attention", report["attention"])
    experts = f"; {', '.join(report['experts'])} experts a token" if report["experts"] else ""
    table.add_row("feed-forward", report["feed_forward"] + experts)
    if report["else"] != "-":
        table.add_row("besides", report["else"])
    size = report["weight_bytes"] / 1e9
    table.add_row("weights", f"{report['parameters'] / 1e9:.2f} G parameters, {size:.1f} GB in bfloat16")
    row = report["cache_bytes_per_row"]
    beside = f", {row / 1e6:.2f} MB a row beside" if row else ""
    table.add_row("cache", f"{report['cache_bytes_per_token'] / 1e3:.1f} kB a token in bfloat16{beside}")
    table.add_row("rotation, quantisation", report["rotation_quantisation"])
    drafts = "EAGLE and other drafts made for it, n-grams, suffixes, predictions"
    modules = report["draft_layers"]
    table.add_row("drafts", f"{modules} MTP layers of its own; {drafts}" if modules else drafts)
    show.stderr().print(table)


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
