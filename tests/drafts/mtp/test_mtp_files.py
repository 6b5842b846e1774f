"""MTP modules by their published tensor names: read beside the target and out of its own checkpoint, written
in every layout, aligned, and refused by name where they are broken."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from mtp_tools import GROUPED, QWEN2, H, model_tensors, module_tensors, modules_for, write
from published import saved

import eaglejax as ej
from eaglejax.checkpoint.hf import load_folder
from eaglejax.checkpoint.sources import resolve
from eaglejax.cli import methods
from eaglejax.cli.inspect import Inspect
from eaglejax.config import SpeculativeConfig
from eaglejax.drafts.files import opened
from eaglejax.drafts.mtp.files.layouts import LAYOUTS
from eaglejax.drafts.mtp.files.load import join, layer_kinds
from eaglejax.drafts.mtp.files.write import write_weights
from eaglejax.drafts.registry import load_draft, read_draft, recognise
from eaglejax.errors import CheckpointError, ConfigError, MismatchError
from eaglejax.models.target import Target
from eaglejax.rotation.rotate import Rotation, rotate_target

CONFIGS = {
    "deepseek": QWEN2 | {"num_nextn_predict_layers": 1},
    "qwen": QWEN2 | {"mtp_num_hidden_layers": 1},
    "mimo": QWEN2 | {"num_nextn_predict_layers": 1},
    "speculators": QWEN2,
}
ALONE = {
    "deepseek": {"model_type": "deepseek_mtp"},
    "qwen": {"architectures": ["Qwen3NextMTP"]},
    "mimo": {"architectures": ["MiMoMTPModel"]},
    "speculators": {"speculators_model_type": "mtp", "transformer_layer_config": {"model_type": "qwen2"}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(tensors of a Qwen2 model, that model as a target without a tokenizer)."""
    tensors = model_tensors(np.random.default_rng(1))
    folder = write(tmp_path_factory.mktemp("model"), tensors, QWEN2)
    config, params = load_folder(folder, np.dtype("float32"))
    return tensors, Target(config, params, np.dtype("float32"), 64)


def one(layout, index=0):
    return module_tensors(layout, np.random.default_rng(3), index)


def leaves(bound):
    return jax.tree.map(np.asarray, bound.params.weights)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_draft_beside_the_target_and_within(layout, model, tmp_path):
    tensors, target = model
    reference = leaves(load_draft(write(tmp_path / "r", one("deepseek"), ALONE["deepseek"]), target))
    beside = write(tmp_path / "beside", one(layout), ALONE[layout])
    assert recognise(opened(beside)).name == "MTP"
    jax.tree.map(np.testing.assert_array_equal, reference, leaves(load_draft(beside, target)))
    if layout == "speculators":
        return
    whole = write(tmp_path / "whole", {**tensors, **one(layout)}, CONFIGS[layout])
    assert recognise(opened(whole)).name == "whole model"
    if layout != "deepseek":
        config, params = load_folder(whole, np.dtype("float32"))
        assert config == target.config
        jax.tree.map(np.testing.assert_array_equal, params, target.params)
    found = load_draft(whole, target, method="mtp")
    jax.tree.map(np.testing.assert_array_equal, reference, leaves(found))
    assert found.params.embed is target.params["embed"]
    assert found.params.head is target.params["head"]


KINDS = {
    "deepseek_v3": "deepseek",
    "glm4_moe": "deepseek",
    "qwen3_next": "qwen",
    "qwen3_5": "qwen",
    "qwen3_5_moe": "qwen",
}


@pytest.mark.parametrize(("name", "layout"), KINDS.items())
def test_the_layer_is_of_the_targets_own_kind(name, layout, tmp_path):
    """Latent attention with experts, or gates and a shared expert, by their published names: as a module the
    layer is what it is in the model, which is read without the module."""
    saved(name, tmp_path / "it")
    raw = json.loads((tmp_path / "it" / "config.json").read_text())
    tensors = safetensors.numpy.load_file(tmp_path / "it" / "model.safetensors")
    config, params = load_folder(tmp_path / "it", np.dtype("float32"))
    kind = next(iter(layer_kinds(config)))
    index = max(i for i in range(config.num_layers) if config.block(i) == kind)
    here = f"model.layers.{index}."
    there = f"model.layers.{config.num_layers}." if layout == "deepseek" else "mtp.layers.0."
    copies = {there + n.removeprefix(here): x for n, x in tensors.items() if n.startswith(here)}
    parts = {
        part.replace("{i}", str(config.num_layers)): np.ones(config.hidden_size, np.float32)
        for leaf, part in LAYOUTS[layout].parts.items()
        if leaf.endswith("norm")
    }
    fc = LAYOUTS[layout].parts["fc"].replace("{i}", str(config.num_layers))
    parts[fc] = np.ones((config.hidden_size, 2 * config.hidden_size), np.float32)
    parts = {n if n.startswith("mtp.") else f"model.{n}": x for n, x in parts.items()}
    count = "num_nextn_predict_layers" if layout == "deepseek" else "mtp_num_hidden_layers"
    whole = write(tmp_path / "whole", {**tensors, **copies, **parts}, raw | {count: 1})
    again, same = load_folder(whole, np.dtype("float32"))
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, same, params)
    target = Target(config, params, np.dtype("float32"), 64, source=resolve(whole))
    bound = ej.load_mtp(target)
    assert bound.proposer.config.block == kind
    layer = bound.params.weights["modules"][0]["layer"]
    jax.tree.map(np.testing.assert_array_equal, layer, params["layers"][index])


