"""Reading configs: defaults that families leave out, nested text configs, refusals by name."""

from __future__ import annotations

import dataclasses

import hf_export
import published
import pytest
import transformers as tf

from eaglejax.checkpoint.names import rules_of
from eaglejax.errors import ConfigError
from eaglejax.models.config import LayerSpec
from eaglejax.models.families import FAMILIES, Family, from_hf, register
from eaglejax.nn.rope import RopeConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
QWEN = {**LLAMA, "model_type": "qwen2"}
GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 512}


def test_what_a_config_leaves_out_means_what_the_family_means():
    llama = from_hf(LLAMA)
    assert (llama.num_kv_heads, llama.head_dim, llama.layers, llama.tie_embeddings) == (4, 8, (), False)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (False, False, False)
    assert from_hf({**LLAMA, "model_type": "mistral"}).layers == (LayerSpec(window=4096),) * 2
    assert from_hf({**LLAMA, "model_type": "mistral", "sliding_window": None}).layers == ()
    assert from_hf(QWEN).qkv_bias
    assert not from_hf(QWEN).o_bias
    assert from_hf({**LLAMA, "model_type": "qwen3"}).head_dim == 128


TWINS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Families that transformers does not know, which are another under another name."""


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(TWINS)))
def test_defaults_are_those_of_transformers(family):
    """Each key that FAMILIES fills in has the value that transformers' own class fills in."""
    reference = tf.AutoConfig.for_model(family).to_dict()
    renamed = {"rope_theta", "rope_local_base_freq", "sliding_window_pattern", "partial_rotary_factor"}
    # Keys of published files that transformers' class has settled, or reads and forgets.
    renamed |= {"scoring_func", "full_attention_interval", "attn_output_gate", "rotary_dim"}
    renamed |= set() if family == "deepseek_v2" else {"topk_method"}
    renamed |= {"rope_interleave"} if family in ("deepseek_v32", "glm_moe_dsa") else set()
    renamed |= {"first_k_dense_replace"} if family == "glm4_moe_lite" else set()
    renamed |= {"index_topk_freq", "num_shared_expert", "use_cla", "moe_capacity"}
    renamed |= {"mlp_layer_types", "moe_layer_end_index", "indexer_types"}
    renamed |= {"use_qk_norm"} if family in ("minimax_m2", "hunyuan_v1_moe") else set()
    renamed |= {"norm_topk_prob"} if family == "hunyuan_v1_moe" else set()
    renamed |= {"norm_topk_prob"} if family == "qwen3_5_moe_text" else set()
    renamed |= {"max_window_layers"} if family == "smollm3" else set()
    renamed |= {"no_rope_layers", "moe_layers"}
    for key, value in FAMILIES[family].defaults.items():
        if key == "sliding_window" and "use_sliding_window" in FAMILIES[family].defaults:
            continue  # transformers forgets the width when the switch is off
        if key not in renamed and not (value is None and key not in reference):
            assert reference[key] == value or (key == "mlp_only_layers" and reference[key] == []), key
    ropes = reference["rope_parameters"]
    full = ropes.get("full_attention", ropes)
    assert full["rope_theta"] == FAMILIES[family].defaults.get("rope_theta", 10000.0)


def test_every_family_of_the_comparison_is_listed():
    compared = (*hf_export.FAMILIES.values(), *published.TARGETS.values())
    assert {c.model_type for c, _, _ in compared} == set(FAMILIES) - set(TWINS)
    for name, twin in TWINS.items():
        assert FAMILIES[name] is FAMILIES[twin]
        config = {**LLAMA, "model_type": twin, "n_routed_experts": 8, "n_group": 1, "topk_group": 1}
        config = config if twin == "deepseek_v3" else {**LLAMA, "model_type": twin}
        same = dataclasses.replace(from_hf({**config, "model_type": name}), family=twin)
        assert same == from_hf(config)
        rules = (rules_of(dataclasses.replace(same, family=f)) for f in (name, twin))
        assert len({tuple((r.leaf, r.name) for r in each) for each in rules}) == 1


