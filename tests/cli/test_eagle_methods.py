"""EAGLE drafts on the command line and from the package: which method, which tree, which text."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_draft import EAGLE3, write_eagle

import eaglejax as ej
from eaglejax.checkpoint import demo as demo_files
from eaglejax.cli import methods
from eaglejax.config import SpeculativeConfig, parse_speculative_config
from eaglejax.drafts import trees
from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.drafts.eagle.quantized import quantize_draft
from eaglejax.drafts.files import opened
from eaglejax.drafts.registry import recognise
from eaglejax.errors import CheckpointError, ConfigError, MismatchError
from eaglejax.quant.array import QuantArray

F32 = ["--dtype", "float32", "--max-new-tokens", 8]


@pytest.fixture
def answer(run, model):
    def call(*argv):
        status, out, err = run("generate", "--target", model, *F32, "--prompt", "abcabc", "--json", *argv)
        assert status == 0, err
        return json.loads(out), err

    return call


def test_a_draft_alone_says_what_it_is(answer, drafts, model, monkeypatch):
    asked = []
    build = methods.proposer_from
    monkeypatch.setattr(methods, "proposer_from", lambda t, c: asked.append(c.method) or build(t, c))
    plain, _ = answer()
    for draft, method in ((drafts["eagle1"], "eagle"), (drafts["eagle3"], "eagle"), (model, "draft_model")):
        value, _ = answer("--draft", draft)
        assert asked[-1] == method
        assert value["token_ids"] == plain["token_ids"]
        assert value["stats"]["num_draft_tokens"] > 0
    assert asked[0] == "ar"
    answer("--draft", model, "--speculative-config", '{"num_speculative_tokens": 2}')
    assert asked[-1] == "draft_model"
    # Of a whole model and a draft the tensors differ, whatever the folders are called.
    assert recognise(opened(drafts["eagle3"])).name == "EAGLE"
    assert recognise(opened(model)).name == "whole model"


def test_layers_read_by_a_convention_are_said(answer, drafts):
    _, err = answer("--draft", drafts["eagle3"])
    assert "boundaries [0, 1]" in err
    _, err = answer("--draft", drafts["eagle3"], "--aux-convention", "boundary")
    assert "boundary convention" in err


@pytest.mark.parametrize(
    ("settings", "tree"),
    [
        ({}, trees.CPU_TREE),
        ({"num_speculative_tokens": 3}, ej.chain(3)),
        ({"speculative_token_tree": [[0], [1], [0, 0]]}, ej.from_choices([[0], [1], [0, 0]])),
        (
            {"speculative_token_tree": "[(0,), (1,), (0, 0)]", "num_speculative_tokens": 3},
            ej.from_choices([[0], [1], [0, 0]]),
        ),
        ({"tree_depth": 2, "tree_branching": 3, "tree_nodes": 9}, ej.DynamicTree(2, 3, 9)),
        ({"tree_branching": 2}, ej.DynamicTree(5, 2, 16)),
        # What is left out fits what is given: one level of four has the root and four nodes.
        ({"tree_depth": 1}, ej.DynamicTree(1, 4, 5)),
        ({"draft_sample": True}, trees.STATIC_TREE),
    ],
)
def test_the_tree_that_is_asked_for(drafts, model, settings, tree):
    config = parse_speculative_config(json.dumps({"method": "eagle3", **settings}))
    assert trees.tree_of(config, "dynamic") == tree


def test_settings_reach_the_proposer(drafts, model):
    target = ej.load_target(model, dtype="float32")
    settings = {"draft_sample": True, "draft_temperature": 1, "min_confidence": 0.25}
    text = json.dumps({"method": "eagle", "model": drafts["eagle3"], **settings})
    config = parse_speculative_config(text)
    methods.check_config(config)
    proposer = methods.proposer_from(target, config).proposer
    assert (proposer.sample, proposer.temperature, proposer.min_confidence) == (True, 1.0, 0.25)
    one = methods.proposer_from(target, SpeculativeConfig("eagle1", model=drafts["eagle1"])).proposer
    two = methods.proposer_from(target, SpeculativeConfig("eagle2", model=drafts["eagle1"])).proposer
    assert (one.config, one.tree) == (two.config, trees.STATIC_TREE)
    assert two.tree == trees.CPU_TREE
    assert trees.STATIC_TREE.nodes == trees.CPU_TREE.nodes == 16


def test_a_draft_in_8_bits_is_its_rounded_self_and_leaves_the_text(drafts, model):
    target = ej.load_target(model, dtype="float32")
    config = SpeculativeConfig("eagle3", model=drafts["eagle3"], num_speculative_tokens=2)
    floats = methods.proposer_from(target, config).params
    bound = methods.proposer_from(target, dataclasses.replace(config, draft_quant="w8a8"))
    wide, held = _by_path(floats.weights), _by_path(bound.params.weights)
    packed = {path for path, leaf in held.items() if isinstance(leaf, QuantArray)}
    assert packed == {path for path, leaf in wide.items() if leaf.ndim > 1 and "embed" not in path}
    for path, leaf in held.items():
        step = leaf.scale if path in packed else 0
        found = leaf.dequantize() if path in packed else leaf
        assert (jnp.abs(found - wide[path]) <= 0.501 * step).all(), path
    (plain,) = ej.generate(target, ["abcabc"], max_new_tokens=8)
    (fast,) = ej.generate(target, ["abcabc"], proposer=bound, max_new_tokens=8)
    assert fast.token_ids == plain.token_ids
    with pytest.raises(ConfigError, match=r"weights of .* drafts stay as they are; quant 'w8a8'"):
        ej.load_draft(model, target, quant="w8a8")


def test_rows_of_the_targets_head_are_the_drafts_own_and_a_whole_head_is_not():
    head, ids = jax.random.normal(jax.random.key(0), (24, 16)), jnp.arange(24)
    lent = EagleParams({}, head=head, tied=True)
    assert quantize_draft(lent, "w8a8").head is head
    rows = quantize_draft(dataclasses.replace(lent, ids=ids), "w8a8").head
    assert rows.shape == head.shape
    np.testing.assert_allclose(rows.dequantize(), head, atol=0.02)


def _by_path(weights):
    leaves, _ = jax.tree_util.tree_flatten_with_path(weights, is_leaf=lambda x: isinstance(x, QuantArray))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        *[(n, "eagle3") for n in ("EAGLE-3", "Eagle3", "eagle_3", "EAGLE3")],
        *[("EAGLE-1", "eagle1"), ("Eagle", "eagle"), ("AR", "ar"), ("N-Gram", "ngram"), ("NGRAM", "ngram")],
        *[("ngram_gpu", "ngram"), ("[ngram]", "ngram"), ("Draft-Model", "draft_model")],
        *[("STANDALONE", "draft_model"), ("prompt lookup", "ngram")],
    ],
)
def test_names_of_methods_in_any_spelling(drafts, model, written, name):
    assert methods.method_name(written) == name
    draft = drafts["eagle1" if name == "eagle1" else "eagle3"] if name.startswith("eagle") else None
    model_ = model if name == "draft_model" else draft
    text = json.dumps({"method": written} | ({"model": model_} if model_ else {}))
    assert methods.speculation(text).method == name
    assert methods.speculation(None, method=written, draft=model_).method == name
    assert methods.speculation(text, method=name.upper()).model == model_
    with pytest.raises(ConfigError, match="method 'magic' is not known"):
        methods.speculation('{"method": "magic"}')


def test_a_draft_is_loaded_by_any_spelling_of_its_version(drafts, model):
    target = ej.load_target(model, dtype="float32")
    bound = ej.load_draft(drafts["eagle3"], target, method="EAGLE-3")
    assert bound.proposer.config.version == 3
    with pytest.raises(ConfigError, match="cannot run as eagle1"):
        ej.load_draft(drafts["eagle3"], target, method="EAGLE-1")
    with pytest.raises(ConfigError, match="cannot run as magic, but as eagle or eagle1"):
        ej.load_draft(drafts["eagle3"], target, method="magic")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tree_depth": 0}, "depth is 0"),
        ({"tree_nodes": 1}, "counts the root"),
        ({"tree_depth": 1, "tree_branching": 2, "tree_nodes": 4}, "asks for 3"),
        ({"tree_depth": 2, "num_speculative_tokens": 2}, "tree_depth sizes a dynamic tree"),
        ({"tree_nodes": 4, "speculative_token_tree": [[0]]}, "speculative_token_tree a fixed one"),
        ({"tree_nodes": 4, "draft_sample": True}, "draft_sample needs"),
        ({"speculative_token_tree": [[0, 0]]}, "hangs in the air"),
        ({"speculative_token_tree": [[0], [1]], "num_speculative_tokens": 3}, "has 2 drafts"),
        ({"speculative_token_tree": []}, "a list of paths"),
        ({"speculative_token_tree": "[(0,"}, "a list of paths"),
        ({"speculative_token_tree": [[True]]}, "a list of paths"),
        ({"speculative_token_tree": [0]}, "a list of paths"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"draft_temperature": 0.5}, "draft_sample alone"),
        ({"draft_sample": 1}, "'draft_sample' in the speculative config is true or false"),
        ({"min_confidence": "0.5"}, "'min_confidence' in the speculative config is a number"),
        ({"aux_convention": "layers"}, "one of auto, boundary, block"),
        ({"draft_quant": "w8a8-static"}, "calibrated; use one of w8a8, w4a8"),
        ({"draft_quant": "keep"}, "scheme 'keep' is not known"),
        ({"tree_width": 2}, "unknown key 'tree_width'"),
        ({"prompt_lookup_max": 2}, "'eagle' has no setting 'prompt_lookup_max'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_settings_that_cannot_be(settings, reason):
    with pytest.raises(ConfigError, match=reason.replace("(", r"\(")):
        methods.check_config(
            parse_speculative_config(json.dumps({"method": "eagle", "model": "d", **settings}))
        )


def test_the_versions_are_told_apart(run, model, drafts):
    for method, draft in (("eagle1", "eagle3"), ("eagle2", "eagle3"), ("eagle3", "eagle1")):
        options = ["--draft", drafts[draft], "--method", method, "--prompt", "a", "--json"]
        status, out, err = run("generate", "--target", model, *options)
        assert (status, out) == (2, "")
        assert "EAGLE" in err.splitlines()[-1]


def test_a_draft_for_another_target_is_refused(model, tmp_path):
    deep = write_eagle(tmp_path / "deep", dataclasses.replace(EAGLE3, aux=(0, 2)))
    with pytest.raises(MismatchError, match="boundary 2"):
        ej.load_draft(deep, ej.load_target(model, dtype="float32"))


def test_the_word_demo_as_a_draft(run, model, drafts, monkeypatch, tmp_path):
    monkeypatch.setitem(demo_files.DEMO_DRAFTS, "demo", tmp_path / "absent")
    status, out, err = run("generate", "--target", model, "--draft", "demo", "--prompt", "a", "--json")
    assert (status, out) == (2, "")
    assert "no EAGLE draft for 'demo' ships" in err
    with pytest.raises(CheckpointError, match="ships"):
        ej.load_draft("demo", ej.load_target(model))
    monkeypatch.setitem(demo_files.DEMO_DRAFTS, "demo", type(tmp_path)(drafts["eagle3"]))
    status, out, _ = run("generate", "--target", model, *F32, "--draft", "demo", "--prompt", "a", "--json")
    assert status == 0
    assert json.loads(out)["stats"]["num_draft_tokens"] > 0


def test_a_bench_of_eagle_with_its_profile(run, model, drafts, rows_file):
    path = rows_file({"id": 1, "prompt": "abcabc"})
    settings = '{"method": "eagle", "tree_depth": 2, "tree_branching": 2, "tree_nodes": 4}'
    options = ["--methods", "ar,eagle", "--draft", drafts["eagle3"], "--speculative-config", settings]
    status, out, _ = run("bench", "--target", model, "--prompts", path, *F32, *options, "--profile", "--json")
    assert status == 0
    found = json.loads(out)["methods"]
    assert list(found) == ["ar", "eagle"]
    # Three drafts a round besides the root; the last round drafts no deeper than the answer may be.
    forwards = found["eagle"]["target_forwards"]
    assert 3 * (forwards - 1) < found["eagle"]["num_draft_tokens"] <= 3 * forwards
    assert found["eagle"]["identical_to_ar"] is True
    for method in found.values():
        times = method["profile"]
        assert times["rounds"] == method["target_forwards"]
        assert min(times["round_ms"], times["propose_ms"], times["verify_ms"], times["host_ms"]) > 0
        share = (times["propose_ms"] + times["observe_ms"]) / times["round_ms"]
        assert times["draft_share"] == pytest.approx(share)
        assert times["verify_share"] == pytest.approx(times["verify_ms"] / times["round_ms"])
        assert times["host_share"] == pytest.approx(times["host_ms"] / times["round_ms"])
    assert found["eagle"]["profile"]["propose_ms"] > found["ar"]["profile"]["propose_ms"]
    status, out, err = run("bench", "--target", model, "--prompts", path, *F32, *options, "--profile")
    assert (status, out) == (0, "")
    assert "verification" in err


def test_inspect_and_convert_are_commands(run, drafts, tmp_path):
    status, out, _ = run("inspect", drafts["eagle3"], "--json")
    assert (status, json.loads(out)["method"]) == (0, "eagle3")
    status, _, err = run("convert", drafts["eagle1"], "--to", "sglang", "--output", tmp_path / "out")
    assert status in (0, 2), err
    status, out, err = run("train", "--config", tmp_path / "absent.toml")
    assert (status, out) == (2, "")
    assert "absent.toml" in err
