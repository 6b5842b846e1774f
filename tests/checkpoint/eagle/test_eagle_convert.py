"""Exports hold what the originals require and come back as the same draft; what a form cannot hold is
refused."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from eagle_files import (
    FLAT,
    FLAT1,
    HD,
    VD,
    H,
    V,
    convert,
    make,
    maps,
    midlayer,
    rename,
    save,
    small_target,
    speculators_config,
)

from eaglejax.cli.convert import Convert
from eaglejax.cli.inspect import Inspect
from eaglejax.drafts.eagle.files.dialects import rope_to_hf
from eaglejax.drafts.eagle.files.load import read_weights
from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.drafts.eagle.files.report import report as describe
from eaglejax.drafts.eagle.files.write import FORMS, tensors_of_weights, write_draft
from eaglejax.drafts.eagle.model import init_eagle
from eaglejax.errors import ConfigError
from eaglejax.nn.rope import RopeConfig, from_hf

MADE = make(dtype=ml_dtypes.bfloat16)
BLOCKS = FLAT | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "bos_token_id": 1}

LAYER = {
    *(f"self_attn.{x}_proj.weight" for x in "qkvo"),
    *(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
    *(f"{x}.weight" for x in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
}
OUTSIDE = {"fc.weight", "norm.weight", "lm_head.weight"}
REQUIRED = {
    "safeailab": {f"midlayer.{n}" for n in LAYER} | OUTSIDE | {"d2t", "t2d"},
    "sglang": {f"midlayer.{n}" for n in LAYER} | OUTSIDE | {"d2t", "t2d"},
    "speculators": {f"layers.0.{n}" for n in LAYER} | OUTSIDE | {"d2t", "t2d"},
    "modelopt": {f"layers.0.{n}" for n in LAYER} | OUTSIDE | {"d2t"},
    "eaglejax": {f"layers.0.{n}" for n in LAYER} | OUTSIDE | {"d2t", "t2d"},
}


def original(tmp_path, config=BLOCKS, made=MADE):
    return save(tmp_path / "original", rename(made.tensors, midlayer) | maps(made), config)


@pytest.mark.parametrize("to", FORMS)
def test_round_trips_are_exact(to, tmp_path):
    """O7: values, dtypes, map, boundaries and settings survive; the keys are those the original's loader asks
    for."""
    folder = original(tmp_path)
    target = small_target() if to == "safeailab" else None
    there = convert(folder, tmp_path / to, to, target=target)
    stored = safetensors.numpy.load_file(tmp_path / to / "model.safetensors")
    assert set(stored) == REQUIRED[to]
    if to == "safeailab":  # names no boundaries: the usual ones are meant
        assert there.config.aux == ()
        there = dataclasses.replace(there, config=there.config.fit(target.config))
    assert there.config == read_draft(folder).config
    np.testing.assert_array_equal(there.ids, MADE.ids)
    back = convert(tmp_path / to, tmp_path / "back", "sglang")
    for name, value in MADE.tensors.items():
        assert back.store.dtype(name) == value.dtype
        np.testing.assert_array_equal(back.store.array(name), value)
    np.testing.assert_array_equal(back.store.array("d2t"), maps(MADE)["d2t"])
    np.testing.assert_array_equal(back.store.array("t2d"), maps(MADE)["t2d"])
    assert json.loads((tmp_path / "back" / "config.json").read_text())["bos_token_id"] == 1


def test_configs_say_what_their_readers_look_for(tmp_path):
    """Architecture names, layer ids in the reader's own convention, explicit flags (A63, A64)."""
    folder = original(tmp_path)
    said = {}
    for to in FORMS:
        convert(
            folder, tmp_path / to, to, target=small_target() if to == "safeailab" else None, verifier="a/b"
        )
        said[to] = json.loads((tmp_path / to / "config.json").read_text())
    assert {to: c["architectures"] for to, c in said.items()} == {
        "safeailab": ["LlamaForCausalLM"],
        "sglang": ["LlamaForCausalLMEagle3"],
        "speculators": ["Eagle3Speculator"],
        "modelopt": ["LlamaForCausalLMEagle3"],
        "eaglejax": ["EaglejaxDraft"],
    }
    ids = "eagle_aux_hidden_state_layer_ids"
    assert said["sglang"]["eagle_config"][ids] == said["modelopt"]["eagle_config"][ids] == [1, 2, 3]
    assert said["speculators"][ids] == [2, 3, 4]
    assert ids not in said["safeailab"]
    assert said["speculators"]["speculators_config"]["verifier"]["name_or_path"] == "a/b"
    layer = said["speculators"]["transformer_layer_config"]
    assert (layer["head_dim"], layer["vocab_size"], layer["rope_theta"]) == (HD, V, 10000.0)
    for to in ("safeailab", "sglang", "modelopt"):
        assert (said[to]["draft_vocab_size"], said[to]["vocab_size"], said[to]["rope_theta"]) == (
            VD,
            V,
            10000.0,
        )


