"""Studies of quantised and rotated targets, on a tiny model: what is measured, kept and refused."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax.errors import ConfigError, EaglejaxError
from eaglejax.speculate.metrics import Stats
from eaglejax.train.settings import load_settings, to_toml
from experiments import record
from experiments.quantization import acceptance, outliers, perplexity, retrained, speed
from experiments.quantization.acceptance import Acceptance, Bench
from experiments.quantization.growing import GrowingResult
from experiments.quantization.variants import Targets, Variant


@pytest.fixture(scope="session")
def answers(place):
    """Seventeen texts: calibration's sixteen and one to score."""
    path = place / "answers.jsonl"
    rng = np.random.default_rng(0)
    rows = [
        {"prompt_ids": rng.integers(0, 250, 4).tolist(), "completion_ids": rng.integers(0, 250, 12).tolist()}
        for _ in range(acceptance.CALIBRATION + 1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def settings(model, draft, suites, answers, place):
    return Acceptance(
        answers,
        tuple(suites[1:]),
        target=model,
        draft=draft,
        dtype="float32",
        tokens=10,
        width=24,
        limit=1,
        max_new_tokens=5,
        tree_nodes=3,
        tree_depth=2,
        tree_branching=2,
        root=place / "root",
        variants=("float", "w4a8-g16+r1+r2+r4+kv-int8"),
    )


@pytest.fixture(scope="module")
def bench(settings):
    return Bench.prepare(settings)


def growing(root, **changes):
    about = {"command": "c", "config": {"x": (1, 2)}, "seed": 0} | changes
    return GrowingResult("a", **about, root=root)


def test_a_growing_result_goes_on_where_it_was_left(tmp_path):
    first = growing(tmp_path)
    assert not first.has("one", "tau")
    first.put({"value": 1.5}, "one", "tau")
    first.put({"value": 2.5}, "one", "text")
    again = growing(tmp_path)
    assert again.get("one", "tau") == {"value": 1.5}
    assert not again.has("two")
    assert not again.has("one", "tau", "value", "deeper")
    again.put({"value": 3.5}, "two", "tau")
    first.put({"value": 4.5}, "two", "text")
    assert record.read(first.path)["figures"]["two"] == {"tau": {"value": 3.5}, "text": {"value": 4.5}}
    assert set(record.read(again.path)["figures"]) == {"one", "two"}
    with pytest.raises(ConfigError, match="other settings: x differ"):
        growing(tmp_path, config={"x": (1, 3)})


def test_names_say_how_a_target_is_made():
    found = Variant.parse("w4a8-g32+r4+mse+r1+kv-int8")
    assert dataclasses.asdict(found) == {
        "name": "w4a8-g32+r4+mse+r1+kv-int8",
        "weights": "w4a8-g32+mse",
        "rotations": ("r1", "r4"),
        "cache": "int8",
    }
    for name, words in (
        ("w8a8+r1+r1", "something twice"),
        ("w8a8+kv-int8+kv-fp8", "something twice"),
        ("float+mse", "nothing of float weights"),
        ("w8a8+kv-int7", "int7"),
    ):
        with pytest.raises(ConfigError, match=words):
            Variant.parse(name)


def test_a_variant_is_rotated_before_it_is_quantised(bench):
    targets = Targets(bench.target)
    made = targets.make(Variant.parse("w8a8+r1+r3+kv-fp8"))
    assert (made.quantization, made.cache_format, made.config.qk_rotation) == ("w8a8", "fp8", True)
    assert made.basis == targets.rotated(("r1", "r3")).basis
    assert targets.rotated(("r1", "r3")) is targets.rotated(("r1", "r3"))
    assert targets.rotated(()) is bench.target
    with pytest.raises(ConfigError, match="calibration"):
        targets.make(Variant.parse("w8a8-static"))


@pytest.mark.slow
def test_acceptance_is_recorded_and_not_measured_twice(settings, capfd, monkeypatch):
    name = settings.variants[1]
    # Of the float variant perplexity alone: the other's programs suffice to show what decoding records.
    assert dataclasses.replace(settings, measure=("perplexity",)).run() == 0
    assert dataclasses.replace(settings, variants=(name,)).run() == 0
    path = settings.root / "quantization" / "results" / "acceptance.json"
    found = record.read(path)
    assert {n: list(v) for n, v in found["figures"].items()} == {
        "float": ["perplexity"],
        name: ["perplexity", "acceptance"],
    }
    plain, packed = found["figures"]["float"]["perplexity"], found["figures"][name]["perplexity"]
    assert plain["kl"] == 0
    assert packed["kl"] > 0
    assert packed["bytes"] < plain["bytes"]
    drafted = found["figures"][name]["acceptance"]
    assert drafted["identical_to_ar"]
    assert drafted["all"]["num_tokens"] == drafted["suites"]["code"]["num_tokens"] == 5
    assert str(settings.root.parent) not in path.read_text()
    assert found["config"]["tree_nodes"] == 3

    seen = []

    def measure(self, part, target):
        seen.append((part, target.quantization))
        return {"perplexity": 1.0}

    monkeypatch.setattr(Bench, "measure", measure)
    assert dataclasses.replace(settings, variants=(name,)).run() == 0
    assert seen == []
    assert settings.run() == 0
    assert seen == [("acceptance", None)]
    found = record.read(path)
    found["figures"][name]["acceptance"]["identical_to_ar"] = False
    path.write_text(json.dumps(found))
    assert settings.run() == 1
    capfd.readouterr()
    assert acceptance.main(["--answers", "a", "--suites", "b", "--variants", "w8a8+r1+r1"]) == 2
    assert "something twice" in capfd.readouterr().err


OPTIONS = {"factor": 256, "channels": 2, "seed": 0}


@pytest.mark.parametrize("injection", ["norms", "values", "down", "all"])
def test_outliers_change_no_logit(bench, injection):
    changed, turned = outliers.inject(bench, injection, **OPTIONS)
    assert turned is None
    before, after = (jax.tree.leaves(t.params["layers"]) for t in (bench.target, changed))
    assert sum(not np.array_equal(a, b) for a, b in zip(before, after, strict=True)) >= 2
    outliers.check_same(bench, changed, exact=True)


def divergence(bench, target):
    return perplexity.measure(target, bench.texts, bench.settings.width, bench.base)["figures"]["kl"]


def test_rotation_repairs_what_outliers_break(bench):
    usual = divergence(bench, Targets(bench.target).make(Variant.parse("w8a8")))
    for injection, rotation in (("norms", "r1"), ("down", "r4")):
        changed, _ = outliers.inject(bench, injection, factor=16, channels=1, seed=0)
        targets = Targets(changed)
        broken, mended = (
            divergence(bench, targets.make(Variant.parse(name))) for name in ("w8a8", f"w8a8+{rotation}")
        )
        assert broken > 10 * usual
        assert mended < broken / 5


def test_a_turned_stream_is_the_same_function_in_its_principal_axes(bench):
    changed, turned = outliers.inject(bench, "stream", **OPTIONS)
    assert changed.basis is None
    outliers.check_same(bench, changed, exact=False)
    own = perplexity.score(changed, bench.texts, bench.settings.width)[1]
    assert np.abs(own - bench.base).max() < 1e-3
    axes = outliers.principal_axes(changed, bench.texts, bench.settings.width)
    largest = 8  # fewer than the text has tokens: the axes behind them are anyone's choice
    np.testing.assert_allclose(np.abs(axes[:, :largest]), np.eye(len(axes))[:, :largest], atol=0.05)
    both = outliers.in_basis(Targets(changed).make(Variant.parse("float+r1")), turned)
    before, after = (np.asarray(t.params["embed"], np.float64) for t in (bench.target, both))
    np.testing.assert_allclose(after, before @ both.rotation.matrix, atol=1e-4)


def test_outliers_that_cannot_be_are_refused(bench, settings, capfd):
    with pytest.raises(ConfigError, match="power of two"):
        outliers.inject(bench, "down", factor=3, channels=1, seed=0)
    moved = dataclasses.replace(
        bench.target, params=bench.target.params | {"norm": 1.5 * jnp.asarray(bench.target.params["norm"])}
    )
    for exact, words in ((True, "changed the target's logits"), (False, "moved the target's distribution")):
        with pytest.raises(EaglejaxError, match=words):
            outliers.check_same(bench, moved, exact=exact)
    given = ["--answers", str(settings.answers), "--suites", *settings.suites]
    assert outliers.main([*given, "--injections", "gate"]) == 2
    assert "'gate' is not known" in capfd.readouterr().err


def test_the_outlier_study_records_by_injection(settings, monkeypatch):
    study = outliers.Outliers(
        **{f.name: getattr(settings, f.name) for f in dataclasses.fields(acceptance.Settings)},
        variants=("float", "w8a8+r1"),
        injections=("none", "down"),
    )
    monkeypatch.setattr(Bench, "measure", lambda self, part, target: {part: 1.0, "basis": bool(target.basis)})
    assert study.run() == 0
    found = record.read_study("quantization", settings.root)["outliers"]
    assert found["seed"] is None
    assert found["config"]["factor"] == 64
    assert list(found["figures"]) == ["none", "down"]
    assert found["figures"]["down"]["w8a8+r1"]["acceptance"] == {"acceptance": 1.0, "basis": True}


class Timed:
    """A variant whose runs take given times a token, one a turn."""

    def __init__(self, nbytes, **times):
        self.target = type("", (), {"nbytes": nbytes})
        self.bytes_read = nbytes
        self.times = {method: iter(each) for method, each in times.items()}

    def decode(self, method):
        seconds = next(self.times[method])
        return Stats(
            num_tokens=11,
            rows=1,
            seconds=1 + 10 * seconds,
            first_seconds=1,
            round_tokens=6,
            target_forwards=2,
        )


def test_speeds_are_held_against_the_same_turn():
    runners = {
        "float": Timed(8, plain=[1.0, 2.0, 4.0], eagle=[0.5, 1.0, 2.0]),
        "w8a8": Timed(4, plain=[0.5, 1.0, 1.0], eagle=[0.5, 0.5, 1.0]),
    }
    found = speed.compared(runners, 3)
    assert found["float"]["plain"] == {"median": 1.0, "least": 1.0, "greatest": 1.0}
    assert found["w8a8"]["plain"] == pytest.approx({"median": 2.0, "least": 2.0, "greatest": 4.0})
    assert found["w8a8"]["eagle"] == pytest.approx({"median": 2.0, "least": 1.0, "greatest": 2.0})
    assert found["w8a8"]["eagle_over_plain"] == pytest.approx({"median": 1.0, "least": 1.0, "greatest": 2.0})
    assert (found["w8a8"]["bandwidth_ratio"], found["w8a8"]["tau"]) == (2.0, 3.0)
    lines = speed.table(found).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "| `w8a8` |" in lines[-1]


@pytest.mark.slow
def test_speed_runs_and_keeps_ratios_alone(settings, capsys):
    study = speed.Speed(
        settings.suites[0],
        **{n: getattr(settings, n) for n in ("target", "draft", "dtype", "root", "max_new_tokens")},
        **{n: getattr(settings, n) for n in ("tree_nodes", "tree_depth", "tree_branching")},
        variants=("float", "w8a8"),
        turns=1,
    )
    assert study.run() == 0
    found = record.read_study("quantization", settings.root)["speed"]
    assert set(found["figures"]) == {"float", "w8a8"}
    assert found["figures"]["float"]["plain"]["median"] == 1.0
    assert found["figures"]["w8a8"]["bandwidth_ratio"] > 1
    assert str(settings.root.parent) not in json.dumps(found)
    assert capsys.readouterr().out.startswith("| variant |")
    with pytest.raises(ConfigError, match="two variants"):
        dataclasses.replace(study, variants=("float",)).run()


@pytest.fixture
def runs(model, draft, answers, tmp_path):
    """Folders as two finished training runs leave them."""
    folders = {}
    for quant in ("w8a8", "none"):
        folder = tmp_path / "private" / quant
        folder.mkdir(parents=True)
        given = [f"data.train=[{{path='{answers}'}}]", f"out={folder}", f"target={model}"]
        given += ["target_dtype=float32", f"target_quant={quant}"]
        found = load_settings(record.ROOT / "quantization" / "retrained.toml", given)
        (folder / "config.toml").write_text(to_toml(found))
        (folder / "draft").symlink_to(draft)
        folders[quant] = str(folder)
    return folders


def test_twin_drafts_are_compared_on_both_targets(runs, suites, tmp_path, monkeypatch):
    seen = []

    def accepted(target, bound, asked, limit):
        seen.append((target.quantization, target.dtype.name, bound.proposer.tree.nodes, len(asked), limit))
        figures = {"mean_acceptance_length": 2.0}
        return {"all": figures, "identical_to_ar": True, "flips": 0, "largest_flip_gap": 0.0}

    monkeypatch.setattr(retrained, "accepted", accepted)
    study = retrained.Retrained(tuple(runs.values()), tuple(suites), root=tmp_path)
    assert study.run() == 0
    assert seen == [(quant, "float32", 16, 2, 64) for quant in (None, None, "w8a8", "w8a8")]
    found = record.read_study("quantization", tmp_path)["retrained"]
    assert {kind: list(row) for kind, row in found["figures"].items()} == {
        "float": ["float", "w8a8"],
        "w8a8": ["float", "w8a8"],
    }
    assert found["config"]["training"]["run"]["updates"] == 100
    assert str(tmp_path.parent) not in json.dumps(found)
    assert study.run() == 0
    assert len(seen) == 4


def test_runs_that_are_no_twins_are_refused(runs):
    with pytest.raises(ConfigError, match="one of a quantised one"):
        retrained.twins([runs["none"], runs["none"]])
    path = Path(runs["w8a8"]) / "config.toml"
    path.write_text(path.read_text().replace("steps = 2", "steps = 3"))
    with pytest.raises(ConfigError, match="more than target_quant: objective"):
        retrained.twins([runs["none"], runs["w8a8"]])


@pytest.mark.parametrize(
    "command",
    [
        ("train",),
        ("features", "--out", "features"),
        ("sweep", "--grid", "objective.steps=[1, 2]"),
    ],
    ids=lambda c: c[0],
)
def test_training_commands_quantise_the_target_as_the_settings_say(command, runs, run):
    config = Path(runs["w8a8"]) / "config.toml"
    changes = ("target_quant=w9a9", "run.decode_prompts=1")
    status, _, err = run(command[0], *changes, "--config", config, *command[1:])
    assert (status, "quant 'w9a9' is not known" in err) == (2, True)
