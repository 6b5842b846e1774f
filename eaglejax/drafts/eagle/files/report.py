"""What was understood of an EAGLE checkpoint, for programs and for people."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from eaglejax.drafts.eagle.files.read import DraftFile
from eaglejax.errors import EaglejaxError
from eaglejax.models.config import ModelConfig


def report(file: DraftFile, target: ModelConfig | None = None) -> dict[str, Any]:
    """The object that ``inspect --json`` prints."""
    config = file.config
    parameters = sum(math.prod(file.store.shape(n)) for n in file.store.names() if n not in ("d2t", "t2d"))
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
        "parallel": config.parallel,
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


def rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(heading, text) of what a person sees of a report."""
    config, vocabulary = report["config"], report["vocabulary"]
    out: list[tuple[str, str]] = []

    def row(heading: str, text: str) -> None:
        out.append((heading, text))

    row("method", f"{report['method']} ({report['layout']})")
    row(
        "shape",
        f"{config['num_layers']} layer, H {config['hidden_size']}, target H {config['target_hidden_size']}, "
        f"{config['num_heads']} heads / {config['num_kv_heads']} key-value heads of {config['head_dim']}, "
        f"MLP {_mlp(config)}; {report['parameters'] / 1e6:.1f} M numbers in "
        f"{', '.join(report['dtypes'])}",
    )
    flags = ("norm_before_residual", "head_norm", "feed_normed", "fc_bias", "qkv_bias", "o_bias", "qk_norm")
    on = [name for name in flags if config[name]]
    norm = [] if config["aux_norm"] == "none" else [f"features normalised: {config['aux_norm']}"]
    row("flags", ", ".join(on + norm) or "none")
    rope = config["rope"]
    if report["parallel"]:
        row("parallel", f"all tokens behind the first in one pass, as masks of token {config['mask_id']}")
    row("rotary", f"{rope['kind']}, theta {rope['theta']:g}")
    row(
        "vocabulary",
        f"{vocabulary['draft']} of {vocabulary['target']} tokens ({vocabulary['coverage']:.1%}), "
        f"{vocabulary['map']}",
    )
    if report["method"] == "eagle3":
        named = report["boundaries"] or f"{config['num_aux']} of them, the target's usual ones"
        row("boundaries", str(named))
    row("borrows", ", ".join(report["borrows"]) or "nothing")
    if config["basis"] is not None:
        row("basis", f"features of a target rotated to {config['basis']}")
    for note in report["notes"]:
        row("note", note)
    if report["target"] is not None:
        fit = report["target"]
        row("target", f"fits, boundaries {fit['boundaries']}" if fit["fits"] else f"NO: {fit['why_not']}")
    return out
