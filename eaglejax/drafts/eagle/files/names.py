"""Tensor names of EAGLE drafts: what every producer calls a weight, and which leaf of the draft it is.

Producers differ in wrappers (``model.``, ``draft_model.``, ``eagle_module.`` ...) and in the name of
EAGLE-3's first layer (``midlayer.`` or ``layers.0.``). Names are reduced to one *plain* form, ``layers.{l}.``
without wrappers; a rule table maps that to leaves. Writing goes the other way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping

import numpy as np

from eaglejax.checkpoint.tables import COPY, TRANSPOSE, Rule
from eaglejax.drafts.files import TensorFile
from eaglejax.errors import CheckpointError

_WRAPPERS = re.compile(r"^(?:(?:model|module|draft_model|draft|eagle_module|eagle|language_model)\.)+")
_RENAMED = (
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^eagle_lm_head\."), "lm_head."),
)

_LAYER, _ATTENTION, _MLP = "layers.{l}.", "layers.{l}.self_attn.", "layers.{l}.mlp."

RULES: list[Rule] = [
    Rule("fc", "fc.weight", TRANSPOSE),
    Rule("fc_bias", "fc.bias", COPY),
    Rule("feature_map", "feature_map.weight", TRANSPOSE),
    Rule("mask", "mask_hidden", COPY),
    Rule("norm", "norm.weight", COPY),
    Rule("embed", "embed_tokens.weight", COPY),
    Rule("head", "lm_head.weight", TRANSPOSE),
    Rule(_LAYER + "input_norm", _LAYER + "input_layernorm.weight", COPY),
    Rule(_LAYER + "hidden_norm", _LAYER + "hidden_norm.weight", COPY),
    Rule(_LAYER + "mlp_norm", _LAYER + "post_attention_layernorm.weight", COPY),
    *(Rule(_LAYER + x, f"{_ATTENTION}{x}_proj.weight", TRANSPOSE) for x in "qkvo"),
    *(Rule(f"{_LAYER}{x}_bias", f"{_ATTENTION}{x}_proj.bias", COPY) for x in "qkvo"),
    *(Rule(f"{_LAYER}{x}_norm", f"{_ATTENTION}{x}_norm.weight", COPY) for x in "qk"),
    *(Rule(_LAYER + x, f"{_MLP}{x}_proj.weight", TRANSPOSE) for x in ("gate", "up", "down")),
    Rule(_LAYER + "router", f"{_MLP}gate.weight", TRANSPOSE),
    *(
        Rule(f"{_LAYER}experts.{x}", f"{_MLP}experts.{{e}}.{x}_proj.weight", TRANSPOSE)
        for x in ("gate", "up", "down")
    ),
]
"""Plain names of all leaves but ``aux_norm``, whose form depends on the configuration (see ``rules``)."""

MASK = "mask_hidden"
"""What stands for the features of unknown tokens; stored with dimensions of 1 before the one it has here."""

VOCABULARY = ("d2t", "t2d")
"""The vocabulary map; read by itself, not a weight."""

IGNORABLE = (
    r"d2t",
    r"t2d",
    r"verifier_lm_head\.weight",
    r"verifier_norm\.weight",
    r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)
"""Not weights of the draft: the map, copies of target tensors that a trainer saved, and constants."""


def rules(aux_norm: str) -> list[Rule]:
    """The name table for a draft with this ``EagleConfig.aux_norm``."""
    if aux_norm == "joined":
        return [*RULES, Rule("aux_norm", "input_norm.weight", COPY)]
    if aux_norm == "each":
        return [*RULES, Rule("aux_norm", "fc_norm.{e}.weight", COPY)]
    return RULES


def plain_name(name: str) -> str:
    """``name`` without wrappers, in the plain form."""
    name = _WRAPPERS.sub("", name)
    for pattern, new in _RENAMED:
        name = pattern.sub(new, name)
    return name


class PlainStore:
    """A tensor file seen through plain names. Raises ``CheckpointError`` when two tensors get the same
    one."""

    def __init__(self, file: TensorFile, where: str) -> None:
        self._file = file
        self.stored: Mapping[str, str]
        stored: dict[str, str] = {}
        for name in file.names():
            plain = plain_name(name)
            if plain in stored:
                raise CheckpointError(
                    f"{where} holds {plain} twice: as {stored[plain]!r} and as {name!r}; keep the right one"
                )
            stored[plain] = name
        self.stored = stored

    def names(self) -> Collection[str]:
        return self.stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._file.shape(self.stored[name])
        return (math.prod(shape),) if name == MASK else shape

    def dtype(self, name: str) -> np.dtype:
        return self._file.dtype(self.stored[name])

    def array(self, name: str) -> np.ndarray:
        array = self._file.array(self.stored[name])
        return array.reshape(-1) if name == MASK else array

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._file.rows(self.stored[name], start, stop)