def test_boundaries_that_are_not_usual_stay_what_they_are(tmp_path):
    """Lists that do not start at block 1 are written as boundaries, as their readers take them."""
    config = FLAT | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 5, 7]}}
    folder = original(tmp_path, config)
    for to in ("sglang", "modelopt", "speculators"):
        assert convert(folder, tmp_path / to, to).config.aux == (3, 5, 7)
    with pytest.raises(ConfigError, match="usual boundaries"):
        convert(folder, tmp_path / "s", "safeailab")
    with pytest.raises(ConfigError, match=r"reads boundaries \[2, 3, 4\]"):
        convert(folder, tmp_path / "s", "safeailab", target=small_target())


def test_modern_flags_round_trip_through_speculators(tmp_path):
    """EAGLE-3.1 flags, layers, windows and q/k norms are written and read back; the plainer forms refuse
    them."""
    made = make(layers=2)
    extra = {
        f"layers.{i}.self_attn.{x}_norm.weight": np.full(HD, 1.5, np.float32) for i in (0, 1) for x in "qk"
    }
    extra |= {f"fc_norm.{i}.weight": np.full(H, 0.5 + i, np.float32) for i in range(3)}
    config = speculators_config(
        norm_before_residual=True, fc_norm=True, norm_output=True, eagle_aux_hidden_state_layer_ids=[0, 3, 7]
    )
    config["transformer_layer_config"] |= {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }
    folder = save(tmp_path / "original", made.tensors | extra | maps(made), config)
    want = read_draft(folder).config
    assert (want.num_layers, want.windows, want.qk_norm, want.aux_norm) == (2, (None, 9), True, "each")
    assert (want.feed_normed, want.norm_before_residual, want.rope.kind) == (True, True, "llama3")
    assert convert(folder, tmp_path / "again", "speculators").config == want
    for to, text in (
        ("sglang", "norm_before_residual"),
        ("modelopt", "q/k norms"),
        ("safeailab", "more than one"),
    ):
        with pytest.raises(ConfigError, match=text):
            convert(folder, tmp_path / to, to)


def test_eagle1_exports(tmp_path):
    """EAGLE-1 keeps its embedding and bias; forms without EAGLE-1 refuse; a shipped head must be the
    target's."""
    made = make(1)
    folder = save(tmp_path / "original", made.tensors, FLAT1)
    for to in ("safeailab", "sglang"):
        again = convert(folder, tmp_path / to, to)
        assert again.config == read_draft(folder).config
        assert set(safetensors.numpy.load_file(tmp_path / to / "model.safetensors")) == set(made.tensors)
        said = json.loads((tmp_path / to / "config.json").read_text())
        assert said["bias"] is True
    for to in ("speculators", "modelopt"):
        with pytest.raises(ConfigError, match="no EAGLE-1"):
            convert(folder, tmp_path / to, to)
    target = small_target()
    head = {"lm_head.weight": np.asarray(target.params["head"]).T}
    vllm = save(tmp_path / "vllm", made.tensors | head, FLAT1)
    with pytest.raises(ConfigError, match="leaves the head to the target"):
        convert(vllm, tmp_path / "x", "safeailab")
    assert not convert(vllm, tmp_path / "x", "safeailab", target=target).config.own_head
    with pytest.raises(ConfigError, match="differs from the target's"):
        convert(vllm, tmp_path / "y", "safeailab", target=small_target(tie=True))