def test_gemma_from_a_sparse_multimodal_config():
    """Published multimodal configs give the text model a handful of keys."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    scaling = {"factor": 8.0, "rope_type": "linear"}
    config = from_hf({"model_type": "gemma3", "text_config": {**text, "rope_scaling": scaling}})
    assert (config.vocab_size, config.head_dim, config.num_heads, config.num_kv_heads) == (262_208, 256, 8, 4)
    assert config.tie_embeddings
    assert [layer.window for layer in config.layers] == [1024 if (i + 1) % 6 else None for i in range(34)]
    assert config.layer(5).rope == RopeConfig(kind="linear", factor=8.0, theta=1e6, max_position=131_072)
    assert config.layer(0).rope == RopeConfig(theta=1e4, max_position=131_072)


def test_gemma_spellings_agree():
    old = from_hf({**GEMMA, "rope_theta": 5e5, "rope_local_base_freq": 2e4, "sliding_window_pattern": 3})
    sections = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4}}
    types = ["full_attention" if (i + 1) % 3 == 0 else "sliding_attention" for i in range(7)]
    assert old == from_hf({**GEMMA, "rope_parameters": sections, "layer_types": types})


def test_qwen_slides_only_when_switched_on():
    assert from_hf({**QWEN, "sliding_window": 8}).layers == ()
    on = from_hf({**QWEN, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1})
    assert on.layers == (LayerSpec(), LayerSpec(window=8))


def test_context_reaches_the_frequencies():
    scaled = {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    assert from_hf(scaled, context=256).rope.context == 256
    assert hash(from_hf(scaled)) != hash(from_hf(scaled, context=256))


@pytest.mark.parametrize(
    "harmless",
    [
        {"query_pre_attn_scalar": 8, "hidden_activation": "silu", "final_logit_softcapping": None},
        {"sliding_window": 4096, "layer_types": ["full_attention"] * 2, "use_sliding_window": False},
        {"routed_scaling_factor": 1.0, "logits_scaling": 1, "attn_logit_softcapping": 0.0},
        {"rope_scaling": {"rope_type": "default", "factor": 1.0, "mrope_section": [1, 1, 2]}},
        {"pretraining_tp": 1, "attention_dropout": 0.1, "torch_dtype": "float16", "head_dim": None},
        {"eod_token_id": 3, "v_head_dim": 8, "intermediate_size_mlp": 64, "invented": 1, "rope_thetta": None},
        {"qk_head_dim": 14, "num_labels": 2, "index_head_dim": 4},
    ],
)
def test_keys_that_change_nothing_are_let_be(harmless):
    assert from_hf({**LLAMA, **harmless}) == from_hf(LLAMA)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"model_type": "mamba"}, ["mamba", "llama", "qwen3_moe"]),
        ({}, ["None", "gemma3_text"]),
        ({"model_type": "gemma3"}, ["text_config"]),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, ["llama", "hidden_size"]),
        ({**LLAMA, "num_hidden_layers": "two"}, ["num_hidden_layers", "two"]),
        ({**LLAMA, "num_hidden_layers": 0}, ["num_hidden_layers is 0"]),
        ({**LLAMA, "num_key_value_heads": 3}, ["4 heads", "3"]),
        ({**LLAMA, "hidden_act": "mish"}, ["mish", "silu"]),
        ({**LLAMA, "hidden_act": ["silu"]}, ["hidden_act", "must be a name"]),
        ({**LLAMA, "model_type": {}}, ["model_type {}"]),
        ({**LLAMA, "num_attention_heads": 0}, ["num_attention_heads is 0"]),
        ({**LLAMA, "head_dim": 10**12}, ["head_dim is 1000000000000"]),
        ({**LLAMA, "rms_norm_eps": "small"}, ["rms_norm_eps is 'small'", "number above 0"]),
        ({**LLAMA, "rope_theta": float("nan")}, ["rope_theta = nan", "number above 0"]),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": "2"}}, ["rope_scaling.factor = '2'"]),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn"}}, ["'yarn' needs a factor"]),
        ({**LLAMA, "head_dim": 7}, ["7", "even"]),
        ({**LLAMA, "model_type": "mixtral", "num_experts_per_tok": 2}, ["num_experts"]),
        ({**GEMMA, "use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({**LLAMA, "query_pre_attn_scalar": 20}, ["query_pre_attn_scalar is 20", "llama"]),
        ({**LLAMA, "final_logit_softcapping": 30.0}, ["final_logit_softcapping", "llama"]),
        ({**LLAMA, "hidden_activation": "gelu"}, ["hidden_activation", "llama"]),
        ({**LLAMA, "sliding_window": 16}, ["sliding_window is 16", "llama"]),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 2}, ["layer_types", "llama"]),
        ({**LLAMA, "residual_multiplier": 0.22}, ["residual_multiplier", "llama"]),
        ({**LLAMA, "no_rope_layers": [1, 0]}, ["no_rope_layers", "llama"]),
        ({**QWEN, "rope_local_base_freq": 1e4}, ["rope_local_base_freq", "qwen2"]),
        ({**GEMMA, "logit_scale": 0.0625}, ["logit_scale", "gemma3_text"]),
        ({**LLAMA, "rope_thetta": 1e6}, ["rope_thetta", "rope_theta is meant"]),
        ({**LLAMA, "num_key_value_head": 2}, ["llama", "num_key_value_heads is meant"]),
        ({**QWEN, "useSlidingWindow": True}, ["use_sliding_window is meant"]),
        ({**GEMMA, "final_logit_softcaping": 30.0}, ["final_logit_softcapping is meant"]),
        ({**LLAMA, "tie_word_embeddings": "false"}, ["tie_word_embeddings is 'false'", "true or false"]),
        ({**LLAMA, "attention_bias": 1}, ["attention_bias is 1", "true or false"]),
        ({**LLAMA, "num_hidden_layers": 2**31 - 1}, ["num_hidden_layers is 2147483647"]),
        ({**LLAMA, "model_type": "mistral", "sliding_window": 2**31}, ["sliding_window is 2147483648"]),
        (
            {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1.0},
            ["rope_theta above 1"],
        ),
        ({**LLAMA, "rope_theta": 1e-300}, ["not finite"]),
        ({**GEMMA, "layer_types": ["chunked_attention"] * 7}, ["chunked_attention", "sliding_attention"]),
        ({**GEMMA, "layer_types": ["sliding_attention"] * 3}, ["3 entries", "7 layers"]),
        ({**GEMMA, "layer_types": 7}, ["layer_types is 7"]),
        ({**GEMMA, "sliding_window": 0}, ["sliding_window", "0"]),
        ({**LLAMA, "model_type": "mistral", "layer_types": ["full_attention"] * 2}, ["layer_types", "4096"]),
        ({**LLAMA, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, ["rope_theta", "500000"]),
    ],
)
def test_configs_that_cannot_be_are_refused_by_name(config, names):
    with pytest.raises(ConfigError) as error:
        from_hf(config)
    for name in names:
        assert name in str(error.value)


def test_a_family_is_one_row(monkeypatch):
    """Another model_type is registered where it is defined, with defaults, layers and fields of its own."""
    monkeypatch.setattr("eaglejax.models.families.FAMILIES", dict(FAMILIES))

    def layers(read, count, context):
        assert context is None
        return tuple(LayerSpec(window=read.integer("span")) if i % 2 else LayerSpec() for i in range(count))

    register("toy", Family({"span": 9, "rope_theta": 5e4}, layers, lambda read: {"qk_norm": True}))
    toy = from_hf({**LLAMA, "model_type": "toy"})
    assert (toy.family, toy.qk_norm, toy.rope.theta) == ("toy", True, 5e4)
    assert toy.layers == (LayerSpec(), LayerSpec(window=9))
    assert from_hf({**LLAMA, "model_type": "toy", "span": 3}).layer(1).window == 3
    with pytest.raises(ConfigError, match="'toy' is registered already"):
        register("toy", Family())


def test_layers_have_one_spelling():
    config = from_hf(LLAMA)
    assert dataclasses.replace(config, layers=(LayerSpec(),) * 2) == config
    assert config.layer(1) == LayerSpec(rope=config.rope)
    with pytest.raises(ConfigError, match="layers has 3 entries for 2 layers"):
        dataclasses.replace(config, layers=(LayerSpec(window=4),) * 3)
    with pytest.raises(ConfigError, match="window is 0"):
        LayerSpec(window=0)
