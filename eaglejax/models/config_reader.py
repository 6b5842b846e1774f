"""Typed look-ups in a Hugging Face ``config.json``, and the keys of families that compute otherwise."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.naming import misspelt

_MOST_PARTS = 1 << 14
"""Layers, or experts of a layer, beyond which a config is taken for damaged."""

ELSEWHERE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("query_pre_attn_scalar", "hidden_activation"), ()),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "rope_local_base_freq"), (0,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier"), (1,)),
    **dict.fromkeys(("logits_scaling", "logit_scale", "lm_head_multiplier", "scale_emb"), (1,)),
    **dict.fromkeys(("scale_depth", "dim_model_base", "clip_qkv", "attention_chunk_size"), (0,)),
    **dict.fromkeys(("qk_layernorm", "use_qk_norm", "attn_output_gate", "alibi", "mup_enabled"), (False,)),
    **dict.fromkeys(("use_parallel_residual", "parallel_attn", "parallel_residual"), (False,)),
    **dict.fromkeys(("index_topk", "moe_topk", "moe_k"), (0,)),
    **dict.fromkeys(("attn_temperature_tuning", "no_rope_layer_interval", "llama_4_scaling_beta"), (0,)),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size"), (0,)),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "routed_scaling_factor"), (1,)),
    **{"scoring_func": ("softmax",), "topk_method": ("greedy",), "norm_topk_prob": (True,)},
    **dict.fromkeys(("rotary_pct", "rope_ratio"), (1,)),
    **dict.fromkeys(("rope_interleave", "rope_interleaved", "rotary_dim", "no_rope_layers"), (False, 0)),
}
"""Keys by which other families compute otherwise, with the values that change nothing. A config that carries
one of them under a family that does not have it is refused: read as that family it would be another model."""

BOOKKEEPING = (
    *("dtype", "torch_dtype", "use_cache", "transformers_version", "pretraining_tp", "auto_map"),
    *("is_decoder", "is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder"),
    *("cross_attention_hidden_size", "id2label", "label2id", "problem_type", "return_dict"),
    "num_labels",
    *("return_dict_in_generate", "task_specific_params", "torchscript", "use_bfloat16"),
    *("tf_legacy_loss", "pruned_heads", "prefix", "finetuning_task", "do_sample", "temperature"),
    *("top_k", "top_p", "typical_p", "max_length", "min_length", "num_beams", "num_beam_groups"),
    *("diversity_penalty", "length_penalty", "repetition_penalty", "early_stopping"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "begin_suppress_tokens"),
    *("suppress_tokens", "exponential_decay_length_penalty", "remove_invalid_values"),
    *("num_return_sequences", "chunk_size_feed_forward", "tokenizer_class", "gradient_checkpointing"),
    *("aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "output_router_logits"),
    *("router_jitter_noise", "ep_size", "cache_implementation", "use_flash_attn", "use_sdpa"),
    *("flash_attn", "use_mem_eff_path", "name", "license", "unsloth_version", "unsloth_fixed"),
    *("moe_layer_freq", "num_nextn_predict_layers", "quantization_config"),
)
"""Keys that no forward of a decoder reads: what training, generation and a producer's tools note."""


def is_bookkeeping(key: str) -> bool:
    """Whether a key of a config.json is known to change no forward: one of ``BOOKKEEPING`` or of its kinds
    (ids of special tokens, dropout, initialisation, what is put out, private names)."""
    return key in BOOKKEEPING or bool(
        re.match(r"_|output_|initializer|init_|vision_|image_|video_|audio_", key)
        or re.search(r"token_?id(s|x)?$|_token$|dropout|_pdrop$|_version$|_init(_std)?$", key)
    )


class ConfigReader:
    """Typed look-ups in a config with the family's ``defaults``; remembers nothing, refuses by name."""

    def __init__(self, family: str, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.family = family
        self.config = config
        self.defaults = defaults

    def get(self, key: str, default: Any = None) -> Any:
        value = self.config.get(key)
        return value if value is not None else self.defaults.get(key, default)

    def given(self, key: str) -> Any:
        """Like ``get``, but an explicit null counts as given (it switches a feature off)."""
        return self.config[key] if key in self.config else self.defaults.get(key)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.get(key, default)
        if value is None:
            raise ConfigError(
                f"the {self.family} config has no {key!r}; it is needed to know the model's shape"
            )
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise ConfigError(f"{key} is {value!r:.80}; it must be an integer of {least} or more, below 2^31")
        return value

    def count(self, key: str) -> int:
        """A number of layers or experts, which are described one by one."""
        value = self.integer(key)
        if value > _MOST_PARTS:
            raise ConfigError(f"{key} is {value}; at most {_MOST_PARTS} are read")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """A number above 0, or None where there is none."""
        value = self.get(key, default)
        if value is None:
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value <= sys.float_info.max:
            raise ConfigError(f"{key} is {value!r:.80}; it must be a number above 0")
        return float(value)

    def fraction(self, key: str, default: float) -> float:
        """A number between 0 and 1."""
        value = self.number(key, default)
        if value is None or value >= 1:
            raise ConfigError(f"{key} is {value!r}; it must lie between 0 and 1")
        return value

    def choice(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise ConfigError(f"{key} is {value!r:.80}; it must be a name")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{key} is {value!r:.80}; it must be true or false")
        return value

    def kinds(self, layers: int) -> tuple[str, ...] | None:
        """``layer_types``, one name a layer."""
        value = self.get("layer_types")
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise ConfigError(f"layer_types is {value!r:.80}; it must be a list of names")
        if len(value) != layers:
            raise ConfigError(f"layer_types has {len(value)} entries for {layers} layers")
        return tuple(value)

    def refuse_foreign(self, **neutral: Any) -> None:
        """Refuse keys of other families; ``neutral``: more values that change nothing in this config."""
        for key, values in ELSEWHERE.items():
            value = self.config.get(key)
            if value is None or key in self.defaults:
                continue
            if value not in (*values, neutral.get(key)):
                raise ConfigError(
                    f"{key} is {value!r:.80}, which {self.family} models do not compute with; remove the "
                    "key, or name the model_type that has it"
                )

    def refuse_misspelt(self, read: Iterable[str]) -> None:
        """Refuse a key that is nobody's and one or two letters away from one of ``read``, which it would
        leave at its default."""
        known = {*read, *self.defaults, *ELSEWHERE}
        for key, value in self.config.items():
            if value is None or key in known or is_bookkeeping(key):
                continue
            if meant := misspelt(key, sorted(known)):
                raise ConfigError(
                    f"{key} is {value!r:.80}, but {self.family} models have no such key; {meant} is meant?"
                )
