"""``eaglejax parity``: what it refuses, its exit status, and the shape of its report."""

import json

import pytest
from parity_tools import ROUNDS, TREE3, recorded

from eaglejax.interop.parity.names import parse
from eaglejax.interop.parity.report import text


@pytest.fixture(scope="module")
def recording():
    return recorded()


@pytest.fixture
def asked(recording):
    """Options that name the pair and its prompts."""
    folder = recording.folder
    return ["--target", folder / "target", "--draft", folder / "draft", "--prompts", folder / "prompts.jsonl"]


@pytest.fixture
def run(run):
    """Run ``eaglejax parity`` in this process: (exit status, stdout, stderr)."""
    return lambda *argv: run("parity", *argv)


def test_the_report_has_its_parts(recording):
    report = recording.report
    assert recording.status == 0
    assert set(report) == {
        *("format", "agrees", "torch_side", "jax_side", "models", "tolerances", "prompts", "operations"),
        *("end_to_end", "first_divergence"),
    }
    assert report["format"] == "eaglejax-parity-report/1"
    assert report["agrees"] is True
    assert report["first_divergence"] is None
    assert report["tolerances"] == {"dtype": "float32", "operation": 1e-5, "attention": 1e-4, "tie": 1e-3}
    side = report["torch_side"]
    assert side["backend"] == "torch-cpu"
    assert side["torch"]
    assert set(side["limits"]) == {"attention", "merge", "quant", "source"}
    assert report["models"]["dtype"] == "float32"
    assert {"jax", "jaxlib", "eaglejax"} <= set(report["jax_side"]["versions"])
    for prompt in report["prompts"]:
        assert set(prompt) == {
            *("id", "prompt_tokens", "tokens", "stages", "complete", "identical", "near_ties", "fault"),
        }
        assert prompt["complete"]
        assert prompt["identical"]
    for row in [*report["operations"], *report["end_to_end"]]:
        assert set(row) == {"part", "operation", "name", "relative", "max_abs", "checked"}
        assert parse(row["name"]).operation == row["operation"]
        assert 0 <= row["relative"] < 1e-5
        assert row["checked"] > 0
    # The first chunk and rounds are always looked into, whatever the run as a whole says.
    assert next(r for r in report["operations"] if r["operation"] == "logits")["checked"] == 1 + ROUNDS


def test_a_report_in_words_names_what_it_compares(recording):
    words = text(recording.report)
    assert words.startswith("parity: AGREES")
    for part in (
        "backend: torch-cpu",
        "versions",
        "target attention",
        "p0: identical",
        "one operation 1e-05",
    ):
        assert part in words


def test_the_wrong_weights_differ(recording, run, tmp_path):
    """Exit status 1, and a report that says what to look at and how to run it alone."""
    other = write_other_weights(recording, tmp_path)
    status, out, _ = run("--backend", "torch-cpu", "--replay", other, "--json")
    assert status == 1
    report = json.loads(out)
    assert not report["agrees"]
    first = report["first_divergence"]
    assert (first["kind"], first["name"]) == ("fault", "prefill/0/target/layers/1/mlp")
    assert (first["part"], first["layer"], first["operation"]) == ("target", 1, "mlp")
    assert first["prompt"] == "p0"
    found = first["difference"]
    assert found["shape"] == [1, 11, 32]
    assert found["dtype"] == "float32"
    assert len(found["index"]) == 3
    assert found["expected"] != found["found"]
    assert first["reproduce"] == "python replay.py --backend torch-cpu --prompt p0 --only " + first["name"]
    # The other prompt is compared as well.
    assert [p["fault"]["name"] for p in report["prompts"]] == [first["name"]] * 2
    status, out, _ = run("--backend", "torch-cpu", "--replay", other, "--limit", 1)
    assert status == 1
    for part in (
        "parity: DIFFERS",
        "first divergence, prompt p0",
        first["name"],
        "rows that differ",
        "replay.py",
    ):
        assert part in out
    assert "p1" not in out


def write_other_weights(recording, tmp_path):
    """The same recording with another matrix in the target's second layer."""
    import shutil

    from eaglejax.interop.parity.blob import write_blob
    from eaglejax.interop.parity.bundle import write_manifest
    from eaglejax.interop.parity.weights import write_models

    folder = tmp_path / "other"
    shutil.copytree(recording.path, folder)
    target, draft = recording.open().models()
    target.params["layers"][1]["up"] = target.params["layers"][1]["up"] * 1.01
    with write_blob(folder / "weights.bin") as blob:
        models = write_models(blob, target, draft)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["models"] = {"dtype": "float32", **models}
    manifest["weights"] = {**blob.describe(), "embedded": True}
    write_manifest(folder, manifest)
    return folder


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--backend", "torch-cpu", "--temperature", "0.7"], "parity compares greedy runs"),
        ([], "name a --backend to compare with, or a --record to write, or both"),
        (["--backend", "torch-cpu", "--weights", "w.bin"], "--weights goes with --record or --replay"),
        (["--backend", "torch-cpu", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--backend", "torch-cpu", "--replay", "x"], "--target cannot be with --replay"),
        (["--backend", "ascend"], "backend 'ascend' cannot run here"),
        (["--backend", "musa"], "backend 'musa' cannot run here"),
        (["--backend", "torch-cpu", "--limit", "0"], "limit is 0"),
        (
            ["--backend", "torch-cpu", "--speculative-config", '{"method": "ngram"}'],
            "method 'ngram' uses no draft",
        ),
        (
            [
                *("--backend", "torch-cpu", "--speculative-config"),
                '{"method": "eagle3", "num_speculative_tokens": 2, "draft_sample": true}',
            ],
            "the torch side grows trees of the likeliest tokens",
        ),
    ],
)
def test_refusals(asked, run, more, says):
    status, out, err = run(*asked, *more)
    assert (status, out) == (2, "")
    assert says in err


def test_refusals_without_a_model(recording, run, tmp_path):
    assert "--target is missing" in run("--backend", "torch-cpu")[2]
    assert "name the --backend" in run("--replay", recording.path)[2]
    status, _, err = run("--backend", "torch-cpu", "--replay", tmp_path / "none")
    assert status == 2
    assert "none is missing" in err


def test_a_recording_is_not_written_over(recording, asked, run):
    status, _, err = run(*asked, "--record", recording.path, "--speculative-config", TREE3)
    assert status == 2
    assert "bundle exists; name a new folder or .zip" in err