def test_parts_are_copied_from_or_left_to_the_target(tmp_path):
    """modelopt always holds a head; sglang leaves the embedding to the target, if it is the target's."""
    target = small_target()
    made = make(vd=V)
    tensors = {k: v for k, v in made.tensors.items() if k != "lm_head.weight"}
    folder = save(tmp_path / "original", tensors, FLAT1)
    with pytest.raises(ConfigError, match="holds the head"):
        convert(folder, tmp_path / "x", "modelopt")
    file = convert(folder, tmp_path / "x", "modelopt", target=target)
    np.testing.assert_array_equal(file.store.array("lm_head.weight"), np.asarray(target.params["head"]).T)
    sglang = convert(folder, tmp_path / "s", "sglang", target=target)
    assert sglang.store.array("d2t").tolist() == [0] * V, "a full vocabulary's map is written too"
    same = made.tensors | {"embed_tokens.weight": np.asarray(target.params["embed"])}
    folder = save(tmp_path / "same", same, FLAT1)
    with pytest.raises(ConfigError, match="leaves the embedding"):
        convert(folder, tmp_path / "y", "sglang")
    assert not convert(folder, tmp_path / "y", "sglang", target=target).config.own_embedding
    assert convert(folder, tmp_path / "z", "speculators").config.own_embedding
    folder = save(tmp_path / "other", same | {"embed_tokens.weight": np.ones((V, H), np.float32)}, FLAT1)
    with pytest.raises(ConfigError, match="differs from the target's"):
        convert(folder, tmp_path / "w", "sglang", target=target)


def test_weights_in_memory_are_written_as_files_are(tmp_path):
    """What training holds comes back bit for bit, features' norms and layers included."""
    for name, config in (
        ("spec", dataclasses.replace(read_draft(original(tmp_path)).config, aux_norm="each", num_layers=2)),
        ("one", read_draft(save(tmp_path / "1", make(1).tensors, FLAT1)).config),
    ):
        weights = init_eagle(config, jax.random.key(0))
        ids = MADE.ids if config.reduced else None
        form = "speculators" if config.version == 3 else "safeailab"
        write_draft(tmp_path / name, config, tensors_of_weights(config, weights), ids, to=form)
        file = read_draft(tmp_path / name)
        assert file.config == config
        again = read_weights(file, jnp.float32)
        assert jax.tree.structure(again) == jax.tree.structure(weights)
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(weights), strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(
        ConfigError, match=r"not empty: it holds config\.json, model\.safetensors; name a new"
    ):
        write_draft(tmp_path / name, config, tensors_of_weights(config, weights), None, to="safeailab")
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=5e5, max_position=64),
        RopeConfig("linear", factor=2.0),
        RopeConfig("dynamic", factor=4.0),
        RopeConfig("yarn", factor=4.0, original_max_position=512, attention_factor=1.1),
        RopeConfig("llama3", factor=8.0, original_max_position=512),
        RopeConfig(
            "longrope", factor=4.0, original_max_position=512, short_factor=(1.0, 2.0), long_factor=(3.0, 4.0)
        ),
    ],
    ids=lambda r: r.kind,
)
def test_rotary_settings_survive(rope):
    """A29: every scaling is written with all its numbers."""
    assert from_hf({"max_position_embeddings": rope.max_position} | rope_to_hf(rope)) == rope


def test_inspect_says_what_was_understood(tmp_path, capsys):
    """One JSON object; a target that does not fit is told why, with exit status 1."""
    folder = original(tmp_path)
    assert Inspect(str(folder), json=True).run() == 0
    report = json.loads(capsys.readouterr().out)
    assert report["method"] == "eagle3"
    assert report["vocabulary"] == {
        "target": V,
        "draft": VD,
        "coverage": VD / V,
        "map": f"ids {MADE.ids[0]} to {MADE.ids[-1]}",
    }
    assert report["boundaries"] == [2, 3, 4]
    assert report["borrows"] == ["embedding"]
    assert report["dtypes"] == ["bfloat16", "bool", "int64"]
    assert report["parameters"] == sum(v.size for v in MADE.tensors.values())
    fit = describe(read_draft(folder), small_target().config)["target"]
    assert fit == {"fits": True, "why_not": None, "boundaries": [2, 3, 4]}
    other = describe(read_draft(folder), dataclasses.replace(small_target().config, vocab_size=50))["target"]
    assert not other["fits"]
    assert "vocabulary of 40" in other["why_not"]
    assert Inspect(str(folder)).run() == 0
    assert "key-value heads" in capsys.readouterr().err


def test_convert_command(tmp_path, capsys):
    folder = original(tmp_path)
    assert Convert(str(folder), "modelopt", tmp_path / "out", json=True).run() == 0
    report = json.loads(capsys.readouterr().out)
    assert report["form"] == "modelopt"
    assert read_draft(tmp_path / "out").config == read_draft(folder).config


def test_a_form_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    folder, before = original(tmp_path), {}

    def fail(path, text):
        before.update(path=path, text=text)
        raise OSError("no space")

    monkeypatch.setattr("eaglejax.drafts.eagle.files.write.write_text", fail)
    with pytest.raises(OSError, match="no space"):
        Convert(str(folder), "modelopt", tmp_path / "out").run()
    assert before["path"].name == "config.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name]
