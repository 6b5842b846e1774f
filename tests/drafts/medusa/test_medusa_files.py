"""Medusa heads in every published layout, by their original tensor names: read, written, refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy
from eagle_loop import make_target, target_config

import eaglejax as ej
from eaglejax.cli.inspect import Inspect
from eaglejax.drafts.files import opened
from eaglejax.drafts.medusa import model
from eaglejax.drafts.medusa.files.read import read_heads
from eaglejax.drafts.medusa.proposer import Medusa
from eaglejax.drafts.registry import load_draft, read_draft
from eaglejax.drafts.tree import chain, from_choices
from eaglejax.errors import CheckpointError, ConfigError, MismatchError
from eaglejax.rotation.rotate import Rotation, rotate_target

TARGET = make_target(target_config(), seed=6)
H, V = TARGET.config.hidden_size, TARGET.config.vocab_size
K, L = 3, 2
RNG = np.random.default_rng(0)


def published(heads=K, layers=L, vocab=V, bias=True):
    """The authors' layout: tensor name -> values."""
    found = {}
    for k in range(heads):
        for j in range(layers):
            found[f"{k}.{j}.linear.weight"] = RNG.normal(0, 0.4, (H, H)).astype(np.float32)
            if bias:
                found[f"{k}.{j}.linear.bias"] = RNG.normal(0, 0.4, H).astype(np.float32)
        found[f"{k}.{layers}.weight"] = RNG.normal(0, 1, (vocab, H)).astype(np.float32)
    return found


def vllm(tensors, heads=K, layers=L):
    """The same heads as vLLM names them."""
    found = {}
    for k in range(heads):
        for j in range(layers):
            for part in ("weight", "bias"):
                if f"{k}.{j}.linear.{part}" in tensors:
                    found[f"blocks.{k}.layers.{j}.{part}"] = tensors[f"{k}.{j}.linear.{part}"]
        found[f"lm_heads.{k}.weight"] = tensors[f"{k}.{layers}.weight"]
    return found


def folder(at, tensors, config=None, name="model.safetensors"):
    at.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, at / name)
    if config is not None:
        (at / "config.json").write_text(json.dumps(config))
    return at


def logits(bound, features):
    """Of every head: [K, n, Vd]."""
    config, params = bound.proposer.config, bound.params
    read = model.read_target(params, config, features[None, :, None])
    return np.stack(
        [model.logits(params, config, k, model.state(params, k, read))[0] for k in range(config.heads)]
    )


def by_hand(tensors, features, heads=K, layers=L):
    """The same, written out over the published tensors."""
    found = []
    for k in range(heads):
        x = features.astype(np.float64)
        for j in range(layers):
            y = x @ tensors[f"{k}.{j}.linear.weight"].T + tensors.get(f"{k}.{j}.linear.bias", 0.0)
            x = x + y / (1 + np.exp(-y))
        found.append(x @ tensors[f"{k}.{layers}.weight"].T)
    return np.stack(found)


FEATURES = RNG.normal(0, 1, (5, H)).astype(np.float32)
TYPED = {"model_type": "medusa", "num_heads": K, "num_hidden_layers": L, "hidden_size": H, "vocab_size": V}


def test_every_layout_gives_the_same_heads(tmp_path):
    tensors = published()
    forms = {
        "lone": ({}, tensors, "medusa_lm_head.safetensors"),
        "counted": ({"medusa_num_heads": K, "medusa_num_layers": L}, tensors, "medusa_lm_head.safetensors"),
        "wrapped": (None, {f"medusa_heads.{n}": v for n, v in tensors.items()}, "model.safetensors"),
        "whole": (
            {"medusa_num_heads": K, "num_hidden_layers": 1, "vocab_size": V, "hidden_size": H},
            {f"medusa_head.{n}": v for n, v in tensors.items()}
            | {"model.layers.0.self_attn.q_proj.weight": np.ones((H, H)), "lm_head.weight": np.ones((V, H))},
            "model.safetensors",
        ),
        "vllm": (TYPED | {"medusa_fc_bias": True}, vllm(tensors), "model.safetensors"),
    }
    want = by_hand(tensors, FEATURES)
    for name, (config, stored, file) in forms.items():
        bound = load_draft(folder(tmp_path / name, stored, config, file), TARGET)
        np.testing.assert_allclose(logits(bound, FEATURES), want, rtol=1e-3, atol=1e-3, err_msg=name)
        assert (bound.proposer.config.heads, bound.proposer.config.layers) == (K, L)


