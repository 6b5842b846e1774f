"""Families of grouped-query attention whose feed-forward blocks are mixtures of experts."""

from __future__ import annotations

from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.models import dense
from eaglejax.models.config import LayerSpec
from eaglejax.models.config_reader import ConfigReader
from eaglejax.models.dense import HUNYUAN
from eaglejax.models.family import (
    Family,
    Layers,
    alternating,
    every_so_many,
    experts,
    kinds_or,
    no_layers,
    one_window,
    rotary_layers,
    sliding,
    with_mixture,
)
from eaglejax.nn.moe import MoeConfig


def qwen_mixture(read: ConfigReader) -> MoeConfig:
    """Softmax over all experts; with a shared one behind a gate where the config says how wide it is."""
    shared = "shared_expert_intermediate_size" in read.defaults
    return MoeConfig(
        experts(read),
        read.integer("num_experts_per_tok"),
        read.integer("moe_intermediate_size"),
        scores="softmax",
        normalize=read.flag("norm_topk_prob"),
        shared=read.integer("shared_expert_intermediate_size") if shared else 0,
        shared_gate=shared,
    )


def sigmoid_mixture(read: ConfigReader) -> MoeConfig:
    """Sigmoid scores with a correction, compared in groups (DeepSeek-V3, arXiv:2412.19437 eq. 12 to 16)."""
    if (
        read.choice("scoring_func", "sigmoid") != "sigmoid"
        or read.choice("topk_method", "noaux_tc") != "noaux_tc"
    ):
        raise ConfigError(
            f"scoring_func {read.get('scoring_func')!r:.40}, topk_method {read.get('topk_method')!r:.40} are "
            f"not how {read.family} models choose experts: by sigmoids, noaux_tc"
        )
    width = read.integer("moe_intermediate_size")
    return MoeConfig(
        experts(read),
        read.integer("num_experts_per_tok"),
        width,
        scores="sigmoid",
        normalize=read.flag("norm_topk_prob"),
        correction=True,
        groups=read.integer("n_group"),
        top_groups=read.integer("topk_group"),
        group_best=2,
        scale=read.number("routed_scaling_factor") or 1.0,
        shared=width * read.integer("n_shared_experts", least=0),
    )


def behind_dense(read: ConfigReader, count: int) -> tuple[bool, ...]:
    """Which layers are mixtures: as ``mlp_layer_types`` says, else all but the first
    ``first_k_dense_replace``."""
    types = read.get("mlp_layer_types")
    if types is not None:
        if (
            not isinstance(types, list | tuple)
            or len(types) != count
            or not set(types) <= {"dense", "sparse"}
        ):
            raise ConfigError(f"mlp_layer_types is {types!r:.80}; it must hold {count} times dense or sparse")
        return tuple(t == "sparse" for t in types)
    if read.integer("moe_layer_freq", 1) != 1:
        raise ConfigError(f"moe_layer_freq is {read.get('moe_layer_freq')}; only 1 is known to be used")
    first = read.integer("first_k_dense_replace", least=0)
    return tuple(i >= first for i in range(count))


def _mixtral_layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    moe = MoeConfig(
        experts(read),
        read.integer("num_experts_per_tok"),
        read.integer("intermediate_size"),
        scores="of chosen",
        normalize=False,
    )
    return with_mixture(one_window(read, count, context), moe, (True,) * count)


def _qwen_layers(windows: Layers) -> Layers:
    def layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
        return with_mixture(windows(read, count, context), qwen_mixture(read), every_so_many(read, count))

    return layers


