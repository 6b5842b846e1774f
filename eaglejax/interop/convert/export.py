"""Targets and drafts of the library as plain data for the torch side: specs, and trees of tensors.

What the torch models do not compute is refused here by name, so that no setting is silently left out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from eaglejax.drafts.base import Bound
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.grow import DynamicTree
from eaglejax.drafts.tree import StaticTree
from eaglejax.errors import ConfigError
from eaglejax.interop.convert.tensors import hadamard_base, tree_to_torch
from eaglejax.interop.models.eagle import Draft
from eaglejax.interop.models.runner import TorchDraft, TorchTarget
from eaglejax.interop.models.specs import DecoderSpec, EagleSpec, MoeSpec, RopeSpec, TreeSpec
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target
from eaglejax.nn.moe import MoeConfig
from eaglejax.nn.rope import RopeConfig, frequencies

_DECODER_FIELDS = {
    *("family", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"),
    *("head_dim", "max_position", "rope", "query_scale", "norm_eps", "activation", "tie_embeddings"),
    *("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "norm_offset", "sandwich_norms"),
    *("attention_softcap", "final_softcap", "embed_scale", "layers", "qk_rotation", "post_rotation"),
}
"""Fields of ModelConfig that the torch decoder follows or that do not change what it computes."""

_EAGLE_FIELDS = {
    *("version", "vocab_size", "draft_vocab_size", "hidden_size", "target_hidden_size", "intermediate_size"),
    *("num_heads", "num_kv_heads", "head_dim", "num_layers", "num_aux", "aux", "norm_eps", "rope"),
    *("activation", "aux_norm", "norm_before_residual", "head_norm", "feed_normed", "fc_bias", "qkv_bias"),
    *("o_bias", "qk_norm", "own_embedding", "own_head", "target_rows", "windows", "embed_scale", "softcap"),
    *("num_experts", "experts_per_token", "moe_intermediate_size", "basis", "feature_map"),
}
"""The same for EagleConfig."""


def _check_known(config: ModelConfig | EagleConfig, known: set[str], what: str) -> None:
    """Refuse a setting that is in use and that the torch side has not heard of."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in known and value != field.default:
            raise ConfigError(f"the torch {what} does not compute {field.name}={value!r}")


def rope_spec(rope: RopeConfig, head_dim: int) -> RopeSpec:
    """The numbers of a rotary setting, as ``nn.rope`` computes them."""
    inv_freq, scale = frequencies(rope, head_dim)
    return RopeSpec(tuple(float(x) for x in inv_freq), scale)


def moe_spec(moe: MoeConfig | None) -> MoeSpec | None:
    """How experts are chosen and mixed."""
    return None if moe is None else MoeSpec(moe.experts, moe.top_k, moe.softmax_first, moe.normalize)


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    """The spec of a target; raises ConfigError for a setting that the torch decoder does not compute."""
    _check_known(config, _DECODER_FIELDS, "decoder")
    config.require_grouped("the torch decoder")
    layers = [config.layer(i) for i in range(config.num_layers)]
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


def eagle_spec(config: EagleConfig, *, tied: bool = False) -> EagleSpec:
    """The spec of a draft; ``tied``: its borrowed head is an embedding table. Raises ConfigError."""
    _check_known(config, _EAGLE_FIELDS, "draft")
    if config.version == 3 and config.reads_final:
        raise ConfigError("the torch side has no EAGLE-3 draft without fc (use_aux_hidden_state: false)")
    return EagleSpec(
        windows=tuple(config.window(i) for i in range(config.num_layers)),
        rope=rope_spec(config.rope, config.head_dim),
        moe=moe_spec(config.moe),
        tied=tied,
        **{
            f.name: getattr(config, f.name)
            for f in dataclasses.fields(EagleSpec)
            if f.name not in ("windows", "rope", "moe", "tied")
        },
    )


def tree_spec(tree: DynamicTree | StaticTree, *, min_confidence: float = 0.0) -> TreeSpec:
    """The spec of a draft tree."""
    if isinstance(tree, DynamicTree):
        return TreeSpec("dynamic", tree.depth, tree.branching, tree.nodes, min_confidence=min_confidence)
    return TreeSpec("static", tree.depth, tree.branching, tree.nodes, tree.parent, tree.rank, min_confidence)


def cache_dtype(dtype: Any) -> str:
    """The name of a cache's dtype that the torch side holds. Raises ConfigError for narrow formats."""
    name = np.dtype(dtype).name if not isinstance(dtype, str) else dtype
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"the torch side keeps keys and values as floats; it does not know {name!r}")
    return name


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


def eagle_of(draft: Bound) -> tuple[Eagle, EagleParams]:
    """The EAGLE draft that ``draft`` is; raises ConfigError for what has no counterpart in torch."""
    proposer, params = draft.proposer, draft.params
    if not isinstance(proposer, Eagle) or not isinstance(params, EagleParams):
        raise ConfigError(f"{type(proposer).__name__} has no torch counterpart; EAGLE drafts have")
    if proposer.sample:
        raise ConfigError(
            "the torch side grows trees of the likeliest tokens; leave out draft_sample (use sample=False)"
        )
    return proposer, params


def export_draft(draft: Bound) -> TorchDraft:
    """A bound EAGLE draft for a ``TorchRunner``; sampled drafts and other proposers are refused."""
    proposer, params = eagle_of(draft)
    return TorchDraft(
        eagle_spec(proposer.config, tied=params.tied),
        Draft(
            weights=tree_to_torch(params.weights),
            embed=tree_to_torch(params.embed),
            head=tree_to_torch(params.head),
            ids=tree_to_torch(params.ids),
            target_maps=tuple(tree_to_torch(list(params.adapter.target))),
            draft_map=tree_to_torch(params.adapter.draft),
        ),
        tree_spec(proposer.tree, min_confidence=proposer.min_confidence),
        None if proposer.cache_dtype is None else cache_dtype(proposer.cache_dtype),
    )