def test_vllms_other_settings(tmp_path):
    tensors = published(bias=False)
    # One matrix for all, a scale, no biases.
    stored = {n: v for n, v in vllm(tensors).items() if n not in ("lm_heads.1.weight", "lm_heads.2.weight")}
    config = TYPED | {"original_lm_head": True, "logit_scale": 0.5}
    bound = load_draft(folder(tmp_path / "one", stored, config), TARGET)
    shared = {**tensors, **{f"{k}.{L}.weight": tensors[f"0.{L}.weight"] for k in range(K)}}
    np.testing.assert_allclose(logits(bound, FEATURES), 0.5 * by_hand(shared, FEATURES), rtol=1e-3, atol=1e-3)
    # None at all: the target's.
    none = {n: v for n, v in stored.items() if "lm_head" not in n}
    bound = load_draft(folder(tmp_path / "none", none, TYPED | {"original_lm_head": True}), TARGET)
    assert bound.params.head is TARGET.params["head"]
    theirs = {**tensors, **{f"{k}.{L}.weight": np.asarray(TARGET.params["head"]).T for k in range(K)}}
    np.testing.assert_allclose(logits(bound, FEATURES), by_hand(theirs, FEATURES), rtol=1e-3, atol=1e-3)
    # A map of tokens in any order, over matrices of those tokens or of all.
    ids = np.asarray([9, 2, 17, 4], np.int64)
    few = {n: (v[ids] if "lm_heads" in n else v) for n, v in vllm(tensors).items()}
    for name, heads in (("few", few), ("all", vllm(tensors))):
        at = folder(tmp_path / name, heads | {"token_map": ids}, TYPED | {"truncated_vocab_size": 4})
        bound = load_draft(at, TARGET, tree=chain(2))
        assert bound.params.ids.tolist() == sorted(ids.tolist())
        want = by_hand(tensors, FEATURES)[:, :, np.sort(ids)]
        np.testing.assert_allclose(logits(bound, FEATURES), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("to", ["medusa", "vllm", "eaglejax"])
def test_what_is_written_is_read_again(to, tmp_path):
    tensors = published()
    family, file = read_draft(folder(tmp_path / "in", tensors, {}, "medusa_lm_head.safetensors"))
    assert family.write(file, tmp_path / "out", to=to, target=TARGET, verifier="T") == []
    name = "medusa_lm_head.safetensors" if to == "medusa" else "model.safetensors"
    stored = safetensors.numpy.load_file(tmp_path / "out" / name)
    want = tensors if to == "medusa" else vllm(tensors)
    assert stored.keys() == want.keys()
    for key, value in want.items():
        np.testing.assert_array_equal(stored[key], value)
    again = load_draft(tmp_path / "out", TARGET)
    np.testing.assert_allclose(logits(again, FEATURES), by_hand(tensors, FEATURES), rtol=1e-3, atol=1e-3)
    assert again.proposer.config.vocab_size == V


def test_what_a_form_cannot_say_is_refused_or_filled_in(tmp_path):
    tensors = published(bias=False)
    stored = {n: v for n, v in vllm(tensors).items() if "lm_heads" not in n}
    family, file = read_draft(folder(tmp_path / "in", stored, TYPED | {"original_lm_head": True}))
    with pytest.raises(ConfigError, match="which these heads borrow; name the target"):
        family.write(file, tmp_path / "a", to="vllm", target=None, verifier=None)
    notes = family.write(file, tmp_path / "b", to="medusa", target=TARGET, verifier=None)
    assert [n.split()[0] for n in notes] == ["the", "biases"]
    bound, again = load_draft(tmp_path / "in", TARGET), load_draft(tmp_path / "b", TARGET)
    np.testing.assert_allclose(logits(bound, FEATURES), logits(again, FEATURES), rtol=1e-3, atol=1e-3)
    few = vllm(published(vocab=4)) | {"token_map": np.asarray([1, 2, 5, 7])}
    _, file = read_draft(folder(tmp_path / "few", few, TYPED))
    with pytest.raises(ConfigError, match="no place for a reduced vocabulary"):
        family.write(file, tmp_path / "c", to="medusa", target=TARGET, verifier=None)
    with pytest.raises(ConfigError, match="not empty"):
        family.write(file, tmp_path / "b", to="vllm", target=TARGET, verifier=None)


def broken():
    """(what is wrong, tensors, config, the refusal)."""
    good = published()

    def without(*names):
        return {n: v for n, v in good.items() if n not in names}

    def changed(name, value):
        return {**good, name: value}

    counted = {"medusa_num_heads": K, "medusa_num_layers": L}
    yield "heads", good, {"medusa_num_heads": 5}, "medusa_num_heads is 5 .* holds 3 heads"
    yield "blocks", good, {"medusa_num_layers": 1}, "medusa_num_layers is 1 .* holds 2 residual blocks"
    yield "type", good, {"medusa_num_heads": "3"}, "medusa_num_heads is '3' .* an integer of 1 or more"
    yield "gap", without("1.0.linear.weight"), counted, "lacks 1 tensors .* 1.0.linear.weight"
    yield "matrix", without(f"2.{L}.weight"), counted, f"lacks 1 tensors .* 2.{L}.weight"
    yield "bias", without("0.1.linear.bias"), counted, "lacks 1 tensors .* 0.1.linear.bias"
    yield "stray", good | {"other": np.ones(3)}, counted, "no use for: other"
    wide = np.ones((H, H + 1), np.float32)
    yield "shape", changed("1.1.linear.weight", wide), counted, "'1.1.linear.weight' has shape .16, 17."
    rows = np.ones((V + 1, H), np.float32)
    yield "rows", changed(f"1.{L}.weight", rows), counted, f"'1.{L}.weight' has shape .25, 16."
    yield "vector", changed("0.0.linear.weight", np.ones(H)), counted, "it is a matrix"
    yield "width", good, counted | {"hidden_size": 8}, "hidden_size is 8 .* heads are 16 wide"
    yield "vocab", good, counted | {"vocab_size": 99}, "know 24 tokens, config.json says 99.*token_map"
    typed = TYPED | {"truncated_vocab_size": 4}
    yield "map", vllm(good), typed, "truncated_vocab_size is 4 of 24 tokens, and no token_map"
    twice = vllm(good) | {"token_map": np.asarray([1, 2, 2, 3])}
    yield "twice", twice, typed, "names an id twice"
    few = vllm(good) | {"token_map": np.asarray([1, 2, 3])}
    yield "count", few, typed, "token_map has 3 ids, truncated_vocab_size is 4"
    yield "scale", vllm(good), TYPED | {"logit_scale": -1}, "logit_scale is -1 .* a positive number"
    both = good | {f"medusa_head.{n}": v for n, v in good.items()}
    yield "both", both, counted, "one and the same part of the heads"
    yield "none", {"other": np.ones(3)}, counted, "holds no Medusa heads: its tensors are other"


@pytest.mark.parametrize(
    ("tensors", "config", "match"), [b[1:] for b in broken()], ids=[b[0] for b in broken()]
)
def test_broken_files_are_refused_by_name(tensors, config, match, tmp_path):
    with pytest.raises(CheckpointError, match=match):
        load_draft(folder(tmp_path / "it", tensors, config), TARGET)


def test_more_heads_than_the_config_says_are_used_and_said(tmp_path, capsys):
    at = folder(tmp_path / "it", published(), {"medusa_num_heads": 2})
    assert "says 2 heads, the file holds 3" in read_heads(opened(at)).notes[0]
    assert Inspect(str(at), json=True).run() == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["method"], report["config"]["heads"]) == ("medusa", 3)
    assert Inspect(str(at)).run() == 0
    assert "3 heads of 2 blocks" in capsys.readouterr().err