def test_copies_of_the_targets_embedding_and_head_are_not_held_twice(model, tmp_path):
    """DeepSeek's modules ship both; others than the target's are the draft's own (A58)."""
    tensors, target = model
    at = "model.layers.2."
    copies = {
        at + "embed_tokens.weight": tensors["model.embed_tokens.weight"],
        at + "shared_head.head.weight": tensors["lm_head.weight"],
    }
    folder = write(tmp_path / "same", one("deepseek") | copies, ALONE["deepseek"])
    bound = load_draft(folder, target)
    assert bound.params.embed is target.params["embed"]
    assert bound.params.head is target.params["head"]
    other = {name: value[::-1].copy() for name, value in copies.items()}
    bound = load_draft(write(tmp_path / "other", one("deepseek") | other, ALONE["deepseek"]), target)
    assert bound.params.embed is None
    np.testing.assert_array_equal(bound.params.weights["embed"], other[at + "embed_tokens.weight"])
    np.testing.assert_array_equal(
        bound.params.weights["modules"][0]["head"].T, other[at + "shared_head.head.weight"]
    )


@pytest.mark.parametrize("to", [*LAYOUTS, "eaglejax"])
def test_every_form_is_read_back(to, model, tmp_path):
    """From a published layout, and from the own form, which needs the target to know the layer."""
    _, target = model
    family, file = read_draft(write(tmp_path / "from", one("mimo"), ALONE["mimo"]), recycle="pre_norm")
    reference = leaves(family.load(file, target))
    for number, source in enumerate((file, None)):
        out = tmp_path / f"to{number}"
        if source is None:
            family.write(file, tmp_path / "own", to="eaglejax", target=target, verifier=None)
            _, source = read_draft(tmp_path / "own")
        family.write(source, out, to=to, target=target, verifier="a/b")
        again, read = read_draft(out)
        assert type(again) is type(family)
        assert read.recycle == "pre_norm"
        assert read.layout == to
        jax.tree.map(np.testing.assert_array_equal, reference, leaves(family.load(read, target)))
    with pytest.raises(ConfigError, match="not empty"):
        family.write(file, out, to=to, target=target, verifier=None)
    own = read_draft(tmp_path / "own")[1]
    with pytest.raises(ConfigError, match="name the target"):
        family.write(own, tmp_path / "x", to="mimo", target=None, verifier=None)


def test_several_modules_are_told_apart(model, tmp_path):
    _, target = model
    two = one("deepseek") | module_tensors("deepseek", np.random.default_rng(4), 1)
    config = ALONE["deepseek"] | {"num_nextn_predict_layers": 2}
    bound = load_draft(write(tmp_path / "two", two, config), target)
    assert bound.proposer.config.modules == bound.proposer.depth == 2
    first = leaves(load_draft(write(tmp_path / "one", one("deepseek"), ALONE["deepseek"]), target))
    jax.tree.map(np.testing.assert_array_equal, first["modules"][0], leaves(bound)["modules"][0])
    assert not np.array_equal(bound.params.weights["modules"][1]["fc"], first["modules"][0]["fc"])
    with pytest.raises(ConfigError, match="3 drafts in a row by 2 MTP modules"):
        load_draft(tmp_path / "two", target, tree=ej.chain(3))
    gap = {n.replace("layers.3", "layers.4"): x for n, x in two.items()}
    with pytest.raises(CheckpointError, match="lacks MTP module 3"):
        read_draft(write(tmp_path / "gap", gap, {"model_type": "deepseek_mtp"}))


def without(name):
    return lambda tensors: {n: x for n, x in tensors.items() if not n.endswith(name)}


