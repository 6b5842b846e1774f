"""What is no EAGLE draft, or none for the target at hand, is refused by name."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from eagle_files import (
    FLAT,
    FLAT1,
    MADE,
    VD,
    H,
    V,
    draft,
    drop,
    make,
    put,
    save,
    small_target,
)

from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.registry import load_draft
from eaglejax.drafts.tree import chain
from eaglejax.errors import CheckpointError, ConfigError, EaglejaxError, MismatchError

target = small_target
TARGET_CONFIG = small_target().config
IDS = MADE.ids.astype(np.int64)


@pytest.mark.parametrize(
    ("change", "config", "text"),
    [
        (drop("fc.weight"), None, r"lacks fc\.weight"),
        (drop("midlayer.mlp.up_proj.weight"), None, r"lacks 1 tensors.*mlp\.up_proj"),
        (drop("lm_head.weight"), None, r"lacks lm_head\.weight"),  # A57
        (put(extra__weight=np.zeros(3, np.float32)), None, r"no use for: extra\.weight"),
        (put(layers__0__hidden_norm__weight=np.zeros(H, np.float32)), None, "hidden_norm.weight twice"),
        (drop("d2t", "t2d"), None, "neither d2t nor t2d"),  # A51
        (put(d2t=IDS), None, "absolute target ids"),  # A50
        (put(d2t=np.zeros(VD, np.int64)), None, "t2d marks"),
        (put(d2t=(IDS - np.arange(VD))[::-1].copy()), None, "strictly increasing|target id"),
        (put(d2t=np.full(VD, V, np.int64)), None, "leads to target id"),
        (put(d2t=np.full(VD, -1, np.int64)), None, "leads to target id -1"),
        (put(d2t=np.zeros(VD, np.float32)), None, "must hold integers"),
        (put(d2t=np.zeros(VD - 1, np.int64)), None, "entries for a head"),
        (put(t2d=np.ones(V, bool)), None, "t2d marks 40"),
        (put(fc__weight=np.zeros((H, 3 * H + 1), np.float32)), FLAT | {"target_hidden_size": H}, "width"),
        (put(midlayer__self_attn__o_proj__weight=np.zeros((H, H + 4), np.float32)), None, "reads 20 values"),
        (None, FLAT | {"num_attention_heads": 3}, "3 heads"),
        (None, FLAT | {"head_dim": 8}, "which is 4 each"),
        (None, FLAT | {"num_key_value_heads": 4}, "the tensors have 2"),
        (None, FLAT | {"hidden_size": 32}, "hidden_size 32"),
        (None, FLAT | {"hidden_act": "tanh"}, "activation 'tanh'"),
        (None, FLAT | {"fc_norm": True}, "sets fc_norm"),
        (None, FLAT | {"norm_before_fc": True}, "sets norm_before_fc"),
        (put(input_norm__weight=np.ones(3 * H, np.float32)), FLAT | {"norm_before_fc": False}, "input_norm"),
        (None, FLAT | {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "contradicts"),  # A30
        (None, FLAT | {"rope_scaling": {"type": "spiral", "factor": 2.0}}, "spiral"),  # A29
        (None, FLAT | {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        (drop("lm_head.weight", "d2t", "t2d"), FLAT | {"draft_vocab_size": V}, "it has a head of its own"),
        (None, FLAT | {"eagle_aux_hidden_state_layer_ids": [4, 2, 3]}, "increasing"),
        (None, FLAT | {"eagle_aux_hidden_state_layer_ids": [2, 3, 4], "eagle_config":
                       {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, "twice and differently"),
        (None, FLAT | {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        (None, {k: v for k, v in FLAT.items() if k != "num_attention_heads"}, "neither num_attention_heads"),
    ],
)  # fmt: skip
def test_refusals_name_what_is_wrong(change, config, text, tmp_path):
    with pytest.raises(EaglejaxError, match=text):
        load_draft(draft(tmp_path, change, config), target(), tree=chain(2))


def test_methods_are_not_mixed_up(tmp_path):
    """A56: EAGLE-1 weights asked to run as EAGLE-3 and the reverse."""
    first, third = save(tmp_path / "1", make(1).tensors, FLAT1), draft(tmp_path)
    for folder, right, wrong in ((first, "eagle1", "eagle3"), (third, "eagle3", "eagle1")):
        with pytest.raises(ConfigError, match=f"cannot run as {wrong}"):
            load_draft(folder, target(), method=wrong, tree=chain(2))
        assert isinstance(load_draft(folder, target(), method=right, tree=chain(2)).proposer, Eagle)


def test_drafts_of_other_targets_are_refused(tmp_path):
    """A55: vocabulary, width and depth are compared before anything runs."""
    folder = draft(tmp_path)
    for change, text in (
        ({"vocab_size": 41}, "vocabulary of 40"),
        ({"hidden_size": 20}, "features of width 16"),
        ({"num_layers": 5}, "too shallow"),
    ):
        with pytest.raises(MismatchError, match=text):
            read_draft(folder).config.fit(dataclasses.replace(TARGET_CONFIG, **change))
    named = read_draft(folder, aux=(0, 5, 7)).config.fit(TARGET_CONFIG)
    assert named.aux == (0, 5, 7)
    with pytest.raises(MismatchError, match="boundary 8"):
        read_draft(folder, aux=(0, 5, 8)).config.fit(TARGET_CONFIG)
    with pytest.raises(ConfigError, match="distinct"):
        read_draft(folder, aux=(2, 2, 3))


@pytest.mark.parametrize(
    ("layers", "want"),
    [(1, None), (2, None), (3, (0, 1, 2)), (4, None), (6, None), (7, (2, 3, 4)), (32, (2, 16, 29))],
)
def test_shallow_targets_have_no_usual_boundaries(tmp_path, layers, want):
    """A66: three that exist and differ, or a refusal that says to name some; those are then read."""
    config = dataclasses.replace(TARGET_CONFIG, num_layers=layers, layers=())
    folder = draft(tmp_path)
    if want is None:
        with pytest.raises(MismatchError, match=f"{layers} layers is too shallow.*name three"):
            read_draft(folder).config.fit(config)
    else:
        assert read_draft(folder).config.fit(config).aux == want
    if layers >= 2:
        assert read_draft(folder, aux=(0, 1, 2)).config.fit(config).aux == (0, 1, 2)


def test_a_shard_without_its_index_is_told_apart_from_a_stray(tmp_path):
    folder = draft(tmp_path)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="one of several shards, whose index is missing"):
        read_draft(folder)
    (folder / "model-00001-of-00002.safetensors").rename(folder / "old.safetensors")
    with pytest.raises(CheckpointError, match=r"old\.safetensors is no name that producers give"):
        read_draft(folder)
