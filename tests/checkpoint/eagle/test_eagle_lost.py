"""No tensor is lost in silence: what a draft must hold is recorded, or follows from its config.json."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from eagle_files import (
    FLAT,
    FLAT1,
    HD,
    HEADS,
    KV,
    MADE,
    VD,
    H,
    V,
    convert,
    draft,
    make,
    maps,
    put,
    save,
    speculators_config,
)

from eaglejax.checkpoint.demo import demo_draft
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.load import draft_plan
from eaglejax.drafts.eagle.files.names import plain_name
from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.drafts.eagle.files.settings import write_settings
from eaglejax.drafts.eagle.files.write import tensors_of_weights, write_draft
from eaglejax.drafts.eagle.model import init_eagle
from eaglejax.errors import CheckpointError, EaglejaxError

SGLANG = FLAT | {"architectures": ["LlamaForCausalLMEagle3"]}
SHAPE = {
    "vocab_size": V,
    "hidden_size": H,
    "target_hidden_size": H,
    "intermediate_size": 20,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "qkv_bias": True,
    "o_bias": True,
    "qk_norm": True,
    "own_embedding": True,
    "fc_bias": True,
    "num_layers": 2,
}
HEAD = {"head_norm": True, "own_head": True}
FULL = [
    EagleConfig(version=1, draft_vocab_size=V, feature_map=True, own_head=True, **SHAPE),
    EagleConfig(version=3, draft_vocab_size=VD, num_aux=3, aux_norm="each", **HEAD, **SHAPE),
    EagleConfig(version=3, draft_vocab_size=V, num_aux=2, aux_norm="joined", basis="b", **HEAD, **SHAPE),
    EagleConfig(version=3, draft_vocab_size=V, feature_map=True, **HEAD, **SHAPE | {"fc_bias": False}),
]


def read(folder):
    file = read_draft(folder)
    draft_plan(file, jnp.float32)
    return file


def lose(folder, out, *names):
    """A copy of the folder without tensors."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    return save(out, {n: v for n, v in tensors.items() if plain_name(n) not in names}, config)


@pytest.mark.parametrize("config", FULL, ids=["eagle1", "each", "joined", "unfused"])
def test_the_own_form_misses_every_tensor_by_name(config, tmp_path):
    """Whatever is lost, one tensor or a whole part, its name is in the refusal."""
    weights = init_eagle(config, jax.random.key(0))
    ids = MADE.ids if config.reduced else None
    write_draft(tmp_path / "it", config, tensors_of_weights(config, weights), ids, to="eaglejax")
    assert read(tmp_path / "it").config == config
    names = sorted(safetensors.numpy.load_file(tmp_path / "it/model.safetensors"))
    assert len(names) > 20
    layers = {n for n in names if n.startswith("layers.1.")}
    for lost in [{n} for n in names] + [layers, {"d2t", "t2d"} & set(names)]:
        if lost:
            with pytest.raises(CheckpointError) as refused:
                read(lose(tmp_path / "it", tmp_path / "lost", *lost))
            text = str(refused.value)
            assert any(n in text for n in lost) or "some were lost" in text or "d2t nor t2d" in text, text
    for part in (r"[qkv]_proj\.bias", r"o_proj\.bias", r"[qk]_norm\.weight"):
        lost = [n for n in names if re.fullmatch(r"layers\.\d\.self_attn\." + part, n)]
        assert len(lost) in (2, 4, 6)
        with pytest.raises(CheckpointError, match=r"lacks layers\.0\.self_attn"):
            read(lose(tmp_path / "it", tmp_path / "lost", *lost))


def test_what_the_record_rules_out_is_refused_too(tmp_path):
    sizes = {k: v for k, v in SHAPE.items() if not isinstance(v, bool)}
    config = EagleConfig(version=3, draft_vocab_size=V, num_aux=3, own_head=True, **sizes)
    weights = init_eagle(config, jax.random.key(0))
    write_draft(tmp_path / "it", config, tensors_of_weights(config, weights), None, to="eaglejax")
    tensors = safetensors.numpy.load_file(tmp_path / "it/model.safetensors")
    document = json.loads((tmp_path / "it/config.json").read_text())
    for name, shape in (("fc.bias", H), ("input_norm.weight", 3 * H), ("embed_tokens.weight", (V, H))):
        with pytest.raises(CheckpointError, match=f"but the file holds {name}"):
            read(save(tmp_path / "more", tensors | {name: np.ones(shape, np.float32)}, document))


def test_an_earlier_folder_without_the_record_loads_and_says_so(tmp_path):
    file = convert(draft(tmp_path), tmp_path / "own", "eaglejax")
    document = json.loads((tmp_path / "own/config.json").read_text())
    document["eaglejax"] = {"head": "own", "head_norm": True}
    (tmp_path / "own/config.json").write_text(json.dumps(document))
    old = read(tmp_path / "own")
    assert old.config == dataclasses.replace(file.config, aux=())
    assert any("earlier eaglejax" in note for note in old.notes)
    assert not any("earlier eaglejax" in note for note in file.notes)


def test_the_shipped_draft_has_its_record():
    file = read(demo_draft("demo"))
    assert file.raw["eaglejax"] == write_settings(file.config)
    assert "own_embedding" in file.raw["eaglejax"]


