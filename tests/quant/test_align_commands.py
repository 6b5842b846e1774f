"""From a rotated folder on disk to an accepted draft, by the commands that the refusals name."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_draft import EAGLE3
from tiny_model import HIDDEN, VOCAB, write_model

import eaglejax as ej
from eaglejax.checkpoint.basis_file import write_basis
from eaglejax.checkpoint.quantized.write import write_quantized
from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.drafts.eagle.files.write import tensors_of_weights, write_draft
from eaglejax.drafts.eagle.model import init_eagle
from eaglejax.errors import MismatchError
from eaglejax.rotation.rotate import Rotation, rotate_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """original, rotated, silent (rotated, matrix kept by the tool) and draft."""
    at = tmp_path_factory.mktemp("rotation")
    write_model(at / "original")
    original = ej.load_target(at / "original", dtype="float32")
    turned = rotate_target(original, Rotation("hadamard", HIDDEN, seed=1))
    write_quantized(turned, at / "rotated")
    write_quantized(dataclasses.replace(turned, basis=None, rotation=None), at / "silent")
    weights = init_eagle(EAGLE3, jax.random.key(0)) | {"embed": original.params["embed"]}
    tensors = tensors_of_weights(EAGLE3, weights)
    write_draft(at / "draft", EAGLE3, tensors, np.arange(EAGLE3.draft_vocab_size), to="eaglejax")
    return {name: str(at / name) for name in ("original", "rotated", "silent", "draft")}


def generate(run, target, draft):
    status, out, err = run(
        *("generate", "--target", target, "--draft", draft, "--prompt", "abcabc", "--json"),
        *(
            "--dtype",
            "float32",
            "--max-new-tokens",
            6,
            "--speculative-config",
            '{"num_speculative_tokens": 2}',
        ),
    )
    return status, json.loads(out) if status == 0 else None, err


def test_the_refusal_names_the_command_that_helps(run, folders, tmp_path):
    status, _, err = generate(run, folders["rotated"], folders["draft"])
    assert status == 2
    assert f"eaglejax align --draft {folders['draft']} --target {folders['rotated']} --out" in " ".join(
        err.split()
    )
    status, out, err = run(
        *("align", "--draft", folders["draft"], "--target", folders["rotated"]),
        *("--out", tmp_path / "aligned", "--json"),
    )
    assert status == 0, err
    report = json.loads(out)
    assert report["basis"] == read_draft(tmp_path / "aligned").config.basis
    assert report["error"] is None
    status, value, err = generate(run, folders["rotated"], tmp_path / "aligned")
    assert status == 0, err
    assert value["stats"]["num_draft_tokens"] > 0
    _, plain, _ = generate(run, folders["original"], folders["draft"])
    assert value["token_ids"] == plain["token_ids"]
    assert value["stats"]["num_accepted_tokens"] == plain["stats"]["num_accepted_tokens"]
    status, _, err = run(
        *(
            "align",
            "--draft",
            tmp_path / "aligned",
            "--target",
            folders["rotated"],
            "--out",
            tmp_path / "twice",
        )
    )
    assert status == 2
    assert "aligned already" in err


def test_without_an_export_the_rotation_is_recovered_from_the_original(run, folders, tmp_path):
    """By the articles' flag names."""
    asked = ("align", "--draft-model-path", folders["draft"], "--target-model-path", folders["silent"])
    status, _, err = run(*asked, "--output-dir", tmp_path / "out")
    assert status == 2
    assert "exports no rotation" in err
    status, _, err = run(*asked, "--output-dir", tmp_path / "out", "--method", "procrustes")
    assert status == 2
    assert "--original-target" in err
    status, out, err = run(
        *(*asked, "--output-dir", tmp_path / "out", "--method", "procrustes"),
        *("--original-target", folders["original"], "--json"),
    )
    assert status == 0, err
    assert 0 < json.loads(out)["error"] < 0.01
    status, _, err = generate(run, folders["silent"], folders["draft"])
    assert status == 2
    assert "rotated without saying so" in err
    status, _, err = generate(run, folders["silent"], tmp_path / "out")
    assert status == 0, err


def test_a_fitted_rotation_gives_way_to_the_exported_one(run, folders, tmp_path):
    """Both align alike, but only the exported matrix has the id that the target goes by."""
    status, out, err = run(
        *("align", "--draft", folders["draft"], "--target", folders["rotated"], "--out", tmp_path / "out"),
        *("--method", "procrustes", "--original-target", folders["original"], "--json"),
    )
    assert status == 0, err
    target = ej.load_target(folders["rotated"], dtype="float32")
    assert json.loads(out)["basis"] == target.basis
    assert json.loads(out)["error"] < 1e-5
    assert ej.load_draft(tmp_path / "out", target).proposer.config.basis == target.basis


