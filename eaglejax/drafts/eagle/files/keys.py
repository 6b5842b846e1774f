"""Keys of a draft's config.json: those that are read, those that are bookkeeping, and all others, which are
refused or named.

Producers write what their training class holds, much of it without effect on a forward. A key that is neither
read nor known as such may be a setting that another program computes with, or one that is read, misspelt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eaglejax.drafts.eagle.files.settings import KEY
from eaglejax.drafts.eagle.files.shapes import Shapes
from eaglejax.models.config_reader import BOOKKEEPING, ELSEWHERE, is_bookkeeping
from eaglejax.naming import misspelt

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
MASK_KEYS = ("ptd_token_id", "pard_token", "mask_token_id")
"""What producers call the token that stands for unknown ones: P-EAGLE's own, vLLM's, speculators'."""
FLAGS = (
    *("norm_output", "return_hidden_post_norm", "norm_before_residual", "norm_before_fc", "fc_norm"),
    *("use_aux_hidden_state", "use_last_layernorm"),
)
"""Switches of the arithmetic, which may stand at the top, among nested layer settings or in
``eagle_config``."""

_LAYER = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "rms_norm_eps", "vocab_size", "max_position_embeddings", "rope_theta"),
    *("rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"),
    *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "tie_word_embeddings"),
    *("attention_bias", "mlp_bias", "qkv_bias", "use_qk_norm"),
)
"""Settings of the decoder layer."""

_TOP = (
    *("architectures", "model_type", KEY, "eagle_config", "quantization_config", "bias", "eagle_fc_bias"),
    *("draft_vocab_size", "target_hidden_size", AUX_KEY, "target_layer_ids", "embed_requires_grad"),
    *("fusion_bias", "layernorms", "add_para_norm"),
    *(*MASK_KEYS, "parallel_drafting"),
    *("speculators_model_type", "speculators_config", "transformer_layer_config", "speculators_version"),
    *("transformer_layer_architecture", "algorithm", "spec_type"),
)
"""Settings of the draft around it."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_input_layernorm_in_first_layer": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "position_embedding_type": ("rope",),
    "eagle_decoder_type": ("llama",),
    "layernorms": (False,),
    "add_para_norm": (False,),
}
"""Choices of how a draft's layers are built, with the one that drafts here have."""

# modelopt copies the last two from its settings, whatever the file then holds.
_EAGLE_CONFIG = (AUX_KEY, *FLAGS, *_NEUTRAL, "parallel_draft_heads_num_layers", "has_lm_head")

_NAMES = (
    *("target_model_type", "target_vocab_size", "num_target_layers", "speculator_config", "eagle_version"),
    *("num_speculative_tokens", "speculative_tokens", "ttt_length", "target_model", "base_model"),
    *("base_model_name_or_path", "target_model_name_or_path", "draft_model_name", "target_model_path"),
    *("num_depths", "down_sample_ratio", "down_sample_ratio_min", "max_anchors"),
)
"""What producers note of the target and of training."""

_OF_EXPERTS = (
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "n_routed_experts"),
    *("decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace", "shared_expert_intermediate_size"),
)
"""Settings of a mixture that configs copied from a target's keep for a dense draft; tensors tell which it
is."""


def check_keys(file: Shapes) -> None:
    """Refuse unknown keys of ``eagle_config`` (all of its keys change the arithmetic), choices of layers that
    drafts here do not have, and misspelt keys elsewhere; doubt others. Raises CheckpointError."""
    inner = file.raw.get("eagle_config")
    if inner is not None and not isinstance(inner, Mapping):
        file.fail(f"eagle_config is {inner!r:.80}; it must be an object")
    for place, where in (
        (inner or {}, "eagle_config"),
        (file.raw, "config.json"),
        (file.layer, "config.json"),
    ):
        for key, values in _NEUTRAL.items():
            value = place.get(key)
            if value is not None and value not in values:
                file.fail(f"{where} says {key}: {value!r:.80}, which drafts here do not compute with")
    for key, value in (inner or {}).items():
        if key in _LAYER or key in ("draft_vocab_size", "target_hidden_size"):
            _repeated(file, key, value)
        elif value is not None and key not in _EAGLE_CONFIG and not is_bookkeeping(key):
            known = misspelt(key, (*_EAGLE_CONFIG, *_LAYER)) or AUX_KEY * key.endswith("layer_ids")
            file.fail(
                f"eagle_config.{key} is not known"
                + (f"; {known} is meant?" if known else f"; known are {', '.join(_EAGLE_CONFIG)}")
            )
    nested = file.raw.get("transformer_layer_config")
    _others(file, file.raw, "config.json")
    if isinstance(nested, Mapping):
        _others(file, nested, "transformer_layer_config")


def _repeated(file: Shapes, key: str, value: Any) -> None:
    """A setting of the layer that stands in ``eagle_config``, where no reader looks for it."""
    said = file.raw.get(key, file.layer.get(key))
    if value is not None and value != said:
        file.fail(
            f"eagle_config says {key}: {value!r:.80}, but readers take it from the top of config.json, where "
            + ("there is none" if said is None else f"it is {said!r:.80}")
        )


def _others(file: Shapes, place: Mapping[str, Any], where: str) -> None:
    read = (*_LAYER, *_TOP, *FLAGS)
    known = {*read, *_NEUTRAL, *_EAGLE_CONFIG, *_NAMES, *_OF_EXPERTS, *ELSEWHERE, *BOOKKEEPING}
    unknown = [k for k, v in place.items() if v is not None and k not in known and not is_bookkeeping(k)]
    for key in unknown:
        if meant := misspelt(key, read):
            file.fail(f"{where} says {key}: {place[key]!r:.80}; {meant} is meant?")
    if unknown:
        file.doubt(
            f"{where} holds {', '.join(unknown[:6])}{' ...' if len(unknown) > 6 else ''}, which is not known "
            "here and changes nothing; if another program computes with it, this is another draft"
        )
