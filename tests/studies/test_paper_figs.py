"""Figures come from results alone; published numbers are marked as theirs; what is missing is named."""

import json
import tomllib

import numpy as np
import pytest

from eaglejax.errors import ConfigError
from experiments import record
from paper_figs import results as module
from paper_figs.__main__ import FIGURES, main
from paper_figs.results import PUBLISHED, Results, published, standard_error


def rates(scale=1.0):
    return {
        "mean_acceptance_length": 1.0 + scale,
        "per_position_acceptance_rate": [0.6 * scale, 0.4 * scale],
        "n_alpha": [0.6 * scale, 0.66 * scale],
        "target_forwards": 100,
    }


def acceptance(scale):
    suites = {"humaneval_eagle80": rates(scale), "own_suite": rates(scale / 2)}
    return {"all": rates(scale), "suites": suites, "languages": {"en": rates(scale), "zh": rates(scale / 3)}}


def sweep(name, values, cost=1_000_000):
    return {
        "runs": [
            {
                "values": {name: v},
                "tau": 1.2 + n / 10,
                "per_position_acceptance_rate": [0.1 + n / 10, 0.1],
                "tokens": 120,
                "step_flops": 1_000_000 + cost * n,
                "parameters": 5,
                "bytes": 9,
            }
            for n, v in enumerate(values)
        ]
    }


@pytest.fixture
def root(tmp_path):
    def put(study, name, figures):
        path = record.results_folder(study, tmp_path) / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = dict.fromkeys(record.FIELDS) | {"study": study, "name": name, "figures": figures}
        path.write_text(json.dumps(fields))

    for name in ("greedy-tree", "sampled-t1-tree", "greedy-chain"):
        put("demo_draft", name, acceptance(1.0))
    put("eagle1", "greedy-chain", acceptance(0.5))
    put("data_scaling", "samples", sweep("data.total", [250, 500, 1000]))
    put("draft_shape", "width", sweep("draft.intermediate_size", [608, 1216]))
    put("draft_shape", "steps", sweep("objective.steps", [1, 3], cost=0))
    put("draft_shape", "vocab", sweep("draft.vocab", [2048, 4096]))
    put("rotation", "ladder", {"rungs": {"original": {"tau": 2.0}, "unaligned": {"tau": 1.01}}})
    put("quantization", "acceptance", {n: scored(t, p) for n, t, p in SCORED})
    kinds = {"float": 0.0, "w8a8": 0.5, "w8a8+r1": 0.01, "w4a8-g32+mse": 0.7}
    put(
        "quantization",
        "outliers",
        {k: {n: scored(2.0, v) for n, v in kinds.items()} for k in ("none", "all")},
    )
    put("quantization", "speed", {n: speeds(s) for n, s in (("float", 1.0), ("w8a8", 1.8))})
    tau = {"all": rates(1.5)}
    put("quantization", "retrained", {"float": {"float": tau}, "w8a8": {"float": tau, "w8a8": tau}})
    return tmp_path


SCORED = (
    ("float", 2.0, 1.7),
    ("w8a8", 1.9, 1.8),
    ("w8a8+r1+r2+r4", 1.95, 1.75),
    ("w8a8+kv-int8+r3", 1.5, 1.76),
)


def scored(tau, loss):
    return {"acceptance": {"all": rates(tau - 1)}, "perplexity": {"perplexity": loss, "kl": loss}}


def speeds(scale):
    ratio = {"median": scale, "least": scale - 0.1, "greatest": scale + 0.1}
    return {"plain": ratio, "eagle": ratio, "bandwidth_ratio": scale + 0.2}


def tops(axis):
    """Upper ends of the axis's bars, whatever they stand on."""
    return [bar.get_y() + bar.get_height() for bar in axis.patches]


def test_every_figure_is_drawn_from_results_and_again_the_same(root, tmp_path):
    out = [tmp_path / "one", tmp_path / "two"]
    for folder in out:
        assert main(["--results", str(root), "--out", str(folder)]) == 0
    assert sorted(p.stem for p in out[0].iterdir()) == sorted(FIGURES)
    for path in out[0].iterdir():
        assert path.read_bytes() == (out[1] / path.name).read_bytes()


