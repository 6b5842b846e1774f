"""EAGLE drafts as plain data for the torch side; the one module there that knows their configuration."""

from __future__ import annotations

import dataclasses

from eaglejax.drafts.base import Bound
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.errors import ConfigError
from eaglejax.interop.convert.parts import cache_dtype, check_known, moe_spec, rope_spec, tree_spec
from eaglejax.interop.convert.tensors import tree_to_torch
from eaglejax.interop.models.eagle import Draft
from eaglejax.interop.models.runner import TorchDraft
from eaglejax.interop.models.specs import EagleSpec, TreeSpec

_EAGLE_FIELDS = {
    *("version", "vocab_size", "draft_vocab_size", "hidden_size", "target_hidden_size", "intermediate_size"),
    *("num_heads", "num_kv_heads", "head_dim", "num_layers", "num_aux", "aux", "norm_eps", "rope"),
    *("activation", "aux_norm", "norm_before_residual", "head_norm", "feed_normed", "fc_bias", "qkv_bias"),
    *("o_bias", "qk_norm", "own_embedding", "own_head", "target_rows", "windows", "embed_scale", "softcap"),
    *("num_experts", "experts_per_token", "moe_intermediate_size", "basis", "feature_map"),
}
"""Fields of EagleConfig that the torch draft follows or that do not change what it computes."""


def eagle_spec(config: EagleConfig, *, tied: bool = False) -> EagleSpec:
    """The spec of a draft; ``tied``: its borrowed head is an embedding table. Raises ConfigError."""
    check_known(config, _EAGLE_FIELDS, "draft")
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


def _checked(draft: Bound) -> tuple[Eagle, EagleParams]:
    """The EAGLE draft that ``draft`` is; raises ConfigError for one that has no counterpart in torch."""
    proposer, params = draft.proposer, draft.params
    if not isinstance(proposer, Eagle) or not isinstance(params, EagleParams):
        raise ConfigError(
            f"an Eagle with its EagleParams is needed, not {type(proposer).__name__} with "
            f"{type(params).__name__}"
        )
    if proposer.sample:
        raise ConfigError(
            "the torch side grows trees of the likeliest tokens; leave out draft_sample (use sample=False)"
        )
    return proposer, params


def eagle_tree(draft: Bound) -> TreeSpec:
    """The tree that such a draft grows. Raises ConfigError where it has no counterpart in torch."""
    proposer, _ = _checked(draft)
    return tree_spec(proposer.tree, min_confidence=proposer.min_confidence)


def export_eagle(draft: Bound) -> TorchDraft:
    """A bound EAGLE draft for a ``TorchRunner``; sampled drafts are refused."""
    proposer, params = _checked(draft)
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
        eagle_tree(draft),
        None if proposer.cache_dtype is None else cache_dtype(proposer.cache_dtype),
    )
