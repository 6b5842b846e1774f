"""From prompts to a draft that decodes: regenerate, features, train and sweep as commands on a tiny model."""

import json
from pathlib import Path

import pytest

from eaglejax.checkpoint.files import only_writer
from eaglejax.cli.main import main
from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.train.trainer import Trainer

PROMPTS = [
    {"id": n, "prompt": f"{word} {n}?"} for n, word in enumerate(("why", "how", "who", "what", "when"))
]


def call(*argv):
    return main([str(a) for a in argv])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def answers(model, place):
    prompts, out = place / "prompts.jsonl", place / "answers.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    options = ("--max-new-tokens", 12, "--batch-size", 5, "--dtype", "float32", "--temperature", 1.0)
    assert call("regenerate", "--target", model, "--prompts", prompts, "--out", out, *options) == 0
    return out


@pytest.fixture(scope="module")
def config(model, answers, place):
    path = place / "run.toml"
    path.write_text(
        f"""
target = "{model}"
target_dtype = "float32"
out = "{place / "run"}"
[data]
train = [{{ path = "{answers}" }}]
row_tokens = 32
overlap = 4
validation = 0.4
[draft]
aux = [0, 1]
vocab = 64
intermediate_size = 16
[objective]
steps = 1
out_of_vocabulary = "keep"
[optimizer]
warmup = 0
[run]
updates = 2
compute_dtype = "float32"
log_every = 1
decode_prompts = 1
decode_tokens = 4
decode_depth = 1
"""
    )
    return path


def test_regenerate_completes_what_is_there_and_tells_it(run, model, answers, place):
    options = ("--max-new-tokens", 12, "--dtype", "float32", "--temperature", 1.0, "--json")
    status, out, _ = run(
        "regenerate", "--target", model, "--prompts", place / "prompts.jsonl", "--out", answers, *options
    )
    counts = json.loads(out)
    assert status == 0
    assert (counts["known"], counts["written"], counts["tokens"]) == (len(PROMPTS), 0, 0)
    assert len(answers.read_text().splitlines()) == len(PROMPTS)


def test_a_plan_says_what_would_run_and_runs_nothing(run, config, place):
    status, out, err = run("train", "--config", config, "--plan", "--json")
    plan = json.loads(out)
    assert status == 0
    assert plan["samples"] + plan["held_out"] == len(PROMPTS)
    assert plan["updates"] == 2
    assert plan["trained_parameters"] * 12 == plan["checkpoint_bytes"]
    assert "trained parameters" in err
    assert not (place / "run").exists()


def test_train_on_features_from_disk_stops_when_asked_and_goes_on_to_a_draft(run, config, place, monkeypatch):
    features = place / "features"
    assert run("features", "--config", config, "--out", features)[0] == 0
    real = Trainer.__init__

    def stopped(self, *args, **more):
        real(self, *args, **more)
        self._stop.set()

    command = ("train", "--config", config, f"run.features={features}")
    monkeypatch.setattr(Trainer, "__init__", stopped)
    status, _, err = run(*command)
    assert status == 1
    assert "the same command goes on" in err
    monkeypatch.undo()
    status, out, err = run(*command, "--json")
    result = json.loads(out)
    assert status == 0
    assert (result["updates"], result["interrupted"]) == (2, False)
    assert "of the supervised ones" in err
    assert (place / "run" / "curves.svg").is_file()
    assert read_draft(Path(result["draft"])).config.intermediate_size == 16


def test_a_sweep_trains_each_point_once_and_compares_tau_with_cost(run, config, place, monkeypatch):
    trained = []
    real = Trainer.run

    def counted(self):
        trained.append(self.settings.draft.intermediate_size)
        return real(self)

    monkeypatch.setattr(Trainer, "run", counted)
    where = ("sweep", "--config", config, f"out={place / 'sweep'}", "run.evaluate_every=9")
    status, out, _ = run(*where, "--grid", "draft.intermediate_size=[16]", "--json")
    assert status == 0
    assert trained == [16]
    first = json.loads(out)["runs"]
    more = ("--grid", "draft.intermediate_size=[400, 16]")
    status, out, err = run(*where, *more, "--plan", "--json")
    plans = json.loads(out)["runs"]
    assert [entry["finished"] for entry in plans] == [False, True]
    # So is it by the plan, without the target's features being read.
    assert status == 1
    assert "not 400" in plans[0]["error"]
    assert "not 400" in err
    assert run(*where, *more, "--plan")[1].count("cannot be trained") == 1
    assert trained == [16]
    with only_writer(place / "sweep"):
        status, _, err = run(*where, *more)
    assert status == 2
    assert "being written by another process" in err
    # A point that cannot be trained is told, and costs the others nothing.
    status, out, err = run(*where, *more, "--json", "--profile")
    report = json.loads(out)
    assert status == 1
    assert trained == [16]
    assert "not 400" in report["errors"][0]["error"]
    assert "not 400" in err
    (row,) = report["runs"]
    assert row["propose_ms"] > 0
    assert row | {"propose_ms": None} == first[0]
    assert 1.0 <= row["tau"] <= 2.0
    assert json.loads((place / "sweep" / "sweep.json").read_text()) == report
    assert (place / "sweep" / "sweep.txt").read_text().count("draft.intermediate_size") == 1
