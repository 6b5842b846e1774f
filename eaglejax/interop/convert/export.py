"""Targets and drafts of the library as plain data for the torch side: specs, and trees of tensors.

What the torch models do not compute is refused here by name, so that no setting is silently left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from eaglejax.drafts.base import Bound
from eaglejax.drafts.registry import family_of
from eaglejax.errors import ConfigError
from eaglejax.interop.convert.eagle import eagle_tree, export_eagle
from eaglejax.interop.convert.parts import cache_dtype, check_known, moe_spec, rope_spec
from eaglejax.interop.convert.tensors import hadamard_base, tree_to_torch
from eaglejax.interop.models.runner import TorchDraft, TorchTarget
from eaglejax.interop.models.specs import DecoderSpec, TreeSpec
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target

_DECODER_FIELDS = {
    *("family", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"),
    *("head_dim", "max_position", "rope", "query_scale", "norm_eps", "activation", "tie_embeddings"),
    *("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "norm_offset", "sandwich_norms"),
    *("attention_softcap", "final_softcap", "embed_scale", "layers", "qk_rotation", "post_rotation"),
}
"""Fields of ModelConfig that the torch decoder follows or that do not change what it computes."""


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    """The spec of a target; raises ConfigError for a setting that the torch decoder does not compute."""
    check_known(config, _DECODER_FIELDS, "decoder")
    config.require_grouped("the torch decoder")
    layers = [config.layer(i) for i in range(config.num_layers)]
    for i, layer in enumerate(layers):
        if layer.rope is None or layer.chunk is not None:
            what = "sees its chunk alone" if layer.chunk is not None else "turns nothing by its position"
            raise ConfigError(f"the torch decoder has no layer that {what}, as layer {i} does")
    kinds = list(dict.fromkeys(layer.rope for layer in layers if layer.rope is not None))
    mixtures = {layer.moe for layer in layers if layer.moe is not None}
    if len(mixtures) > 1:
        raise ConfigError(f"the torch decoder has one mixture of experts for all layers, not {len(mixtures)}")
    return DecoderSpec(
        windows=tuple(layer.window for layer in layers),
        rope_table=tuple(rope_spec(rope, config.head_dim) for rope in kinds),
        ropes=tuple(kinds.index(layer.rope) for layer in layers if layer.rope is not None),
        sparse=tuple(layer.moe is not None for layer in layers),
        moe=moe_spec(mixtures.pop() if mixtures else None),
        **{
            f.name: getattr(config, f.name)
            for f in dataclasses.fields(DecoderSpec)
            if f.name not in ("windows", "rope_table", "ropes", "sparse", "moe")
        },
    )


def export_target(target: Target, *, cache: Any = None) -> TorchTarget:
    """``target`` for a ``TorchRunner``: its weights as tensors on the host, packed ones kept packed.

    ``cache``: dtype of keys and values (default: the target's). Raises ConfigError for what the torch side
    does not compute.
    """
    spec = decoder_spec(target.config)
    params = tree_to_torch(target.params)
    if target.config.qk_rotation:
        params = {**params, "qk_rotation": hadamard_base(target.config.head_dim)}
    return TorchTarget(spec, params, cache_dtype(cache if cache is not None else target.dtype))


@dataclasses.dataclass(frozen=True)
class DraftExport:
    """How a family's drafts come to torch: ``draft`` whole, ``tree`` without touching its weights. Both raise
    ConfigError for a draft that has no counterpart there."""

    draft: Callable[[Bound], TorchDraft]
    tree: Callable[[Bound], TreeSpec]


DRAFTS = {"EAGLE": DraftExport(export_eagle, eagle_tree)}
"""The families of drafts that torch runs, by ``DraftFamily.name``."""


def export_draft(draft: Bound) -> TorchDraft:
    """A bound draft for a ``TorchRunner``; raises ConfigError for one that has no counterpart in torch."""
    return _export_of(draft).draft(draft)


def draft_tree(draft: Bound) -> TreeSpec:
    """The tree that such a draft grows; raises ConfigError as ``export_draft`` does."""
    return _export_of(draft).tree(draft)


def _export_of(draft: Bound) -> DraftExport:
    family = family_of(draft.proposer)
    if family is None or family.name not in DRAFTS:
        raise ConfigError(
            f"{type(draft.proposer).__name__} has no torch counterpart; {' and '.join(DRAFTS)} drafts have"
        )
    return DRAFTS[family.name]