def test_heads_of_another_target_are_refused(tmp_path):
    at = folder(tmp_path / "it", published(), {})
    for changes, match in (
        ({"hidden_size": 32}, "read 16 numbers, the target's state has 32"),
        ({"vocab_size": 25}, "another vocabulary: of 24 tokens, the target has 25"),
    ):
        with pytest.raises(MismatchError, match=match):
            load_draft(at, make_target(target_config(**changes)))
    few = vllm(published(vocab=2)) | {"token_map": np.asarray([1, 40])}
    with pytest.raises(MismatchError, match="know token 40; the target has 24"):
        load_draft(folder(tmp_path / "few", few, {"model_type": "medusa"}), TARGET)


def test_a_tree_that_the_heads_do_not_reach_is_refused(tmp_path):
    """A35: deeper than there are heads; the usual tree is cut to what there is."""
    at = folder(tmp_path / "it", published(), {})
    assert load_draft(at, TARGET).proposer.depth == 3
    with pytest.raises(ConfigError, match="4 deep and the draft has 3 Medusa heads"):
        load_draft(at, TARGET, tree=chain(4))
    with pytest.raises(ConfigError, match="wants 30 children; the draft knows 24"):
        load_draft(at, TARGET, tree=from_choices([[i] for i in range(30)]))
    with pytest.raises(ConfigError, match="Medusa heads keep no cache"):
        load_draft(at, TARGET, cache_dtype="int8")


