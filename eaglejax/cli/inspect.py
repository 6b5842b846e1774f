"""``eaglejax inspect``: what an EAGLE checkpoint was understood to be, and which target it fits; or how a
target's folder is quantised and rotated."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import rich.table
import tyro

from eaglejax.checkpoint.gguf.metadata import config_from_metadata
from eaglejax.checkpoint.gguf.reader import GGUFFile
from eaglejax.checkpoint.hf import read_config
from eaglejax.checkpoint.quantized.summary import holds_target, summary
from eaglejax.checkpoint.sources import resolve
from eaglejax.cli import show
from eaglejax.config import AuxConvention
from eaglejax.drafts.draft_model.load import is_eagle
from eaglejax.drafts.eagle.files.load import draft_folder, draft_plan
from eaglejax.drafts.eagle.files.read import DraftFile, read_draft
from eaglejax.errors import ConfigError, EaglejaxError
from eaglejax.models.config import ModelConfig
from eaglejax.models.families import from_hf


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
        if not is_eagle(self.draft) and holds_target(draft_folder(self.draft)):
            return self._target(draft_folder(self.draft))
        file = read_draft(draft_folder(self.draft), aux_convention=self.aux_convention, aux=self.aux)
        draft_plan(file, jnp.float32)
        report = describe(file, None if self.target is None else target_config(self.target))
        if self.json:
            show.print_json(report)
        else:
            _print(report)
        return 0 if report["target"] is None or report["target"]["fits"] else 1

    def _target(self, folder: Path) -> int:
        if self.target is not None or self.aux is not None:
            raise ConfigError(f"{folder} holds a target; --target and --aux are for drafts")
        report = {"path": str(folder), **summary(folder)}
        if self.json:
            show.print_json(report)
        else:
            _print_target(report)
        return 0


def target_config(spec: str) -> ModelConfig:
    """A target's configuration without its weights."""
    source = resolve(spec)
    raw = config_from_metadata(GGUFFile(source.path)) if source.kind == "gguf" else read_config(source.path)
    return from_hf(raw)


def describe(file: DraftFile, target: ModelConfig | None = None) -> dict[str, Any]:
    """The object that ``inspect --json`` prints."""
    config = file.config
    parameters = sum(
        int(jnp.prod(jnp.array(file.store.shape(n)))) for n in file.store.names() if n not in ("d2t", "t2d")
    )
    fits: dict[str, Any] | None = None
    if target is not None:
        try:
            fits = {"fits": True, "why_not": None, "boundaries": list(config.fit(target).aux)}
        except EaglejaxError as error:
            fits = {"fits": False, "why_not": str(error), "boundaries": None}
    own = {
        "embedding": config.own_embedding,
        "rows of the head" if config.target_rows else "head": config.own_head,
    }
    return {
        "path": str(file.path),
        "method": f"eagle{config.version}",
        "layout": file.layout,
        "parameters": parameters,
        "config": dataclasses.asdict(config),
        "dtypes": sorted({file.store.dtype(n).name for n in file.store.names()}),
        "vocabulary": {
            "target": config.vocab_size,
            "draft": config.draft_vocab_size,
            "coverage": round(config.draft_vocab_size / config.vocab_size, 4),
            "map": "identity" if file.ids is None else f"ids {int(file.ids[0])} to {int(file.ids[-1])}",
        },
        "boundaries": list(config.aux) or None,
        "borrows": [part for part, owned in own.items() if not owned],
        "unused_tensors": list(file.unused),
        "notes": list(file.notes),
        "target": fits,
    }


def _mlp(config: dict[str, Any]) -> str:
    if not config["num_experts"]:
        return str(config["intermediate_size"])
    return (
        f"{config['num_experts']} experts of {config['moe_intermediate_size']}, "
        f"{config['experts_per_token']} a token"
    )


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


def _print(report: dict[str, Any]) -> None:
    config, vocabulary = report["config"], report["vocabulary"]
    table = rich.table.Table(show_header=False, title=report["path"], title_justify="left")
    table.add_row("method", f"{report['method']} ({report['layout']})")
    table.add_row(
        "shape",
        f"{config['num_layers']} layer, H {config['hidden_size']}, target H {config['target_hidden_size']}, "
        f"{config['num_heads']} heads / {config['num_kv_heads']} key-value heads of {config['head_dim']}, "
        f"MLP {_mlp(config)}; {report['parameters'] / 1e6:.1f} M numbers in "
        f"{', '.join(report['dtypes'])}",
    )
    flags = ("norm_before_residual", "head_norm", "feed_normed", "fc_bias", "qkv_bias", "o_bias", "qk_norm")
    on = [name for name in flags if config[name]]
    norm = [] if config["aux_norm"] == "none" else [f"features normalised: {config['aux_norm']}"]
    table.add_row("flags", ", ".join(on + norm) or "none")
    rope = config["rope"]
    table.add_row("rotary", f"{rope['kind']}, theta {rope['theta']:g}")
    table.add_row(
        "vocabulary",
        f"{vocabulary['draft']} of {vocabulary['target']} tokens ({vocabulary['coverage']:.1%}), "
        f"{vocabulary['map']}",
    )
    if report["method"] == "eagle3":
        named = report["boundaries"] or f"{config['num_aux']} of them, the target's usual ones"
        table.add_row("boundaries", str(named))
    table.add_row("borrows", ", ".join(report["borrows"]) or "nothing")
    if config["basis"] is not None:
        table.add_row("basis", f"features of a target rotated to {config['basis']}")
    for note in report["notes"]:
        table.add_row("note", note)
    if report["target"] is not None:
        fit = report["target"]
        table.add_row(
            "target", f"fits, boundaries {fit['boundaries']}" if fit["fits"] else f"NO: {fit['why_not']}"
        )
    show.stderr().print(table)
