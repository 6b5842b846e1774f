"""Studies: their files are valid, results are read strictly, re-runs give the same tokens."""

import dataclasses
import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from eaglejax.cli.sweep import Sweep
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.train.grid import read_sweep
from eaglejax.train.settings import load_settings, parse, read_toml
from eaglejax.train.sweep import write_json
from experiments import evaluate, record, sweep
from experiments.evaluate import EvaluateSettings

FILES = sorted(record.ROOT.glob("*/*.toml"))
PLACES = ["data.train=[{path='a.jsonl'}]", "out=runs/x"]


def of_kind(*names):
    """(path, id) of the studies' files with these names."""
    return [pytest.param(p, id=f"{p.parent.name}/{p.name}") for p in FILES if p.name in names]


def grids():
    found = [p for p in FILES if "grid" in read_toml(p)]
    return [pytest.param(p, id=f"{p.parent.name}/{p.name}") for p in found]


@pytest.mark.parametrize("path", of_kind("train.toml"))
def test_training_files_are_whole_but_for_places(path):
    assert load_settings(path, PLACES).run.updates > 0
    with pytest.raises(ConfigError, match="out is not set"):
        load_settings(path)


@pytest.mark.parametrize("path", of_kind("evaluate.toml"))
def test_evaluation_files_are_whole(path):
    assert parse(EvaluateSettings, read_toml(path)).shapes()


@pytest.mark.parametrize("path", grids())
def test_sweep_files_are_whole_but_for_places(path):
    points = read_sweep(path, PLACES)
    assert len(points) > 1


def test_the_compared_studies_train_on_the_same_rows():
    one, three = (load_settings(record.ROOT / f"{n}/train.toml", PLACES) for n in ("eagle1", "demo_draft"))
    assert one.data == three.data
    assert (one.run.rows, one.run.seed) == (three.run.rows, three.run.seed)
    assert (one.objective.regresses, three.objective.regresses) == (True, False)
    assert read_toml(record.ROOT / "eagle1/evaluate.toml") == read_toml(
        record.ROOT / "demo_draft/evaluate.toml"
    )


def put(root, name="a", **changes):
    values = {"command": "c", "config": {"x": 1}, "seed": 0, "figures": {"tau": 1.5}} | changes
    return record.record("study", name, **values, root=root)


def test_a_result_says_what_ran_where_and_reads_back(tmp_path):
    path = put(tmp_path)
    assert path == tmp_path / "study" / "results" / "a.json"
    found = record.read(path)
    assert found["figures"] == {"tau": 1.5}
    assert found["machine"]["versions"]["jax"]
    assert record.read_study("study", tmp_path) == {"a": found}
    assert record.read_study("other", tmp_path) == {}
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


def test_results_that_cannot_be_are_refused(tmp_path):
    for changes, words in (
        ({"name": "../a"}, "cannot name"),
        ({"figures": {"tau": float("nan")}}, "JSON"),
        ({"figures": {"tau": np.float32(1)}}, "JSON"),
    ):
        with pytest.raises(ConfigError, match=words):
            put(tmp_path, **changes)
    path = put(tmp_path)
    path.write_text(json.dumps({"study": "study"}))
    with pytest.raises(ConfigError, match="lacks name, command"):
        record.read(path)
    with pytest.raises(CheckpointError, match="missing"):
        record.read(tmp_path / "none.json")


@pytest.fixture(scope="module")
def study(model, place):
    folder = place / "tiny"
    folder.mkdir()
    (folder / "evaluate.toml").write_text(
        f'target = "{model}"\ndtype = "float32"\ntemperatures = [0.0, 1.0]\ntree_nodes = 0\n'
        "chain_length = 2\nmax_new_tokens = 6\nbatch_size = 2\n"
    )
    return folder


def command(study, draft, suites, *more):
    where = ("--config", str(study / "evaluate.toml"), "--root", str(study.parent))
    return [*where, "--draft", draft, *more, "--suites", *suites]


