"""Families of targets: how the ``config.json`` of a ``model_type`` is read.

A family is one ``Family`` (``models.family``); they stand by kind in ``dense``, ``mixtures``, ``latents`` and
``hybrids``. A missing key that has no default is refused by name, as is one that other families compute with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.models import dense, hybrids, latents, mixtures
from eaglejax.models.config import ModelConfig
from eaglejax.models.config_reader import ConfigReader
from eaglejax.models.family import ACTIVATION_NAMES, Family
from eaglejax.nn import rope as rope_lib

_READ = (
    *("model_type", "architectures", "text_config", "vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_scaling"),
    *("rope_parameters", "partial_rotary_factor", "original_max_position_embeddings", "layer_types"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("use_bidirectional_attention", "mlp_bias", "attention_bias", "sliding_window_pattern", "qkv_bias"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_value_head_dim", "full_attention_interval", "first_k_dense_replace", "decoder_sparse_step"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "use_bias"),
    *("attention_out_bias", "experts_per_token", "mlp_only_layers", "swiglu_alpha", "swiglu_limit"),
)
"""Keys that some family reads, besides those that have defaults."""

FAMILIES: dict[str, Family] = {**dense.FAMILIES, **mixtures.FAMILIES, **latents.FAMILIES, **hybrids.FAMILIES}
"""Supported families by ``model_type``."""

NESTED = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Multimodal ``model_type``s that keep a text model of a family under ``text_config``."""


def register(name: str, family: Family) -> None:
    """Make configs of ``model_type`` ``name`` readable. Raises ConfigError for a name that is taken."""
    if name in FAMILIES or name in NESTED:
        raise ConfigError(f"model_type {name!r} is registered already")
    FAMILIES[name] = family


def from_hf(config: Mapping[str, Any], *, context: int | None = None) -> ModelConfig:
    """ModelConfig of a Hugging Face ``config.json`` given as a dict.

    ``context``: longest sequence that length-dependent rotary kinds are evaluated for (see ``nn.rope``).
    Raises ConfigError for an unknown architecture and for settings that are missing or contradict each other.
    """
    name = config.get("model_type")
    if isinstance(name, str) and name in NESTED:
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise ConfigError(f"a {name} config must hold its language model under 'text_config'")
        # Multimodal checkpoints keep only some keys outside; those describe the text model too.
        config = {
            **text,
            "tie_word_embeddings": text.get("tie_word_embeddings", config.get("tie_word_embeddings")),
        }
        name = NESTED[name]
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(
            f"model_type {name!r:.80} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[name]
    read = ConfigReader(name, config, family.defaults)
    if read.flag("use_bidirectional_attention"):
        raise ConfigError(
            "use_bidirectional_attention is set: this is an encoder, which cannot generate text"
        )
    heads = read.integer("num_attention_heads")
    hidden = read.integer("hidden_size")
    count = read.count("num_hidden_layers")
    head_dim = read.integer("head_dim", hidden // heads)
    act = read.choice(family.activation, "silu")
    if act not in ACTIVATION_NAMES:
        raise ConfigError(f"activation {act!r:.80} is not supported; use one of {sorted(ACTIVATION_NAMES)}")
    read.refuse_foreign(
        query_pre_attn_scalar=head_dim,
        hidden_activation=act,
        attention_multiplier=head_dim**-0.5,
        rotary_dim=head_dim,
        no_rope_layers=[1] * count,
    )
    read.refuse_misspelt({*_READ, *(key for other in FAMILIES.values() for key in other.defaults)})
    biased = read.flag("attention_bias")
    fields: dict[str, Any] = {
        "family": name,
        "vocab_size": read.integer("vocab_size"),
        "hidden_size": hidden,
        # A model of mixtures alone need not say it.
        "intermediate_size": read.integer("intermediate_size", read.get("moe_intermediate_size")),
        "num_layers": count,
        "num_heads": heads,
        "num_kv_heads": read.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "max_position": read.integer("max_position_embeddings"),
        "rope": rope_lib.from_hf(
            {
                "partial_rotary_factor": _fraction(read, head_dim),
                **{key: value for key, value in config.items() if value is not None},
                "max_position_embeddings": read.integer("max_position_embeddings"),
            },
            layer_type=family.rope_section,
            default_theta=read.defaults.get("rope_theta", 10000.0),
            context=context,
            fixed=family.fixed_rope,
        ),
        "query_scale": (read.number("query_pre_attn_scalar", head_dim) or head_dim) ** -0.5,
        "norm_eps": read.fraction("rms_norm_eps", 1e-6),
        "activation": ACTIVATION_NAMES[act],
        "tie_embeddings": read.flag("tie_word_embeddings"),
        "qkv_bias": biased,
        "o_bias": biased,
        "mlp_bias": read.flag("mlp_bias"),
        "layers": family.layers(read, count, context),
    }
    return ModelConfig(**{**fields, **family.fields(read)})


def _fraction(read: ConfigReader, head_dim: int) -> float | None:
    """What part of a head is rotated where the rotary settings do not say it."""
    if "rotary_dim" in read.defaults and read.config.get("rotary_dim") is not None:
        return read.integer("rotary_dim") / head_dim
    sections = read.config.get("rope_parameters") or read.config.get("rope_scaling") or {}
    said = isinstance(sections, Mapping) and "partial_rotary_factor" in sections
    return None if said else read.defaults.get("partial_rotary_factor")
