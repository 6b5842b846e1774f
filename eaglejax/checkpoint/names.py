"""What the tensors of every family of targets are called in Hugging Face folders, in the names of
``*ForCausalLM``, and how they lie there."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from eaglejax.checkpoint.tables import COPY, TRANSPOSE, Columns, Layout, Part, Rows, Rule
from eaglejax.models.config import ModelConfig
from eaglejax.nn.latent import LatentAttention
from eaglejax.nn.recurrent import GatedDelta

_LAYER = "layers.{l}."
_PLACE = "model.layers.{l}."
_ATTENTION = "model.layers.{l}.self_attn."
_MLP = "model.layers.{l}.mlp."
_FEED = "model.layers.{l}.feed_forward."
_SPARSE = "model.layers.{l}.block_sparse_moe."
_STATE = "model.layers.{l}.linear_attn."
_PARTS = ("gate", "up", "down")

_ENDS = [
    Rule("embed", "model.embed_tokens.weight", COPY),
    Rule("norm", "model.norm.weight", COPY),
    Rule("head", "lm_head.weight", TRANSPOSE),
]
_QKV = [
    *(Rule(_LAYER + x, f"{_ATTENTION}{x}_proj.weight", TRANSPOSE) for x in "qkv"),
    *(Rule(f"{_LAYER}{x}_bias", f"{_ATTENTION}{x}_proj.bias", COPY) for x in "qkv"),
]
_ATTENDED = [
    Rule(_LAYER + "o", _ATTENTION + "o_proj.weight", TRANSPOSE),
    Rule(_LAYER + "o_bias", _ATTENTION + "o_proj.bias", COPY),
    *(Rule(f"{_LAYER}{x}_norm", f"{_ATTENTION}{x}_norm.weight", COPY) for x in "qk"),
]
_DENSE = [
    *(Rule(_LAYER + x, f"{_MLP}{x}_proj.weight", TRANSPOSE) for x in _PARTS),
    *(Rule(f"{_LAYER}{x}_bias", f"{_MLP}{x}_proj.bias", COPY) for x in _PARTS),
]


def _norms(**names: str) -> list[Rule]:
    return [Rule(_LAYER + ours, f"{_PLACE}{theirs}.weight", COPY) for ours, theirs in names.items()]


_PRE_NORM = _norms(attn_norm="input_layernorm", mlp_norm="post_attention_layernorm")
_POST_NORM = _norms(post_attn_norm="post_attention_layernorm", post_mlp_norm="post_feedforward_layernorm")
_SANDWICH = [*_norms(attn_norm="input_layernorm", mlp_norm="pre_feedforward_layernorm"), *_POST_NORM]
_GLM_NORMS = [
    *_PRE_NORM,
    *_norms(post_attn_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm"),
]
_COMMON = [*_ENDS, *_QKV, *_ATTENDED, *_DENSE]
_LLAMA = [*_COMMON, *_PRE_NORM]


def _experts(at: str, gate: str, up: str, down: str) -> list[Rule]:
    names = zip(_PARTS, (gate, up, down), strict=True)
    return [
        Rule(_LAYER + "router", at + "gate.weight", TRANSPOSE),
        *(Rule(f"{_LAYER}experts.{x}", f"{at}experts.{{e}}.{name}.weight", TRANSPOSE) for x, name in names),
    ]


def _shared(name: str) -> list[Rule]:
    return [Rule(f"{_LAYER}shared.{x}", f"{_MLP}{name}.{x}_proj.weight", TRANSPOSE) for x in _PARTS]


_MIXTRAL = _experts(_SPARSE, "w1", "w3", "w2")
_QWEN = _experts(_MLP, "gate_proj", "up_proj", "down_proj")
_QWEN_SHARED = [
    *_QWEN,
    *_shared("shared_expert"),
    Rule(_LAYER + "shared_gate", _MLP + "shared_expert_gate.weight", TRANSPOSE),
]
_SIGMOID = [
    *_QWEN,
    *_shared("shared_experts"),
    Rule(_LAYER + "correction", _MLP + "gate.e_score_correction_bias", COPY),
]


def _pairs(heads_of: int, first: int, last: int) -> Layout:
    """A projection to heads of ``heads_of`` rows whose rows [first, last) hold rotary pairs side by side: its
    pairs are put half a rotation apart, as ``nn.rope`` has them."""

    def apart(rows: Rows) -> Rows:
        heads = rows.reshape(-1, heads_of, rows.shape[-1])
        turned = heads[:, first:last]
        parts = (heads[:, :first], turned[:, 0::2], turned[:, 1::2], heads[:, last:])
        return np.concatenate(parts, axis=1).reshape(rows.shape)

    return Layout(transposed=True, rows=apart)


def _bias_pairs(matrix: Layout) -> Layout:
    apart = matrix.rows
    assert apart is not None
    return Layout(rows=lambda rows: apart(rows.reshape(-1, 1)).reshape(rows.shape))


def _interleaved(config: ModelConfig) -> list[Rule]:
    matrix = _pairs(config.head_dim, 0, config.rope.rotary_dim(config.head_dim))
    return [
        *(Rule(_LAYER + x, f"{_ATTENTION}{x}_proj.weight", matrix) for x in "qk"),
        *(Rule(f"{_LAYER}{x}_bias", f"{_ATTENTION}{x}_proj.bias", _bias_pairs(matrix)) for x in "qk"),
        Rule(_LAYER + "v", _ATTENTION + "v_proj.weight", TRANSPOSE),
        Rule(_LAYER + "v_bias", _ATTENTION + "v_proj.bias", COPY),
    ]


def _split(name: str, leaves: Sequence[str], sizes: Sequence[int], times: int = 1) -> list[Rule]:
    """Leaves that lie one behind the other in the rows of one tensor, ``times`` over."""
    whole = times * sum(sizes)
    rows = np.arange(whole).reshape(times, -1)
    parts = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
    return [
        Rule(_LAYER + leaf, name, Layout(transposed=True, part=Part(part.reshape(-1), whole)))
        for leaf, part in zip(leaves, parts, strict=True)
    ]


def _fused_mlp(config: ModelConfig) -> list[Rule]:
    f = config.intermediate_size
    return [
        *_split(_MLP + "gate_up_proj.weight", ("gate", "up"), (f, f)),
        Rule(_LAYER + "down", _MLP + "down_proj.weight", TRANSPOSE),
    ]


def _phi3(config: ModelConfig) -> list[Rule]:
    q, k = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [
        *_ENDS,
        *_split(_ATTENTION + "qkv_proj.weight", ("q", "k", "v"), (q, k, k)),
        *_ATTENDED,
        *_fused_mlp(config),
        *_PRE_NORM,
    ]


def _ernie(config: ModelConfig) -> list[Rule]:
    return [*_ENDS, *_interleaved(config), *_ATTENDED, *_DENSE, *_PRE_NORM]


def _ernie_moe(config: ModelConfig) -> list[Rule]:
    correction = _MLP + "moe_statics.e_score_correction_bias"
    return [
        *_ernie(config),
        *_QWEN,
        *_shared("shared_experts"),
        # Kept as [1, E], for one group.
        Rule(_LAYER + "correction", correction, Layout(depthwise=True)),
    ]


def _glm4(config: ModelConfig) -> list[Rule]:
    return [*_ENDS, *_interleaved(config), *_ATTENDED, *_fused_mlp(config), *_GLM_NORMS]


def _minimax(config: ModelConfig) -> list[Rule]:
    del config
    return [*_LLAMA, *_MIXTRAL, Rule(_LAYER + "correction", _SPARSE + "e_score_correction_bias", COPY)]


def _expert_width(config: ModelConfig) -> int:
    """Of a model that has experts; 0 for another, whose rules of experts are never asked."""
    return next((layer.moe.intermediate_size for layer in config.layers if layer.moe is not None), 0)


def _gate_up(config: ModelConfig, name: str, leaves: str, *, by_turns: bool) -> list[Rule]:
    """Experts' gates and ups in the columns of one tensor, by turns or one behind the other."""
    f = _expert_width(config)
    taken = (range(0, 2 * f, 2), range(1, 2 * f, 2)) if by_turns else (range(f), range(f, 2 * f))
    return [
        Rule(f"{_LAYER}experts.{x}{leaves}", name, Layout(columns=Columns(columns, 2 * f)))
        for x, columns in zip(("gate", "up"), taken, strict=True)
    ]