def test_a_folder_of_plain_weights_says_that_it_is_rotated_by_the_matrix_in_it(folders, tmp_path):
    """As a tool leaves it that rotates and does not quantise."""
    turned = ej.load_target(folders["rotated"], dtype="float32")
    at = Path(shutil.copytree(folders["original"], tmp_path / "plain"))
    tensors = load_file(at / "model.safetensors")
    table = np.asarray(turned.params["embed"])
    save_file(tensors | {"model.embed_tokens.weight": table}, at / "model.safetensors")
    write_basis(at, turned.rotation)
    target = ej.load_target(at, dtype="float32")
    assert (target.quantization, target.basis) == (None, turned.basis)
    with pytest.raises(MismatchError, match="is rotated"):
        ej.load_draft(folders["draft"], target)
    bound = ej.load_draft(folders["draft"], target, align=True)
    assert ej.generate(target, [1, 2, 3], proposer=bound, max_new_tokens=2).token_ids


def test_a_limit_of_no_prompts_is_refused(run, folders, rows):
    asked = ("diagnose", "--target", folders["original"], "--draft", folders["draft"], "--prompts", rows)
    status, _, err = run(*asked, "--limit", 0)
    assert status == 2
    assert "limit is 0" in err


@pytest.fixture(scope="module")
def orbit(tmp_path_factory):
    """A model whose next token is a function of the last one, and a draft that has learnt it by heart: its
    head finds in the embedding of a token the one after the next."""
    at = tmp_path_factory.mktemp("orbit")
    path = at / "model" / "model.safetensors"
    write_model(at / "model")
    tensors = load_file(path)
    save_file(tensors | {n: 0 * x for n, x in tensors.items() if "o_proj" in n or "down_proj" in n}, path)
    original = ej.load_target(at / "model", dtype="float32")
    unit = tensors["model.embed_tokens.weight"]
    unit = unit / np.linalg.norm(unit, axis=1, keepdims=True)
    following = (unit @ tensors["lm_head.weight"].T).argmax(1)
    config = dataclasses.replace(EAGLE3, draft_vocab_size=VOCAB)
    weights = init_eagle(config, jax.random.key(0)) | {"embed": original.params["embed"]}
    head = np.zeros((VOCAB, HIDDEN), np.float32)
    np.add.at(head, following[following], unit)
    half = np.eye(HIDDEN, dtype=np.float32) / 2
    layer = {n: 0 * x if n in ("o", "down") else x for n, x in weights["layers"][0].items()}
    weights |= {
        "head": jnp.asarray(head.T),
        "fc": jnp.asarray(np.concatenate([half, half])),
        "layers": [layer],
    }
    write_draft(at / "draft", config, tensors_of_weights(config, weights), None, to="eaglejax")
    return str(at / "model"), str(at / "draft")


def test_a_folder_that_quantize_rotated_and_a_draft_that_check_finds_mended(run, orbit, tmp_path):
    model, draft = orbit
    status, _, err = run(
        *("quantize", "--model-path", model, "--output-path", tmp_path / "turned"),
        *("--quant-type", "w8a8", "--use-rot", "True", "--json"),
    )
    assert status == 0, err
    asked = ("align", "--draft-model-path", draft, "--target-model-path", tmp_path / "turned", "--check")
    status, out, err = run(*asked, "--output-dir", tmp_path / "aligned", "--json")
    assert status == 0, err
    check = json.loads(out)["check"]
    assert check["better"]
    assert check["before"] < 0.3
    assert check["after"] > 0.9, "the first of three drafts, as the head knows no further"
    status, out, err = run(
        *(*asked, "--output-dir", tmp_path / "fitted", "--json", "--method", "procrustes"),
        *("--original-target", model),
    )
    assert status == 0, err
    assert json.loads(out)["check"]["after"] == check["after"]
    other = read_draft(draft).config
    weights = init_eagle(other, jax.random.key(1)) | {"embed": ej.load_target(model).params["embed"]}
    write_draft(tmp_path / "weak", other, tensors_of_weights(other, weights), None, to="eaglejax")
    status, _, err = run(
        *("align", "--draft-model-path", tmp_path / "weak", "--target-model-path", tmp_path / "turned"),
        *("--output-dir", tmp_path / "still-weak", "--check"),
    )
    assert status == 1
    assert "before" in err


def test_diagnose_prints_a_verdict_a_test_and_finds_the_basis(run, folders, rows):
    asked = ("diagnose", "--draft", folders["draft"], "--json", "--dtype", "float32", "--max-new-tokens", 8)
    status, out, err = run(*asked, "--target", folders["silent"], "--prompts", rows)
    assert status == 1, err
    report = json.loads(out)
    assert report["faults"] == ["basis"]
    assert {t["test"] for t in report["tests"]} == {
        *("tokenizer", "aux_layers", "basis", "positions", "vocabulary", "template", "norms", "texts")
    }
    assert report["decoded"]["num_drafts"] > 0
    assert len(report["measured"]["chat"]["rates"]) == 3
    assert np.all(np.diff(report["measured"]["plain"]["rates"]) <= 0)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("abcabc", "xyz")) + "\n")
    return path
