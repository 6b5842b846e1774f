"""``eaglejax inspect`` of a configuration without weights."""

from __future__ import annotations

import json

import pytest

DEEPSEEK = {
    **{"model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432},
    **{"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128},
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "max_position_embeddings": 163_840},
    **{"num_nextn_predict_layers": 1, "torch_dtype": "bfloat16"},
}


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(DEEPSEEK), encoding="utf-8")
    return file


def test_a_published_configuration_is_told_without_its_weights(run, config):
    """DeepSeek-V3's published shape: 671 billion weights, and one latent of 576 numbers a token and layer."""
    for spec in (config, config.parent):
        status, out, _ = run("inspect", spec, "--json")
        told = json.loads(out)
        assert status == 0
        assert round(told["parameters"] / 1e9) == 671
        assert told["cache_bytes_per_token"] == 61 * 576 * 2
        assert (told["attention"], told["experts"]) == ("latent (MLA)", ["8 of 256"])
        assert told["draft_layers"] == 1
    status, _, err = run("inspect", config)
    assert status == 0
    assert "671.03 G parameters" in err
    assert "1 MTP layers of its own" in err


def test_a_configuration_that_is_not_known_is_refused_by_name(run, config):
    config.write_text(json.dumps({**DEEPSEEK, "model_type": "mamba"}), encoding="utf-8")
    status, _, err = run("inspect", config)
    assert status == 2
    assert "model_type 'mamba' is not supported" in err
    status, _, err = run("inspect", config, "--target", "demo")
    assert status == 2
    assert "--target and --aux are for drafts" in err