def _gpt_oss(config: ModelConfig) -> list[Rule]:
    experts = _MLP + "experts."
    return [
        *_LLAMA,
        Rule(_LAYER + "sinks", _ATTENTION + "sinks", COPY),
        Rule(_LAYER + "router", _MLP + "router.weight", TRANSPOSE),
        Rule(_LAYER + "router_bias", _MLP + "router.bias", COPY),
        *_gate_up(config, experts + "gate_up_proj", "", by_turns=True),
        *_gate_up(config, experts + "gate_up_proj_bias", "_bias", by_turns=True),
        Rule(_LAYER + "experts.down", experts + "down_proj", COPY),
        Rule(_LAYER + "experts.down_bias", experts + "down_proj_bias", COPY),
    ]


def _llama4(config: ModelConfig) -> list[Rule]:
    return [
        *_ENDS,
        *_interleaved(config),
        *_ATTENDED[:2],
        *_PRE_NORM,
        *(Rule(_LAYER + x, f"{_FEED}{x}_proj.weight", TRANSPOSE) for x in _PARTS),
        Rule(_LAYER + "router", _FEED + "router.weight", TRANSPOSE),
        *_gate_up(config, _FEED + "experts.gate_up_proj", "", by_turns=False),
        Rule(_LAYER + "experts.down", _FEED + "experts.down_proj", COPY),
        *(Rule(f"{_LAYER}shared.{x}", f"{_FEED}shared_expert.{x}_proj.weight", TRANSPOSE) for x in _PARTS),
    ]


