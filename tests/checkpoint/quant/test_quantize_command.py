"""``eaglejax quantize`` from end to end on a tiny folder, and what it refuses before anything is loaded."""

import dataclasses
import json
import shutil
from pathlib import Path

import packed_targets as tiny
import pytest
from tiny_model import write_model

import eaglejax as ej
from eaglejax.checkpoint.basis_file import write_basis
from eaglejax.checkpoint.quantized.write import source_config, write_quantized
from eaglejax.checkpoint.sources import Source
from eaglejax.drafts.files import opened
from eaglejax.drafts.registry import recognise
from eaglejax.errors import ConfigError
from eaglejax.quant.array import QuantArray


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny", layers=2)


def test_rotated_w8a8_with_calibrated_cache(model, run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one two three"}\n{"turns": ["four"]}\n')
    out = tmp_path / "out"
    status, text, _ = run(
        *(
            "quantize",
            "--model-path",
            model,
            "--output-path",
            out,
            "--quant-type",
            "w8a8c8",
            "--use-rot",
            "True",
        ),
        *("--calib-prompts", prompts, "--exclude", "layers.1.down", "--dtype", "float32", "--json"),
    )
    assert status == 0
    report = json.loads(text)
    assert report["quantization"] == "w8a8"
    assert report["cache"] == "int8-static"
    assert report["excluded"] == {"embed": 1, "head": 1, "layers.*.down": 1}
    rows = {row["weights"]: row for row in report["matrices"]}
    assert rows["layers.*.gate"] == {
        "weights": "layers.*.gate",
        "scheme": "w8a8",
        "count": 2,
        "bytes_before": 2 * 32 * 48 * 4,
        "bytes_after": 2 * (32 * 48 + 48 * 4),
    }
    assert rows["layers.*.down"]["count"] == 1
    assert len(report["errors"]["layers"]) == 2
    assert all(0 < error < 0.05 for error in (*report["errors"]["layers"], report["errors"]["logits"]))

    target = ej.load_target(out, dtype="float32")
    assert (target.quantization, target.basis) == ("w8a8", report["basis"])
    assert target.rotation is not None
    assert target.nbytes == report["bytes"]["after"]
    assert target.cache_format == "int8-static"
    assert not isinstance(target.params["layers"][1]["down"], QuantArray)
    answer = ej.generate(target, "hello", max_new_tokens=4)
    assert len(answer.token_ids) == 4

    status, text, _ = run("inspect", out, "--json")
    told = json.loads(text)
    assert status == 0
    assert (told["form"], told["schemes"], told["cache"]) == ("eaglejax", {"w8a8": 13}, "int8-static")
    assert (told["basis"], told["rotation"]) == (report["basis"], "optional/quarot.safetensors")
    status, text, table = run("inspect", out)
    assert (status, text) == (0, "")
    assert "13 matrices" in table
    assert run("inspect", out, "--target", model)[0] == 2


def test_in_the_form_of_modelslim(model, run, tmp_path):
    out = tmp_path / "out"
    command = (
        "quantize",
        "--model-path",
        model,
        "--save-path",
        out,
        "--quant-type",
        "w4a8",
        "--group-size",
        "16",
    )
    status, text, table = run(*command, "--format", "modelslim", "--use-rot", "False")
    assert (status, text) == (0, "")
    assert "layers.*.gate" in table
    assert "relative RMS error" in table
    assert recognise(opened(str(out))).name == "whole model"
    target = ej.load_target(out)
    assert (target.quantization, target.basis, target.tokenizer.eos_ids) == (
        "w4a8-g16",
        None,
        ej.load_target(model).tokenizer.eos_ids,
    )
    status, _, error = run(*command)
    assert (status, "not empty" in error) == (2, True)
    with pytest.raises(ConfigError, match="quantised already"):
        ej.load_target(out, quant="w8a8")


def test_nothing_is_written_where_that_is_asked_for(model, run, tmp_path):
    out = tmp_path / "out"
    argv = (
        "quantize",
        "--model-path",
        model,
        "--output-path",
        out,
        "--quant-type",
        "w8a16",
        "--save-quantized",
    )
    status, text, _ = run(*argv, "False", "--json")
    assert (status, json.loads(text)["output"]) == (0, None)
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--quant-type", "w3a8"], "--quant-type 'w3a8' is not known"),
        (["--quant-type", "w8a8c4"], "--quant-type 'w8a8c4' is not known"),
        (["--quant-type", "w8a8-static"], "w8a8-static must be calibrated; name a prompt file"),
        (["--quant-type", "w8a8", "--smooth", "0.5"], "smooth must be calibrated"),
        (["--quant-type", "w8a8c8", "--format", "modelslim"], "cache scales must be calibrated"),
        (["--quant-type", "w8a8", "--use-rot", "False", "--rotate", "random"], "--use-rot False contradicts"),
        (["--quant-type", "w8a8", "--rotate", "block"], "--rot-block-size goes with --rotate block"),
        (["--quant-type", "w8a8", "--rot-block-size", "8"], "--rot-block-size goes with --rotate block"),
        (["--quant-type", "w8a8", "--calib-prompts", "f", "--calib-samples", "0"], "--calib-samples is 0"),
        (
            ["--quant-type", "w8a8", "--calib-samples", "3"],
            "--calib-samples counts prompts",
        ),
        (["--quant-type", "w8a8", "--seed", "3"], "--seed draws the rotation, and none is asked for"),
        (["--quant-type", "w8a8", "--use-rot", "True", "--seed", "-1"], "--seed is -1"),
        (["--quant-type", "w8a8f8", "--format", "modelslim"], "modelslim form has no place for an fp8 cache"),
        (["--quant-type", "w8a8c8", "--format", "compressed-tensors"], "no place for an int8 cache"),
        (["--quant-type", "w8a8", "--online-rot", "--format", "modelslim"], "no place for online rotations"),
        (["--quant-type", "w8a8", "--asymmetric"], "asymmetric"),
    ],
)
def test_refused_before_a_model_is_loaded(options, text, run, tmp_path):
    status, _, error = run("quantize", "--model-path", "nowhere", "--output-path", tmp_path / "o", *options)
    assert status == 2
    assert text in error