BROKEN = {
    "a norm is lost": (without("hnorm.weight"), {}, CheckpointError, r"lacks 1 tensors.*layers\.2\.hnorm"),
    "the layer is lost": (
        lambda t: {n: x for n, x in t.items() if "self_attn" not in n},
        {},
        CheckpointError,
        r"lacks 7 tensors.*layers\.2\.self_attn",
    ),
    "a tensor more": (
        lambda t: t | {"model.layers.2.self_attn.sinks": np.ones(4, np.float32)},
        {},
        CheckpointError,
        "has no use for: layers.2.self_attn.sinks",
    ),
    "fewer modules": (
        lambda t: t,
        {"num_nextn_predict_layers": 3},
        CheckpointError,
        "promises 3 MTP modules",
    ),
    "another width": (
        lambda t: t | {"model.layers.2.eh_proj.weight": np.ones((8, 16), np.float32)},
        {},
        MismatchError,
        "modules of width 8, the target's states are 16",
    ),
    "half a projection": (
        lambda t: t | {"model.layers.2.eh_proj.weight": np.ones((H, H), np.float32)},
        {},
        CheckpointError,
        r"eh_proj.weight' has shape \(16, 16\)",
    ),
    "another vocabulary": (lambda t: t, {"vocab_size": 99}, MismatchError, "vocabulary of 99 tokens"),
    "integers": (
        lambda t: t | {"model.layers.2.eh_proj.weight": np.ones((H, 2 * H), np.int8)},
        {},
        CheckpointError,
        "is int8; MTP modules are read as",
    ),
    "no recycling": (lambda t: t, {"eaglejax": {"recycle": "both"}}, ConfigError, "recycle is 'both'"),
    "no layer": (
        lambda t: {"eh_proj.weight": np.ones((H, 2 * H), np.float32)},
        {},
        CheckpointError,
        "no MTP",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_modules_are_refused_by_name(fault, model, tmp_path):
    change, said, kind, message = BROKEN[fault]
    folder = write(tmp_path / "it", change(one("deepseek")), ALONE["deepseek"] | said)
    with pytest.raises(kind, match=message):
        load_draft(folder, model[1])


def test_a_checkpoint_without_modules_is_refused_and_so_is_a_target_without_files(model, tmp_path):
    tensors, target = model
    folder = write(tmp_path / "plain", tensors, QWEN2)
    with pytest.raises(ConfigError, match="whole model; it cannot run as mtp"):
        load_draft(folder, target, method="mtp")
    config = SpeculativeConfig("mtp")
    methods.check_config(config)
    with pytest.raises(ConfigError, match="was read from no files"):
        methods.proposer_from(target, config)


def test_the_words_of_vllm_name_the_method_and_its_default_length(tmp_path, model, capsys):
    _, target = model
    for name in ("mtp", "MTP", "deepseek_mtp", "qwen3_next_mtp", "mimo-mtp", "nextn"):
        assert methods.method_name(name) == "mtp"
    folder = write(tmp_path / "it", one("deepseek"), ALONE["deepseek"])
    assert methods.method_for(str(folder)) == "mtp"
    config = SpeculativeConfig("mtp", model=str(folder))
    assert methods.proposer_from(target, config).proposer.nodes == 2
    longer = dataclasses.replace(config, num_speculative_tokens=3, draft_sample=True)
    methods.check_config(longer)
    assert methods.proposer_from(target, longer).proposer.sample
    assert Inspect(str(folder)).run() == 0
    assert "deepseek" in capsys.readouterr().err


def test_modules_for_a_rotated_target(tmp_path):
    """Unaligned they are refused; aligned, in memory and on disk, they guess as beside the original."""
    config, params = modules_for(GROUPED)
    write_weights(tmp_path / "it", config, params.weights)
    rotated = rotate_target(GROUPED, Rotation("random", H, seed=3))
    with pytest.raises(MismatchError, match="is rotated"):
        load_draft(tmp_path / "it", rotated)
    family, file = read_draft(tmp_path / "it")
    family.write_aligned(
        file, tmp_path / "aligned", rotated, rotated.rotation, original=GROUPED, to="eaglejax"
    )
    with pytest.raises(ConfigError, match="has no place for the map"):
        family.write_aligned(file, tmp_path / "x", rotated, rotated.rotation, original=None, to="mimo")
    _, again = read_draft(tmp_path / "aligned")
    with pytest.raises(ConfigError, match="aligned already"):
        family.write_aligned(again, tmp_path / "x", rotated, rotated.rotation, original=None, to="eaglejax")
    runs = [
        (GROUPED, load_draft(tmp_path / "it", GROUPED, tree=ej.chain(3))),
        (rotated, load_draft(tmp_path / "it", rotated, align=True, tree=ej.chain(3))),
        (rotated, load_draft(tmp_path / "aligned", rotated, tree=ej.chain(3))),
    ]
    found = [
        ej.generate(target, [3, 1, 4], proposer=bound, max_new_tokens=24, ignore_eos=True)
        for target, bound in runs
    ]
    assert len({tuple(out.token_ids) for out in found}) == 1
    assert len({out.stats.num_accepted_tokens for out in found}) == 1
    assert join(config, params.weights, GROUPED).embed is GROUPED.params["embed"]