def _latent(config: ModelConfig) -> list[Rule]:
    mixer = config.layers[0].mixer
    assert isinstance(mixer, LatentAttention)
    plain, width, r = mixer.plain_dim, mixer.plain_dim + mixer.rope_dim, mixer.latent_dim
    queries = _pairs(width, plain, width)
    narrow = _pairs(r + mixer.rope_dim, r, r + mixer.rope_dim)
    return [
        *_ENDS,
        Rule(_LAYER + "q", _ATTENTION + "q_proj.weight", queries),
        Rule(_LAYER + "q_a", _ATTENTION + "q_a_proj.weight", TRANSPOSE),
        Rule(_LAYER + "q_a_bias", _ATTENTION + "q_a_proj.bias", COPY),
        Rule(_LAYER + "q_a_norm", _ATTENTION + "q_a_layernorm.weight", COPY),
        Rule(_LAYER + "q_b", _ATTENTION + "q_b_proj.weight", queries),
        Rule(_LAYER + "kv_a", _ATTENTION + "kv_a_proj_with_mqa.weight", narrow),
        Rule(_LAYER + "kv_a_bias", _ATTENTION + "kv_a_proj_with_mqa.bias", _bias_pairs(narrow)),
        Rule(_LAYER + "kv_a_norm", _ATTENTION + "kv_a_layernorm.weight", COPY),
        *_split(_ATTENTION + "kv_b_proj.weight", ("k_b", "v_b"), (plain, mixer.value_dim), mixer.heads),
        *_ATTENDED[:2],
        *_DENSE,
        *_PRE_NORM,
        *_SIGMOID,
        *_indexed(config, mixer),
    ]


def _indexed(config: ModelConfig, mixer: LatentAttention) -> list[Rule]:
    """The indexer's; of GLM-5 its pairs lie side by side too."""
    if mixer.indexer is None:
        return []
    matrix, vector = TRANSPOSE, COPY
    if config.family == "glm_moe_dsa":
        matrix = _pairs(mixer.indexer.head_dim, 0, mixer.rope_dim)
        vector = _bias_pairs(matrix)
    at = _ATTENTION + "indexer."
    return [
        Rule(_LAYER + "index_q", at + "wq_b.weight", matrix),
        Rule(_LAYER + "index_k", at + "wk.weight", matrix),
        Rule(_LAYER + "index_k_norm", at + "k_norm.weight", vector),
        Rule(_LAYER + "index_k_bias", at + "k_norm.bias", vector),
        Rule(_LAYER + "index_weights", at + "weights_proj.weight", TRANSPOSE),
    ]


def _hybrid(config: ModelConfig) -> list[Rule]:
    d = config.head_dim
    return [
        *_ENDS,
        *_split(_ATTENTION + "q_proj.weight", ("q", "q_gate"), (d, d), config.num_heads),
        *(rule for rule in _QKV if not rule.leaf.endswith((".q", ".q_bias"))),
        *_ATTENDED,
        *_DENSE,
        *_PRE_NORM,
        *_QWEN_SHARED,
        Rule(_LAYER + "conv", _STATE + "conv1d.weight", Layout(transposed=True, depthwise=True)),
        Rule(_LAYER + "a_log", _STATE + "A_log", COPY),
        Rule(_LAYER + "dt_bias", _STATE + "dt_bias", COPY),
        Rule(_LAYER + "out_norm", _STATE + "norm.weight", COPY),
        Rule(_LAYER + "o", _STATE + "out_proj.weight", TRANSPOSE),
    ]