def bias(*names):
    """Bias tensors of the first layer."""
    size = {"q": HEADS * HD, "k": KV * HD, "v": KV * HD, "o": H}
    return {f"layers.0.self_attn.{n}_proj.bias": np.ones(size[n], np.float32) for n in names}


def nested(**changes):
    config = speculators_config()
    return config | {"transformer_layer_config": config["transformer_layer_config"] | changes}


NORMS = {f"layers.0.self_attn.{x}_norm.weight": np.ones(HD, np.float32) for x in "qk"}
EMBED = {"embed_tokens.weight": np.ones((V, H), np.float32)}
FC = {"fc.bias": np.ones(H, np.float32)}
EACH = {f"fc_norm.{i}.weight": np.ones(H, np.float32) for i in range(3)}
JOINED = {"input_norm.weight": np.ones(3 * H, np.float32)}
OF_MODELOPT = SGLANG | {"eagle_config": {"norm_before_fc": True}}
NO_FC_BIAS = r"bias: true\), but there is no fc\.bias"
PROMISES = {
    # name: (config, tensors that it promises, those that are lost, what is said)
    "sglang bias": (SGLANG | {"bias": True}, FC, FC, NO_FC_BIAS),
    "vllm bias": (SGLANG | {"eagle_fc_bias": True}, FC, FC, NO_FC_BIAS),
    "speculators o": (
        nested(attention_bias=True),
        bias(*"qkvo"),
        bias("o"),
        r"no layers\.0.*o_proj\.bias",
    ),
    "speculators q": (nested(attention_bias=True), bias(*"qkvo"), bias("q"), r"lacks 1 tensors.*q_proj"),
    "sglang o": (SGLANG | {"attention_bias": True}, bias(*"qkvo"), bias("o"), "attention_bias: true, but"),
    "qkv_bias": (FLAT | {"qkv_bias": True}, bias(*"qkv"), bias(*"qkv"), "qkv_bias: true, but"),
    "qwen3": (nested(model_type="qwen3"), NORMS, NORMS, r"qwen3.*no layers\.0\.self_attn\.q_norm"),
    "trained embedding": (
        speculators_config(embed_requires_grad=True),
        EMBED,
        EMBED,
        "requires_grad: true",
    ),
    "speculators norm": (speculators_config(norm_before_fc=True), JOINED, JOINED, "sets norm_before_fc"),
    "modelopt norm": (OF_MODELOPT, JOINED, JOINED, "sets norm_before_fc"),
    "fc_norm 1": (SGLANG | {"fc_norm": True}, EACH, ["fc_norm.1.weight"], r"lacks fc_norm\.1\.weight"),
    "fc_norm 2": (SGLANG, EACH, ["fc_norm.2.weight"], r"lacks fc_norm\.2\.weight"),
}


@pytest.mark.parametrize("name", PROMISES)
def test_what_a_config_promises_must_be_there(name, tmp_path):
    config, promised, lost, text = PROMISES[name]
    tensors = MADE.tensors | maps(MADE) | promised
    read(save(tmp_path / "whole", tensors, config))
    with pytest.raises(EaglejaxError, match=text):
        read(save(tmp_path / "lost", {n: v for n, v in tensors.items() if n not in lost}, config))


def test_keys_that_mean_nothing_to_a_loader_promise_nothing(tmp_path):
    """SafeAILab's EAGLE-3 code has no bias whatever the key says; false beside a tensor is noted."""
    read(draft(tmp_path, None, FLAT | {"bias": True, "attention_bias": True}))
    file = read(draft(tmp_path, put(fc__bias=np.ones(H, np.float32)), SGLANG | {"bias": False}))
    assert file.config.fc_bias
    assert any("bias: false" in note for note in file.notes)
    with pytest.raises(CheckpointError, match="mlp_bias"):
        read(draft(tmp_path, None, SGLANG | {"mlp_bias": True}))
    with pytest.raises(CheckpointError, match=NO_FC_BIAS):
        read(
            save(
                tmp_path / "1",
                {k: v for k, v in make(1).tensors.items() if k != "fc.bias"},
                FLAT1 | {"bias": True},
            )
        )


def test_an_embedding_that_a_form_keeps_is_recorded_in_it(tmp_path):
    """A speculators file may do without an embedding, so that one that was lost would be the target's."""
    source = save(tmp_path / "s", MADE.tensors | maps(MADE) | EMBED, speculators_config())
    convert(source, tmp_path / "out", "speculators")
    with pytest.raises(CheckpointError, match=r"own_embedding: true, but the file lacks embed_tokens"):
        read(lose(tmp_path / "out", tmp_path / "lost", "embed_tokens.weight"))


def test_a_map_of_zeros_alone_is_said(tmp_path):
    def zeros(tensors):
        tensors["d2t"] = np.zeros(VD, np.int64)
        del tensors["t2d"]

    file = read(draft(tmp_path, zeros))
    np.testing.assert_array_equal(file.ids, np.arange(VD))
    assert any("d2t is all zeros" in note for note in file.notes)
    told = put(d2t=np.zeros(VD, np.int64), t2d=np.arange(V) < VD)
    assert not any("all zeros" in note for note in read(draft(tmp_path, told)).notes)
