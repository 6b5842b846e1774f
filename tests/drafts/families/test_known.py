"""Published kinds of drafts that do not run are refused by their own names, by what a config declares or,
where it is silent, by tensors; a declared kind goes before what the tensors look like."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

from eaglejax.drafts.files import opened
from eaglejax.drafts.registry import load_draft, read_draft, recognise
from eaglejax.errors import CheckpointError, ConfigError

H = 8
LAYER = {
    **{f"layers.0.self_attn.{x}_proj.weight": (H, H) for x in "qkvo"},
    **{f"layers.0.mlp.{x}_proj.weight": (H, H) for x in ("gate", "up", "down")},
    "layers.0.input_layernorm.weight": (H,),
    "layers.0.post_attention_layernorm.weight": (H,),
}
EAGLE3 = LAYER | {"layers.0.hidden_norm.weight": (H,), "fc.weight": (H, 3 * H), "norm.weight": (H,)}
DFLASH = LAYER | {"fc.weight": (H, 5 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
MTP = {"eh_proj.weight": (H, 2 * H), "enorm.weight": (H,), "hnorm.weight": (H,)}
MEDUSA = {"0.0.linear.weight": (H, H), "0.0.linear.bias": (H,), "0.1.weight": (40, H)}
MODEL = {f"model.{n}": s for n, s in LAYER.items()} | {
    "model.embed_tokens.weight": (40, H),
    "model.norm.weight": (H,),
}
SPECULATORS = {"transformer_layer_config": {"model_type": "llama"}}

DECLARED = {
    "DFlash 2 or Domino": [{"architectures": ["DFlash2DraftModel"]}, {"speculators_model_type": "domino"}],
    "EAGLE with parallel heads": [
        {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"parallel_draft_step": 4}},
    ],
    "DSpark": [{"architectures": ["Qwen3DSparkModel"]}, {"speculators_model_type": "dspark"}],
    "Hydra": [{"hydra_num_heads": 4}, {"model_type": "hydra"}],
    "MLP speculator": [{"model_type": "mlp_speculator"}, {"architectures": ["MLPSpeculatorPreTrainedModel"]}],
    "PARD": [
        {"architectures": ["LlamaForCausalLM"], "pard_token": 9},
        {"architectures": ["LlamaForCausalLM"], "ptd_token_id": 7},
        {"model_type": "llama", "parallel_drafting": True},
    ],
    "ReDrafter": [{"model_type": "redrafter"}],
}


def folder(at, tensors, config):
    at.mkdir(parents=True, exist_ok=True)
    arrays = {n: np.ones(s, np.float32) for n, s in tensors.items()}
    safetensors.numpy.save_file(arrays, at / "model.safetensors")
    if config is not None:
        (at / "config.json").write_text(json.dumps(config))
    return at


@pytest.mark.parametrize(
    ("name", "config"),
    [(n, c) for n, configs in DECLARED.items() for c in configs],
    ids=lambda x: str(x)[:40],
)
def test_a_declared_kind_is_refused_by_its_name(name, config, tmp_path):
    """Although the tensors are those of an EAGLE-3 draft, or of a whole model."""
    for tensors in (EAGLE3, MODEL):
        with pytest.raises(CheckpointError, match=f"kind {name} .config.json says.*EAGLE, whole model"):
            read_draft(folder(tmp_path / "it", tensors, config))


SHOWN = {
    "EAGLE with parallel heads": EAGLE3 | {"parallel_draft_heads.medusa_heads.0.0.linear.weight": (H, H)},
    "Hydra": {"hydra_head.0.0.linear.weight": (H, H)},
    "MLP speculator": {"emb.0.weight": (9, H), "proj.0.weight": (H, H), "head.0.weight": (9, H)},
}


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize(
    "config", [None, {"architectures": ["LlamaForCausalLM"], "hidden_size": H}], ids=["no", "plain"]
)
def test_tensors_tell_where_the_config_is_silent(name, config, tmp_path):
    with pytest.raises(CheckpointError, match=f"kind {name} .its files"):
        load_draft(folder(tmp_path / "it", SHOWN[name], config), None)


def test_a_file_name_tells_where_there_are_no_usual_weights(tmp_path):
    (tmp_path / "hydra_lm_head.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="kind Hydra"):
        read_draft(tmp_path)


def test_what_runs_is_recognised_by_declaration_and_by_tensors(tmp_path):
    cases = {
        "EAGLE": [
            (EAGLE3, None),
            (
                EAGLE3,
                {"architectures": ["LlamaForCausalLM"], "parallel_drafting": False, "ptd_token_id": None},
            ),
            (MODEL, {"architectures": ["LlamaForCausalLMEagle3"]}),
            (MODEL, SPECULATORS | {"speculators_model_type": "eagle3"}),
            (MODEL, {"eaglejax": {"head": "own"}}),
            ({n: s for n, s in EAGLE3.items() if n != "fc.weight"}, None),
            (EAGLE3, {"eagle_config": {"parallel_draft_step": 1}}),
            (EAGLE3 | {"mask_hidden": (1, 1, 3 * H)}, None),
            (MODEL, {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 7}),
            (MODEL, {"architectures": ["PEagleDraftModel"], "pard_token": 7}),
            (MODEL, SPECULATORS | {"speculators_model_type": "peagle"}),
        ],
        "MTP": [
            (MTP, None),
            (EAGLE3, {"model_type": "deepseek_mtp"}),
            (MODEL, {"speculators_model_type": "mtp"}),
            (MODEL, {"architectures": ["MiMoMTPModel"]}),
        ],
        "DFlash": [
            (DFLASH, None),
            (EAGLE3, {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}),
            (EAGLE3, {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 9]}}),
            (MODEL, SPECULATORS | {"speculators_model_type": "dflash"}),
            (MODEL, SPECULATORS | {"speculators_config": {"algorithm": "dflash"}}),
        ],
        "Medusa": [
            (MEDUSA, None),
            (MODEL, {"medusa_num_heads": 3}),
            (MODEL, {"model_type": "medusa"}),
            (EAGLE3, {"architectures": ["MedusaModel"]}),
            ({f"medusa_head.{n}": s for n, s in MEDUSA.items()} | MODEL, None),
            ({"blocks.0.layers.0.weight": (H, H), "lm_heads.0.weight": (40, H)}, {"hidden_size": H}),
        ],
        "whole model": [
            (MODEL, None),
            (MODEL, {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1}),
            (MODEL | {"model.layers.1.eh_proj.weight": (H, 2 * H)}, None),
        ],
    }
    for name, folders in cases.items():
        for n, (tensors, config) in enumerate(folders):
            at = tmp_path / f"{name}{n}"
            (at).mkdir()
            (at / "config.json").write_text("{}")
            assert recognise(opened(folder(at, tensors, config))).name == name
    with pytest.raises(CheckpointError, match="no draft of a kind that is known: its tensors are other"):
        recognise(opened(folder(tmp_path / "none", {"other": (3,)}, None)))
    with pytest.raises(ConfigError, match="cannot run as draft_model, but as eagle or"):
        read_draft(folder(tmp_path / "e", EAGLE3, None), method="draft_model")


def test_files_are_opened_once_while_they_do_not_change(tmp_path):
    at = folder(tmp_path / "it", EAGLE3, {"architectures": ["LlamaForCausalLM"]})
    first = opened(at)
    assert opened(str(at)) is first or opened(at) is first
    tensors = first.tensors
    assert opened(at).tensors is tensors
    folder(at, EAGLE3 | {"more": (3,)}, {})
    assert "more" in opened(at).names