def _qwen3_next(config: ModelConfig) -> list[Rule]:
    """Projections lie together, those of each key head and of the value heads that share it."""
    mixer = next((layer.mixer for layer in config.layers if isinstance(layer.mixer, GatedDelta)), None)
    if mixer is None:
        return _hybrid(config)
    keys, share = mixer.key_heads, mixer.heads // mixer.key_heads
    dk, dv = mixer.key_dim, share * mixer.value_dim
    rows = np.arange(keys * 2 * (dk + dv)).reshape(keys, -1)
    q, k, v, z = np.split(rows, (dk, 2 * dk, 2 * dk + dv), axis=1)
    qkv = np.concatenate([x.reshape(-1) for x in (q, k, v)])
    joined = (("qkv", qkv), ("z", z.reshape(-1)))
    return [
        *_hybrid(config),
        *(
            Rule(_LAYER + leaf, _STATE + "in_proj_qkvz.weight", Layout(True, part=Part(index, rows.size)))
            for leaf, index in joined
        ),
        *_split(_STATE + "in_proj_ba.weight", ("b", "a"), (share, share), keys),
    ]


def _qwen3_5(config: ModelConfig) -> list[Rule]:
    apart = ("qkv", "z", "b", "a")
    return [*_hybrid(config), *(Rule(_LAYER + x, f"{_STATE}in_proj_{x}.weight", TRANSPOSE) for x in apart)]


_HUNYUAN = [
    *(rule for rule in _LLAMA if not rule.leaf.endswith(("q_norm", "k_norm"))),
    Rule(_LAYER + "q_norm", _ATTENTION + "query_layernorm.weight", COPY),
    Rule(_LAYER + "k_norm", _ATTENTION + "key_layernorm.weight", COPY),
]

_OF_FAMILY = {
    "llama": _LLAMA,
    "mimo": _LLAMA,
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": [
        *_HUNYUAN,
        *_QWEN[1:],
        Rule(_LAYER + "router", _MLP + "gate.wg.weight", TRANSPOSE),
        *_shared("shared_mlp"),
    ],
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "seed_oss": _LLAMA,
    "gemma2": [*_COMMON, *_SANDWICH],
    "gemma3_text": [*_COMMON, *_SANDWICH],
    "olmo2": [*_COMMON, *_POST_NORM],
    "olmo3": [*_COMMON, *_POST_NORM],
    "mixtral": [*_LLAMA, *_MIXTRAL],
    "qwen2_moe": [*_LLAMA, *_QWEN_SHARED],
    "qwen3_moe": [*_LLAMA, *_QWEN],
    "glm4_moe": [*_LLAMA, *_SIGMOID],
}
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa")
_OF_SHAPE = {
    "phi3": _phi3,
    "ernie4_5": _ernie,
    "ernie4_5_moe": _ernie_moe,
    "glm4": _glm4,
    "minimax_m2": _minimax,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    **dict.fromkeys(_LATENT, _latent),
    "qwen3_next": _qwen3_next,
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _qwen3_5),
}


@functools.cache
def rules_of(config: ModelConfig) -> list[Rule]:
    """The name table of a model. Raises KeyError for a family whose files are not known."""
    if config.family in _OF_SHAPE:
        return _OF_SHAPE[config.family](config)
    return _OF_FAMILY[config.family]


_BUFFERS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")
"""Buffers that old checkpoints carry; they follow from the configuration."""

_MODULES = (r"(model\.)?mtp(_layers)?\..*",)
"""Modules that draft under names of their own (multi-token prediction; see ``drafts.mtp``)."""

_TOWERS = {
    "gemma3_text": (r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*"),
    "llama4_text": (r"vision_model\..*", r"multi_modal_projector\..*"),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), (r"(model\.)?visual\..*",)),
}
"""The other towers of checkpoints whose language model is read."""

_DRAFTING_LAYERS = (*_LATENT, "glm4_moe")
"""Families that keep draft layers (multi-token prediction) behind their own."""


def ignorable_of(config: ModelConfig) -> tuple[str, ...]:
    """Regular expressions of the tensors in a model's files that are none of its weights."""
    drafting: tuple[str, ...] = ()
    if config.family in _DRAFTING_LAYERS:
        drafting = tuple(rf"model\.layers\.{config.num_layers + i}\..*" for i in range(_MOST_DRAFTING))
    return (*_BUFFERS, *_MODULES, *_TOWERS.get(config.family, ()), *drafting)


_MOST_DRAFTING = 4
