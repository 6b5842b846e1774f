"""Tensor names of MTP modules in every published layout.

Names are seen without wrappers (``model.``, ``language_model.``). In all of them the projection reads
[embedding, state], but for MiMo's, which reads [state, embedding]. What lies in a module's layer is called as
in the target's own layers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from eaglejax.checkpoint.names import rules_of
from eaglejax.checkpoint.tables import COPY, TRANSPOSE, Layout, Rows, Rule
from eaglejax.models.config import ModelConfig
from eaglejax.pytree import leaf_paths

_WRAPPERS = re.compile(r"^(?:(?:model|module|draft_model|language_model)\.)+")


def plain_name(name: str) -> str:
    """``name`` without wrappers."""
    return _WRAPPERS.sub("", name)


def _swapped(rows: Rows) -> Rows:
    """[H, 2H] with its halves changed round."""
    half = rows.shape[-1] // 2
    return np.concatenate([rows[..., half:], rows[..., :half]], axis=-1)


@dataclasses.dataclass(frozen=True)
class Naming:
    """How one layout calls the tensors of module ``{i}``.

    ``layer``: what stands before the names of its layer; ``parts``: leaf -> name. ``shared``: leaves that all
    modules have in common, whose names know no ``{i}``. ``swapped``: the projection reads the state first.
    ``architecture``: the class that its readers look for, ``model_type`` the type.
    """

    layer: str
    parts: Mapping[str, str]
    shared: tuple[str, ...] = ()
    swapped: bool = False
    architecture: str = ""
    model_type: str = ""

    def found(self, names: Collection[str]) -> tuple[int, ...]:
        """Numbers of the modules among plain ``names``: of their projections, or of the layers behind the one
        that they share."""
        mark = self.parts["fc"]
        if "fc" in self.shared:
            if mark not in names:
                return ()
            mark = self.layer
        pattern = re.compile(re.escape(mark).replace(r"\{i\}", r"(\d{1,6})"))
        return tuple(sorted({int(m[1]) for name in names if (m := pattern.match(name))}))

    def owns(self, name: str, numbers: Collection[int]) -> bool:
        """Whether a plain name is of one of the modules with these numbers."""
        if name in [part for leaf, part in self.parts.items() if leaf in self.shared]:
            return True
        return any(name.startswith(self.layer.replace("{i}", str(i))) for i in numbers)

    def rules(self, config: ModelConfig, numbers: Collection[int]) -> list[Rule]:
        """The name table of the modules with these numbers, for a target of ``config``."""
        out = []
        projection = Layout(transposed=True, rows=_swapped) if self.swapped else TRANSPOSE
        layouts = {"fc": projection, "head": TRANSPOSE}
        for m, i in enumerate(numbers):
            out += [
                Rule(f"modules.{m}.{leaf}", name.replace("{i}", str(i)), layouts.get(leaf, COPY))
                for leaf, name in self.parts.items()
                if m == 0 or leaf not in self.shared
            ]
            before = self.layer.replace("{i}", str(i))
            out += [
                dataclasses.replace(
                    rule,
                    leaf=f"modules.{m}.layer." + rule.leaf.removeprefix(_LEAF),
                    name=before + rule.name.removeprefix(_NAME),
                )
                for rule in rules_of(config)
                if rule.leaf.startswith(_LEAF) and rule.name.startswith(_NAME)
            ]
        return out


_LEAF, _NAME = "layers.{l}.", "model.layers.{l}."
_FUSED = {
    "embed_norm": "token_layernorm.weight",
    "feature_norm": "hidden_layernorm.weight",
    "fc": "input_proj.weight",
    "norm": "final_layernorm.weight",
}

LAYOUTS: dict[str, Naming] = {
    "deepseek": Naming(
        "layers.{i}.",
        {
            "embed_norm": "layers.{i}.enorm.weight",
            "feature_norm": "layers.{i}.hnorm.weight",
            "fc": "layers.{i}.eh_proj.weight",
            "norm": "layers.{i}.shared_head.norm.weight",
            "head": "layers.{i}.shared_head.head.weight",
        },
        architecture="DeepSeekMTPModel",
        model_type="deepseek_mtp",
    ),
    "qwen": Naming(
        "mtp.layers.{i}.",
        {
            "embed_norm": "mtp.pre_fc_norm_embedding.weight",
            "feature_norm": "mtp.pre_fc_norm_hidden.weight",
            "fc": "mtp.fc.weight",
            "norm": "mtp.norm.weight",
            "head": "lm_head.weight",
        },
        shared=("embed_norm", "feature_norm", "fc", "norm", "head"),
        architecture="Qwen3NextMTP",
        model_type="qwen3_next_mtp",
    ),
    "mimo": Naming(
        "mtp_layers.{i}.",
        {leaf: f"mtp_layers.{{i}}.{name}" for leaf, name in _FUSED.items()} | {"head": "lm_head.weight"},
        shared=("head",),
        swapped=True,
        architecture="MiMoMTPModel",
        model_type="mimo_mtp",
    ),
    "speculators": Naming(
        "mtp_layers.{i}.",
        {leaf: f"mtp_layers.{{i}}.{name}" for leaf, name in _FUSED.items()} | {"head": "lm_head.weight"},
        shared=("head",),
        architecture="MTPDraftModel",
    ),
}
"""By name: DeepSeek-V3's, which GLM-4.5 and others took over; Qwen3-Next's; MiMo's; vLLM's trainer's."""

OWN = "eaglejax"
"""The project's own form: leaves under their own names, as they are held, whatever the kind of layer."""
_OWN_MODULE = re.compile(r"modules\.(\d{1,6})\.fc")


def own_modules(names: Collection[str]) -> int:
    """How many modules a file in the own form has."""
    return sum(_OWN_MODULE.fullmatch(name) is not None for name in names)


def own_rules(table: Any) -> list[Rule]:
    """The name table of the own form for a table of weights."""
    return [Rule(leaf, leaf, COPY) for leaf in leaf_paths(table)]


EMBEDDINGS = (
    r"embed",
    r"embed_tokens\.weight",
    r"layers\.\d+\.embed_tokens\.weight",
    r"mtp\.embed_tokens\.weight",
)
"""Plain names of embeddings; every module of DeepSeek's layout has a copy."""