def test_heads_of_a_rotated_target(tmp_path):
    """Unaligned refused; aligned when loaded, or on disk, they guess beside it as beside the original; not
    twice."""
    rotated = rotate_target(TARGET, Rotation("random", H, seed=3))
    stored = vllm(published())
    own = folder(tmp_path / "own", stored, TYPED)
    none = {n: v for n, v in stored.items() if "lm_head" not in n}
    borrowing = folder(tmp_path / "none", none, TYPED | {"original_lm_head": True})
    gamma = np.asarray(rotated.rotation.gamma)
    turned = (FEATURES / gamma) @ np.asarray(rotated.rotation.matrix)
    prompt = [3, 1, 4, 1, 5]
    plain = ej.generate(TARGET, prompt, max_new_tokens=10, ignore_eos=True).token_ids
    for at in (own, borrowing):
        want = logits(load_draft(at, TARGET), FEATURES)
        with pytest.raises(MismatchError, match="is rotated"):
            load_draft(at, rotated)
        aligned = load_draft(at, rotated, align=True)
        np.testing.assert_allclose(logits(aligned, turned), want, rtol=2e-3, atol=2e-2)
        family, file = read_draft(at)
        out = at.with_name(f"{at.name}-aligned")
        notes = family.write_aligned(file, out, rotated, rotated.rotation, original=None, to="eaglejax")
        assert len(notes) == (1 if at == own else 2)
        written = load_draft(out, rotated)
        np.testing.assert_allclose(logits(written, turned), want, rtol=2e-3, atol=2e-2)
        with pytest.raises(MismatchError, match="aligned"):
            load_draft(out, TARGET)
        with pytest.raises(ConfigError, match="aligned already"):
            load_draft(out, rotated, align=True)
        with pytest.raises(ConfigError, match="no place for the map"):
            family.write(read_draft(out)[1], at.with_name("x"), to="vllm", target=rotated, verifier=None)
    got = ej.generate(rotated, prompt, proposer=written, max_new_tokens=10, ignore_eos=True)
    assert got.token_ids == plain
    assert isinstance(written.proposer, Medusa)
