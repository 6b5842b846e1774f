"""Settings of a draft's config.json that no draft here computes with are refused, or named, wherever they
stand."""

from __future__ import annotations

import pytest
from eagle_files import FLAT, MADE, draft, maps, save, speculators_config

from eaglejax.drafts.eagle.files.read import read_draft
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