def _qwen2_windows(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    """Every second of the first ``max_window_layers`` layers slides."""
    del context
    if not read.flag("use_sliding_window"):
        return ()
    most = read.integer("max_window_layers", least=0)
    return sliding(
        read, kinds_or(read, count, lambda: tuple(bool((i + 1) % 2) and i < most for i in range(count)))
    )


def _glm_layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    return with_mixture(no_layers(read, count, context), sigmoid_mixture(read), behind_dense(read, count))


def _minimax_layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    moe = MoeConfig(
        experts(read),
        read.integer("num_experts_per_tok"),
        read.integer("intermediate_size"),
        scores="sigmoid",
        normalize=True,
        correction=True,
    )
    return with_mixture(no_layers(read, count, context), moe, (True,) * count)


def _minimax_fields(read: ConfigReader) -> dict[str, Any]:
    if read.choice("scoring_func", "sigmoid") != "sigmoid" or not read.flag("use_qk_norm"):
        raise ConfigError("a minimax_m2 model scores experts by sigmoids and normalises queries and keys")
    return {"qk_norm": True, "qk_norm_whole": True}


def _gpt_oss_layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    if (read.number("swiglu_alpha"), read.number("swiglu_limit")) != (1.702, 7.0):
        raise ConfigError("swiglu_alpha and swiglu_limit are known as 1.702 and 7 alone")
    moe = MoeConfig(
        experts(read),
        read.integer("num_experts_per_tok", read.get("experts_per_token")),
        read.integer("intermediate_size"),
        scores="of chosen",
        normalize=False,
        router_bias=True,
        bias=True,
    )
    return with_mixture(alternating(2)(read, count, context), moe, (True,) * count)


def _of_every_layer(read: ConfigReader, key: str, default: int | None = None) -> int:
    """A number that a config may give once, or for each layer; layers that differ are not known."""
    value = read.get(key, default)
    if isinstance(value, list | tuple) and value and all(v == value[0] for v in value):
        value = value[0]
    return ConfigReader(read.family, {key: value}, {}).integer(key)


def _hunyuan_layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    width = read.integer("intermediate_size")
    if _of_every_layer(read, "moe_intermediate_size", width) != width:
        raise ConfigError(
            f"moe_intermediate_size is {read.get('moe_intermediate_size')!r:.80} beside an intermediate_size "
            f"of {width}; experts of hunyuan_v1_moe models are as wide as the shared one"
        )
    if _of_every_layer(read, "num_shared_expert") != 1 or read.flag("use_cla"):
        raise ConfigError("a hunyuan_v1_moe model has one shared expert, and shares no keys between layers")
    moe = MoeConfig(
        _of_every_layer(read, "num_experts"),
        _of_every_layer(read, "moe_topk"),
        width,
        scores="softmax",
        normalize=True,
        shared=width,
    )
    return with_mixture(no_layers(read, count, context), moe, (True,) * count)


def _ernie_layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    """Softmax scores with a correction; mixtures between two layers, every so often."""
    if read.flag("use_bias"):
        raise ConfigError("use_bias is set; biases are not known of ernie4_5_moe's experts")
    if not 0 < (read.number("moe_norm_min") or 0) <= 1e-6:
        raise ConfigError(f"moe_norm_min is {read.get('moe_norm_min')!r:.80}; known are values up to 1e-6")
    width, step = read.integer("moe_intermediate_size"), read.integer("moe_layer_interval")
    moe = MoeConfig(
        read.count("moe_num_experts"),
        read.integer("moe_k"),
        width,
        scores="softmax",
        normalize=True,
        correction=True,
        shared=width * read.integer("moe_num_shared_experts", least=0),
    )
    first, last = (read.integer(f"moe_layer_{end}_index", least=-1) for end in ("start", "end"))
    last = count - 1 if last == -1 else last
    sparse = tuple(first <= i <= last and not (i + 1) % step for i in range(count))
    return with_mixture(no_layers(read, count, context), moe, sparse)


def _llama4_layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    """Every so-manieth layer turns nothing by its position and sees all; the others see their chunk. Layers
    are mixtures by turns."""
    del context
    rotary = rotary_layers(read, count)
    chunk = None if read.given("attention_chunk_size") is None else read.integer("attention_chunk_size")
    types = read.kinds(count) or tuple(
        "chunked_attention" if r and chunk is not None else "full_attention" for r in rotary
    )
    if not set(types) <= {"chunked_attention", "full_attention"} or (
        chunk is None and "chunked_attention" in types
    ):
        raise ConfigError(
            f"layer_types {sorted(set(types))} with an attention_chunk_size of {chunk}: known are "
            "full_attention, and chunked_attention with a size"
        )
    given, step = read.get("moe_layers"), read.integer("interleave_moe_layer_step")
    sparse = given if given is not None else range(step - 1, count, step)
    if not isinstance(sparse, list | tuple | range) or not set(sparse) <= set(range(count)):
        raise ConfigError(f"moe_layers is {sparse!r:.80}; it must be a list of the {count} layers")
    width = read.integer("intermediate_size")
    moe = MoeConfig(
        experts(read),
        read.integer("num_experts_per_tok"),
        width,
        scores="sigmoid",
        normalize=False,
        shared=width,
        weighs_input=True,
    )
    return tuple(
        LayerSpec(
            rotary=rotary[i],
            chunk=chunk if types[i] == "chunked_attention" else None,
            moe=moe if i in sparse else None,
        )
        for i in range(count)
    )


def _llama4_fields(read: ConfigReader) -> dict[str, Any]:
    tuned = read.get("attn_temperature_tuning")
    if not isinstance(tuned, bool | int) or tuned < 0:
        raise ConfigError(f"attn_temperature_tuning is {tuned!r:.80}; it must be true or false")
    strength = read.number("attn_scale") or 0.0
    return {
        # Experts are as wide as intermediate_size says, layers without any have a width of their own.
        "intermediate_size": read.integer("intermediate_size_mlp"),
        "qk_norm_bare": read.flag("use_qk_norm"),
        "temperature": (float(read.integer("floor_scale")), strength) if tuned else None,
    }


_QWEN_MIXTURE = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
}

