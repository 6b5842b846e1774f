"""Settings of a draft's config.json that no draft here computes with are refused, or named, wherever they
stand."""

from __future__ import annotations

import pytest
from eagle_files import FLAT, MADE, draft, maps, save, speculators_config
from eagle_logits import target

from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.drafts.registry import load_draft
from eaglejax.errors import EaglejaxError

SGLANG = FLAT | {"architectures": ["LlamaForCausalLMEagle3"]}
REFUSED = {
    "logits_scaling": 8.0,
    "residual_multiplier": 0.2,
    "final_logit_softcapping": 30.0,
    "rope_interleave": True,
    "bias": "false",
    "attention_bias": 1,
    "eagle_config": "text",
}
NAMED = {"attention_chunk_size": 8192, "sliding_window": 8, "routed_scaling_factor": 2.5}


def nested(changes):
    config = speculators_config()
    return config | {"transformer_layer_config": config["transformer_layer_config"] | changes}


@pytest.mark.parametrize("key", REFUSED)
def test_a_setting_that_changes_the_arithmetic_is_refused(key, tmp_path):
    with pytest.raises(EaglejaxError, match=key):
        read_draft(draft(tmp_path, None, SGLANG | {key: REFUSED[key]}))
    if key not in ("bias", "eagle_config"):
        with pytest.raises(EaglejaxError, match=key):
            read_draft(save(tmp_path / "s", MADE.tensors | maps(MADE), nested({key: REFUSED[key]})))


def test_others_are_named_and_neutral_values_are_not(tmp_path):
    notes = "\n".join(read_draft(draft(tmp_path, None, SGLANG | NAMED)).notes)
    assert all(key in notes for key in NAMED)
    neutral = {"logits_scaling": 1.0, "final_logit_softcapping": None, "sliding_window": 8}
    neutral |= {"use_sliding_window": False, "eagle_config": {"use_mtp_layernorm": False}}
    notes = "\n".join(read_draft(draft(tmp_path, None, SGLANG | neutral)).notes)
    assert not any(key in notes for key in ("logits_scaling", "softcapping", "sliding_window", "mtp"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_input_layernorm_in_first_layer", False), ("use_mtp_layernorm", True)],
)
def test_a_layer_that_modelopt_builds_otherwise_is_refused(key, value, tmp_path):
    with pytest.raises(EaglejaxError, match=key):
        read_draft(draft(tmp_path, None, SGLANG | {"eagle_config": {key: value}}))


def test_flags_are_found_among_nested_layer_settings(tmp_path):
    config = nested({"norm_output": True, "norm_before_residual": False})
    del config["norm_before_residual"]
    file = read_draft(save(tmp_path / "s", MADE.tensors | maps(MADE), config))
    assert file.config.feed_normed
    assert not file.config.norm_before_residual


SLIPS = {
    # slip: what is meant, where it may stand
    "rope_thetta": "rope_theta",
    "norm_ouput": "norm_output",
    "normBeforeResidual": "norm_before_residual",
    "use_aux_hidden_states": "use_aux_hidden_state",
    "num_atention_heads": "num_attention_heads",
    "rms_norm_esp": "rms_norm_eps",
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_misspelt_key_is_refused_wherever_it_stands(slip, tmp_path):
    """The right key would keep its default in silence: another draft."""
    said = f"{slip}.*{SLIPS[slip]} is meant"
    for config in (SGLANG | {slip: False}, FLAT | {slip: 3}, SGLANG | {"eagle_config": {slip: True}}):
        with pytest.raises(EaglejaxError, match=said):
            read_draft(draft(tmp_path, None, config))
    with pytest.raises(EaglejaxError, match=said):
        read_draft(save(tmp_path / "s", MADE.tensors | maps(MADE), nested({slip: 1})))


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        ({"invented": 0.5}, "invented is not known; known are"),
        ({"aux_hidden_state_layer_ids": [2, 3, 4]}, "eagle_aux_hidden_state_layer_ids is meant"),
        ({"rope_theta": 5e5}, "rope_theta: 500000.0, but readers take it from the top"),
        ({"draft_vocab_size": 20}, "draft_vocab_size: 20, .* it is 24"),
        ({"use_last_layernrm": False}, "use_last_layernorm is meant"),
        ({"eagle_decoder_type": "kimik2"}, "kimik2"),
        ({"position_embedding_type": "none"}, "position_embedding_type"),
    ],
)
def test_what_eagle_config_holds_must_be_known(inner, said, tmp_path):
    with pytest.raises(EaglejaxError, match=said):
        read_draft(draft(tmp_path, None, SGLANG | {"eagle_config": inner}))


def test_an_invented_key_is_said_at_every_door(tmp_path):
    """Outside eagle_config keys without meaning are common; one that nobody knows is named."""
    flat = draft(tmp_path, None, FLAT | {"invented": 0.5})
    other = save(tmp_path / "s", MADE.tensors | maps(MADE), nested({"invented": 0.5}))
    for folder in (flat, other):
        file = read_draft(folder)
        assert ["invented" in doubt for doubt in file.doubts] == [True]
        assert set(file.doubts) < set(file.notes)
    with pytest.warns(UserWarning, match="holds invented, which is not known"):
        load_draft(flat, target(), aux=(2, 3, 4))


PUBLISHED = {
    "modelopt": {
        **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "initializer_range": 0.02},
        **{"mlp_bias": False, "pretraining_tp": 1, "use_cache": True, "transformers_version": "4.51.3"},
        "eagle_config": {
            **{"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True},
            **{"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "has_lm_head": False},
            **{"use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1},
            **{"parallel_draft_heads_num_layers": 1, "hidden_act": "silu", "num_hidden_layers": 1},
            **{"torch_dtype": "bfloat16", "position_embedding_type": "rope", "eagle_decoder_type": "llama"},
        },
    },
    "specforge": {
        **{"target_model_type": "qwen2_5_vl", "max_window_layers": 1, "use_sliding_window": False},
        **{"decoder_sparse_step": 1, "rope_scaling": None, "fc_norm": None, "pad_token_id": 0},
    },
    "transformers 4": {
        **{"_name_or_path": "x", "add_cross_attention": False, "bad_words_ids": None, "num_beams": 1},
        **{"chunk_size_feed_forward": 0, "id2label": {"0": "LABEL_0"}, "is_decoder": False, "top_k": 50},
        **{"output_attentions": False, "return_dict": True, "torchscript": False, "dtype": "float16"},
        **{"_attn_implementation_autoset": True, "forced_bos_token_id": None, "pad_token_id": 3},
    },
    "others": {
        **{"target_vocab_size": 40, "num_target_layers": 6, "gradient_checkpointing": False},
        **{"speculator_config": {"method": "eagle3"}, "unsloth_version": "2025", "model_type": "llama"},
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_producers_write_without_effect_is_taken_without_a_word(name, tmp_path):
    assert not read_draft(draft(tmp_path, None, SGLANG | PUBLISHED[name])).doubts


def test_layers_named_in_the_way_of_other_kinds_count_blocks(tmp_path):
    """``target_layer_ids``, which SGLang and vLLM take where an EAGLE-3 config has nothing else."""
    assert read_draft(draft(tmp_path, None, SGLANG | {"target_layer_ids": [0, 2, 4]})).config.aux == (1, 3, 5)