def test_an_evaluation_is_recorded_and_its_rerun_gives_the_same_tokens(study, draft, suites, capfd):
    assert evaluate.main(command(study, draft, suites)) == 0
    found = record.read_study("tiny", study.parent)
    assert sorted(found) == ["greedy-chain", "sampled-t1-chain"]
    result = found["greedy-chain"]
    figures = result["figures"]
    assert figures["all"]["answers"] == 5
    assert {n: s["answers"] for n, s in figures["suites"].items()} == {"talk": 3, "code": 2}
    assert {n: s["answers"] for n, s in figures["languages"].items()} == {"en": 3, "zh": 1, "unknown": 1}
    parts = list(figures["suites"].values())
    for name in ("num_tokens", "target_forwards"):
        assert sum(part[name] for part in parts) == figures["all"][name]
    assert result["config"]["shape"] == {"kind": "chain", "parent": [0, 0, 1], "rank": [0, 0, 0]}
    assert result["config"]["max_new_tokens"] == 6
    text = json.dumps(result)
    assert str(Path(suites[0]).parent) not in text.replace(result["config"]["target"], "")
    assert figures["token_hash"] != found["sampled-t1-chain"]["figures"]["token_hash"]

    path = study / "results" / "greedy-chain.json"
    before = path.read_text()
    assert evaluate.main(command(study, draft, suites, "--check")) == 0
    # What the command line changed belongs to the command that makes the result again.
    changed = ["temperatures=[0.0]", "limit=1"]
    assert evaluate.main([*changed, *command(study, draft, suites)]) == 0
    again = record.read(path)["command"]
    assert again.endswith(
        "tiny/evaluate.toml 'temperatures=[0.0]' limit=1 --draft DRAFT --suites talk.jsonl code.jsonl"
    )
    assert evaluate.main([*shlex.split(again)[5:7], *command(study, draft, suites, "--check")]) == 0
    path.write_text(before)
    assert path.read_text() == before
    path.write_text(before.replace(figures["token_hash"], "0" * 64))
    capfd.readouterr()
    assert evaluate.main(command(study, draft, suites, "--check")) == 1
    assert "token_hash" in capfd.readouterr().err
    path.write_text(before)
    assert evaluate.main(command(study, draft, suites[:1], "--check")) == 2
    assert "suites differ" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("rows", "changes", "words"),
    [
        ("{bad\n", (), "not valid JSON"),
        ('{"prompt": "x"}\n', ("chain_length=0",), "nothing is to be measured"),
        ('{"prompt": "x"}\n', ("temperatures=[]",), "nothing is to be measured"),
        ('{"prompt": "x"}\n', ("nodes=3",), "unknown key nodes"),
    ],
)
def test_evaluations_that_cannot_be_are_refused(study, draft, tmp_path, capfd, rows, changes, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(rows)
    given = command(study, draft, [str(path)])
    assert evaluate.main([*changes, *given]) == 2
    assert words in capfd.readouterr().err


def test_two_suites_of_one_name_are_refused(study, draft, suites, capfd):
    assert evaluate.main(command(study, draft, [suites[0], suites[0]])) == 2
    assert "same name" in capfd.readouterr().err


def test_a_sweep_becomes_a_result_without_places(tmp_path, monkeypatch):
    data = tmp_path / "private" / "a.jsonl"
    data.parent.mkdir()
    data.write_text("x")
    path = tmp_path / "shape" / "width.toml"
    path.parent.mkdir()
    path.write_text('[base.run]\ndecode_prompts = 1\n[grid]\n"draft.intermediate_size" = [8, 16]\n')
    places = [f"data.train=[{{path='{data}'}}]", f"out={tmp_path / 'runs'}"]
    names = ("tau", "per_position_acceptance_rate", "n_alpha", "tokens", "updates")
    names += ("parameters", "bytes", "step_flops", "propose_ms")

    def fake(self):
        points = read_sweep(self.config, self.overrides, self.grid)
        runs = [{"values": p.values, "folder": "f", **dict.fromkeys(names, 1)} for p in points]
        (tmp_path / "runs").mkdir(exist_ok=True)
        write_json(tmp_path / "runs" / "sweep.json", {"runs": runs})
        return 0

    monkeypatch.setattr(Sweep, "run", fake)
    study = sweep.Study(path, (*places, "run.updates=70"), root=tmp_path)
    assert study.run() == 0
    found = record.read_study("shape", tmp_path)["width"]
    assert [r["values"] for r in found["figures"]["runs"]] == [
        {"draft.intermediate_size": 8},
        {"draft.intermediate_size": 16},
    ]
    assert "private" not in json.dumps(found)
    assert found["command"].endswith("shape/width.toml 'data.train=[...]' out=RUNS run.updates=70")
    assert found["config"]["data"]["train"][0]["name"] == "a.jsonl"
    monkeypatch.setattr(Sweep, "run", lambda self: 1)
    assert dataclasses.replace(study, root=tmp_path / "no").run() == 1
    assert not (tmp_path / "no").exists()