FAMILIES: dict[str, Family] = {
    "mixtral": Family({"sliding_window": None, "rope_theta": 1e6, "rms_norm_eps": 1e-5}, _mixtral_layers),
    "qwen2_moe": Family(
        {
            **_QWEN_MIXTURE,
            "max_window_layers": 28,
            "qkv_bias": True,
            "shared_expert_intermediate_size": 5632,
        },
        _qwen_layers(_qwen2_windows),
        lambda read: {"qkv_bias": read.flag("qkv_bias"), "o_bias": False},
    ),
    "qwen3_moe": Family(
        {**_QWEN_MIXTURE, "attention_bias": False},
        _qwen_layers(one_window),
        lambda read: {"qk_norm": True},
    ),
    "glm4_moe": Family(
        {
            "attention_bias": False,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        _glm_layers,
        lambda read: {"o_bias": False, "qk_norm": read.flag("use_qk_norm")},
    ),
    "minimax_m2": Family(
        {
            "head_dim": 128,
            "rope_theta": 5e6,
            "use_qk_norm": True,
            "scoring_func": "sigmoid",
            "rotary_dim": None,
        },
        _minimax_layers,
        _minimax_fields,
    ),
    "hunyuan_v1_moe": Family(
        {
            **HUNYUAN.defaults,
            "moe_topk": 1,
            "num_shared_expert": 1,
            "use_cla": False,
            "use_qk_norm": True,
            "norm_topk_prob": True,
        },
        _hunyuan_layers,
        HUNYUAN.fields,
        fixed_rope=True,
    ),
    "ernie4_5_moe": Family(
        {
            "use_bias": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 1536,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
            "moe_capacity": None,
        },
        _ernie_layers,
        dense.FAMILIES["ernie4_5"].fields,
    ),
    "llama4_text": Family(
        {
            "head_dim": 128,
            "attention_bias": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "intermediate_size_mlp": 16_384,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        _llama4_layers,
        _llama4_fields,
    ),
    "gpt_oss": Family(
        {
            "head_dim": 64,
            "attention_bias": True,
            "sliding_window": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        _gpt_oss_layers,
        lambda read: {"activation": "swiglu_clamped", "attention_sinks": True},
    ),
}
"""By ``model_type``."""