def test_what_is_drawn_is_what_is_on_record(root):
    figure = FIGURES["acceptance"](Results(root))
    bars, suites, languages = figure.axes
    assert tops(bars) == [2.0, 1.5, 2.0, 1.5]
    # A bar of a standard error a suite and condition.
    assert [len(c.get_segments()) for c in bars.collections] == [2, 2]
    labels = bars.get_legend_handles_labels()[1]
    assert {label for label in labels if not label.startswith("theirs: ")} == {
        "ours: greedy",
        "ours: sampled-t1",
    }
    assert len(labels) == 2 + len(published("tau"))
    # The published value of the suite that has one, and nothing for the other.
    theirs = [line for line in bars.lines if line.get_label().startswith("theirs: ")]
    assert theirs[0].get_ydata().tolist() == [6.74]
    assert [line.get_label() for line in languages.lines] == ["en", "zh"]
    assert suites.lines[0].get_ydata().tolist() == [0.6, 0.4]

    own, other = FIGURES["n_alpha"](Results(root)).axes
    assert [line.get_ydata().tolist() for line in own.lines] == [[0.6, 0.66], [0.3, 0.33]]
    assert len(other.lines) == len(published("n_alpha"))
    axis = FIGURES["data_scaling"](Results(root)).axes[0]
    assert axis.lines[0].get_xdata().tolist() == [250, 500, 1000]
    steps, vocab, width = FIGURES["draft_shape"](Results(root)).axes
    assert [t.get_text() for t in width.texts] == ["608", "1216"]
    assert vocab.lines[0].get_xdata().tolist() == [1.0, 2.0]
    # What costs nothing is drawn over its own values; every panel spans the same range of tau.
    assert steps.lines[0].get_xdata().tolist() == [1.0, 3.0]
    assert len({round(np.ptp(axis.get_ylim()), 6) for axis in (steps, vocab, width)}) == 1
    (ladder,) = FIGURES["rotation"](Results(root)).axes
    assert tops(ladder) == [2.0, 1.01]


def test_a_standard_error_is_that_of_the_rounds():
    """Against the rounds themselves: 0, 1, 1 and 2 accepted tokens, each 25 times."""
    accepted = np.repeat([0, 1, 1, 2], 25)
    run = {"tau": 2.0, "tokens": 200, "per_position_acceptance_rate": [0.75, 0.25]}
    assert standard_error(run) == pytest.approx(accepted.std() / np.sqrt(len(accepted)))


def test_what_is_drawn_of_quantised_targets_is_what_is_on_record(root):
    tau, loss = FIGURES["quantization"](Results(root)).axes
    names = ["not rotated", "r1+r2+r4", "kv-int8+r3"]
    assert tau.get_legend_handles_labels()[1] == names
    assert [t.get_text() for t in tau.get_xticklabels()] == ["float", "w8a8"]
    assert tops(tau) == pytest.approx([2.0, 1.9, 1.95, 1.5])
    assert [round(b.get_x() + b.get_width() / 2) for b in tau.patches] == [0, 1, 1, 1]
    assert tops(loss) == pytest.approx([1.7, 1.8, 1.75, 1.76])

    wide, narrow = FIGURES["outliers"](Results(root)).axes[:2]
    assert [b.get_height() for b in wide.patches] == [0.5, 0.5, 0.01, 0.01]
    assert narrow.get_title() == "w4a8-g32+mse: outlier channels"
    (speed,) = FIGURES["quantization_speed"](Results(root)).axes
    assert [b.get_height() for b in speed.patches] == [1.0, 1.8, 1.0, 1.8]
    assert list(speed.lines[0].get_ydata()) == [1.2, 2.0]
    (retrained,) = FIGURES["retrained"](Results(root)).axes
    assert [t.get_text() for t in retrained.get_xticklabels()] == ["float target", "w8a8 target"]
    assert [round(b.get_x() + b.get_width() / 2) for b in retrained.patches] == [0, 1, 1]


@pytest.mark.parametrize("name", FIGURES)
def test_missing_results_name_the_command_that_makes_them(name, tmp_path, capfd):
    assert main([name, "--results", str(tmp_path), "--out", str(tmp_path)]) == 1
    err = capfd.readouterr().err
    assert "is missing; make it with: python -m experiments." in err
    assert not list(tmp_path.iterdir())


def test_other_figures_are_drawn_where_one_cannot_be(root, tmp_path, capfd):
    (root / "rotation" / "results" / "ladder.json").unlink()
    assert main(["rotation", "n_alpha", "--results", str(root), "--out", str(tmp_path / "out")]) == 1
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["n_alpha.svg"]
    assert main(["nonsense", "--out", str(tmp_path)]) == 2
    assert "figure 'nonsense' is not known" in capfd.readouterr().err
    path = root / "data_scaling" / "results" / "samples.json"
    path.write_text(path.read_text().replace("data.total", "draft.vocab"))
    with pytest.raises(ConfigError, match=r"no sweep over data\.total"):
        FIGURES["data_scaling"](Results(root))


def test_every_published_number_states_its_source(monkeypatch, tmp_path):
    table = tomllib.loads(PUBLISHED.read_text())
    for source in table["sources"].values():
        assert "arXiv:" in source["citation"]
    for kind in ("tau", "n_alpha", "data_scaling"):
        for entry in published(kind):
            assert entry["where"]
            assert entry["citation"]
            assert ("read off the figure" in entry["label"]) == bool(entry.get("reading"))
    bad = tmp_path / "p.toml"
    bad.write_text('[sources]\n[[tau]]\nsource = "x"\nwhere = "t"\nmethod = "m"\nmodel = "o"\n')
    monkeypatch.setattr(module, "PUBLISHED", bad)
    with pytest.raises(ConfigError, match="source 'x' is not among"):
        published("tau")


def test_without_matplotlib_the_extra_is_named(root, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"eaglejax\[figures\]"):
        FIGURES["rotation"](Results(root))