def test_a_plain_target_is_inspected_too(model, run, tmp_path):
    status, text, _ = run("inspect", model, "--json")
    told = json.loads(text)
    assert (status, told["form"], told["schemes"], told["basis"]) == (0, "plain", {}, None)
    assert told["plain"]["layers.*.gate"] == 2
    assert told["bytes"] == sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    write_basis(Path(shutil.copytree(model, tmp_path / "turned")), tiny.rotation())
    status, _, table = run("inspect", tmp_path / "turned")
    assert status == 0
    assert "not quantised" in table
    assert tiny.rotation().id in table
    assert run("inspect", model, "--target", model)[0] == 2


def test_an_excluded_weight_stays_as_it_is_behind_an_online_turn(model, run, tmp_path):
    argv = ("quantize", "--model-path", model, "--output-path", tmp_path / "o", "--quant-type", "w4a8")
    status, text, error = run(*argv, "--online-rot", "--exclude", "*.down", "--json")
    assert status == 0, error
    assert json.loads(text)["excluded"] == {"embed": 1, "head": 1, "layers.*.down": 2}


def test_a_target_of_a_gguf_file_takes_its_tokenizer_along(model, tmp_path, monkeypatch):
    from eaglejax.checkpoint.quantized import write as quant_write

    loaded = ej.load_target(model, dtype="float32", quant="w8a8")
    target = dataclasses.replace(loaded, source=Source("x.gguf", "gguf", tmp_path / "x.gguf"))
    raw = source_config(loaded)
    monkeypatch.setattr(quant_write, "GGUFFile", lambda path: path)
    monkeypatch.setattr(quant_write, "config_from_metadata", lambda file: raw)
    write_quantized(target, tmp_path / "out")
    found = ej.load_target(tmp_path / "out", dtype="float32")
    assert found.tokenizer.hash == loaded.tokenizer.hash
    assert found.tokenizer.chat_template == loaded.tokenizer.chat_template
    assert (found.tokenizer.eos_ids, found.context) == (loaded.tokenizer.eos_ids, loaded.context)
    tiny.assert_same(found.params, loaded.params)
