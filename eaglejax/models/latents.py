"""Families of latent attention (MLA): DeepSeek-V2 and V3, and models of the same build."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.models.config import LayerSpec
from eaglejax.models.config_reader import ConfigReader
from eaglejax.models.family import Family, Layers, experts, no_layers
from eaglejax.models.mixtures import behind_dense, sigmoid_mixture
from eaglejax.nn import rope as rope_lib
from eaglejax.nn.indexer import Indexer
from eaglejax.nn.latent import LatentAttention
from eaglejax.nn.moe import MoeConfig

_INNER_EPS = 1e-6
"""Of the norms of latents and narrow queries, whatever the config says of the others."""


def latent_attention(read: ConfigReader, context: int | None) -> LatentAttention:
    """The mixer that a config describes.

    YaRN's ``mscale_all_dim`` strengthens the scores themselves besides what it does to cos and sin.
    """
    rope = rope_lib.from_hf(
        {**read.config, "max_position_embeddings": read.integer("max_position_embeddings")},
        default_theta=read.defaults["rope_theta"],
        context=context,
    )
    plain, rotary = read.integer("qk_nope_head_dim"), read.integer("qk_rope_head_dim")
    scale = (plain + rotary) ** -0.5
    if rope.kind == "yarn" and rope.mscale_all_dim:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2 if rope.factor > 1 else 1
    return LatentAttention(
        heads=read.integer("num_attention_heads"),
        plain_dim=plain,
        rope_dim=rotary,
        value_dim=read.integer("v_head_dim"),
        latent_dim=read.integer("kv_lora_rank"),
        scale=scale,
        rope=rope,
        query_rank=None if read.given("q_lora_rank") is None else read.integer("q_lora_rank"),
        norm_eps=_INNER_EPS,
        bias=read.flag("attention_bias"),
        indexer=_indexer(read, rotary) if "index_topk" in read.defaults else None,
    )


def _indexer(read: ConfigReader, rotary: int) -> Indexer:
    types, count = read.get("indexer_types"), read.count("num_hidden_layers")
    if types is not None and (not isinstance(types, list | tuple) or [*types] != ["full"] * count):
        raise ConfigError(
            f"indexer_types is {types!r:.80}; layers that share the choice of another are not known, each "
            f"of the {count} must be 'full'"
        )
    if read.integer("index_topk_freq") != 1 or read.get("index_topk_pattern") not in (None, "F" * count):
        raise ConfigError(
            "index_topk_freq and index_topk_pattern: layers that share the choice of another "
            "are not known; each must have its own"
        )
    return Indexer(
        heads=read.integer("index_n_heads"),
        head_dim=read.integer("index_head_dim"),
        top_k=read.integer("index_topk"),
        rope_dim=rotary,
    )


def _softmax_mixture(read: ConfigReader) -> MoeConfig:
    """Softmax scores (DeepSeek-V2, arXiv:2405.04434), compared in groups or not."""
    method = read.choice("topk_method", "greedy")
    if (
        method not in ("greedy", "group_limited_greedy")
        or read.choice("scoring_func", "softmax") != "softmax"
    ):
        raise ConfigError(
            f"topk_method {method!r:.40} with scoring_func {read.get('scoring_func')!r:.40} is not how "
            "deepseek_v2 models choose experts; known are greedy and group_limited_greedy, by softmax"
        )
    if read.flag("norm_topk_prob"):
        raise ConfigError(
            "norm_topk_prob of a deepseek_v2 model is read in two ways by published code; only false is known"
        )
    grouped = method == "group_limited_greedy"
    width = read.integer("moe_intermediate_size")
    return MoeConfig(
        experts(read),
        read.integer("num_experts_per_tok"),
        width,
        scores="softmax",
        normalize=False,
        groups=read.integer("n_group") if grouped else 1,
        top_groups=read.integer("topk_group") if grouped else 1,
        scale=read.number("routed_scaling_factor") or 1.0,
        shared=width * read.integer("n_shared_experts", least=0),
    )


def _layers(mixture: Callable[[ConfigReader], MoeConfig], kind: str = "full_attention") -> Layers:
    def layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
        no_layers(read, count, context, kind)
        mixer, moe = latent_attention(read, context), mixture(read)
        return tuple(
            LayerSpec(mixer=mixer, moe=moe if sparse else None) for sparse in behind_dense(read, count)
        )

    return layers


def _fields(read: ConfigReader) -> dict[str, Any]:
    # The head that rotary settings are checked against; heads of the mixer are its own.
    return {"head_dim": read.integer("qk_rope_head_dim"), "qkv_bias": False, "o_bias": False}


_COMMON = {
    "attention_bias": False,
    "rope_theta": 10_000.0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_V3 = Family(
    {
        **_COMMON,
        "rope_interleave": True,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    _layers(sigmoid_mixture),
    _fields,
)

_GLM = {
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "mlp_layer_types": None,
}

_DSA = {
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "indexer_types": None,
    "index_topk_freq": 1,
    "index_topk_pattern": None,
    "index_skip_topk_offset": None,
    "indexer_rope_interleave": None,
    "mlp_layer_types": None,
}
_SPARSE = _layers(sigmoid_mixture, "indexed_attention")

FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(
        {
            **_COMMON,
            "mlp_bias": False,
            "moe_intermediate_size": 1407,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
            "n_group": None,
            "topk_group": None,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "topk_method": "greedy",
        },
        _layers(_softmax_mixture),
        _fields,
    ),
    "deepseek_v3": _V3,
    "glm4_moe_lite": Family({**_V3.defaults, **_GLM}, _layers(sigmoid_mixture), _fields),
    "kimi_k2": _V3,
    "deepseek_v32": Family({**_V3.defaults, **_DSA}, _SPARSE, _fields),
    "glm_moe_dsa": Family(
        {
            **_V3.defaults,
            **_GLM,
            **_DSA,
            "q_lora_rank": 2048,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "index_n_heads": 32,
        },
        _SPARSE,
        _fields,
    ),
}
"""By ``model_type``."""
