"""Tensor names of Medusa heads in every published layout.

``medusa``: the authors' (a list of heads, each a list of residual blocks with the output matrix behind them,
in ``medusa_lm_head``, or within a whole model as ``medusa_head``); ``vllm``: the one that vLLM reads. Names
are seen without what wrappers put before them.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from eaglejax.checkpoint.tables import COPY, TRANSPOSE, Rule
from eaglejax.drafts.medusa.config import MedusaConfig

TOKEN_MAP = "token_map"
FEATURE_MAP = "feature_map"

_WRAPPERS = re.compile(r"^(?:(?:module|base_model|medusa_model|medusa_heads?)\.)+")
_BLOCKS = {
    "medusa": re.compile(r"(?P<head>\d{1,4})\.(?P<layer>\d{1,4})\.linear\.(?:weight|bias)"),
    "vllm": re.compile(r"blocks\.(?P<head>\d{1,4})\.layers\.(?P<layer>\d{1,4})\.(?:weight|bias)"),
}
_OUTPUTS = {
    "medusa": re.compile(r"(?P<head>\d{1,4})\.\d{1,4}\.weight"),
    "vllm": re.compile(r"lm_heads\.(?P<head>\d{1,4})\.weight"),
}
LAYOUTS = tuple(_BLOCKS)


def plain_name(name: str) -> str:
    """``name`` without wrappers."""
    return _WRAPPERS.sub("", name)


def layout_of(names: Collection[str]) -> str | None:
    """The layout whose residual blocks, or lone output matrices, are among plain ``names``."""
    for patterns in (_BLOCKS, _OUTPUTS):
        for layout, pattern in patterns.items():
            if any(pattern.fullmatch(name) for name in names):
                return layout
    return None


def is_part(name: str) -> bool:
    """Whether a plain name is one of heads, whatever the layout."""
    patterns = (*_BLOCKS.values(), *_OUTPUTS.values())
    return name in (TOKEN_MAP, FEATURE_MAP) or any(pattern.fullmatch(name) for pattern in patterns)


def is_output(name: str) -> bool:
    """Whether a plain name is that of a matrix to the vocabulary."""
    return name == "lm_head.weight" or any(p.fullmatch(name) for p in _OUTPUTS.values())


def counts(names: Collection[str], layout: str) -> tuple[int, int, int]:
    """(heads, residual blocks of the largest head, output matrices) that plain ``names`` speak of."""
    blocks = [m for name in names if (m := _BLOCKS[layout].fullmatch(name))]
    outputs = {int(m["head"]) for name in names if (m := _OUTPUTS[layout].fullmatch(name))}
    heads = {int(m["head"]) for m in blocks} | (set() if blocks and layout == "vllm" else outputs)
    layers = {int(m["layer"]) for m in blocks}
    return 1 + max(heads, default=-1), 1 + max(layers, default=-1), len(outputs)


def rules(config: MedusaConfig, layout: str) -> list[Rule]:
    """The name table of heads."""
    found = [Rule(FEATURE_MAP, FEATURE_MAP), Rule("out", "lm_heads.0.weight", TRANSPOSE)]
    found.append(Rule("out", "lm_head.weight", TRANSPOSE))
    for k in range(config.heads):
        block = f"{k}.{{j}}.linear" if layout == "medusa" else f"blocks.{k}.layers.{{j}}"
        last = f"{k}.{config.layers}.weight" if layout == "medusa" else f"lm_heads.{k}.weight"
        found.append(Rule(f"heads.{k}.out", last, TRANSPOSE))
        for j in range(config.layers):
            name = block.replace("{j}", str(j))
            found.append(Rule(f"heads.{k}.layers.{j}.w", f"{name}.weight", TRANSPOSE))
            found.append(Rule(f"heads.{k}.layers.{j}.b", f"{name}.bias", COPY))
    return found
