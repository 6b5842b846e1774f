"""Settings, schedules, logs and plots."""

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from eaglejax.errors import ConfigError
from eaglejax.train.grid import read_sweep
from eaglejax.train.logs import JsonLog, TensorBoardLog, crc32c
from eaglejax.train.optimizers import schedule
from eaglejax.train.plots import plot_run, read_scalars
from eaglejax.train.settings import (
    OptimizerSettings,
    TrainSettings,
    load_settings,
    override,
    parse,
    read_toml,
    to_toml,
)

GOOD = """
target = "demo"
out = "runs/a"
[data]
train = [{ path = "a.jsonl", weight = 2 }, { path = "b.jsonl" }]
mix = true
[draft]
aux = [2, 12, 24]
vocab = 8192
[objective]
steps = 3
[optimizer]
learning_rate = 1e-3
"""


def written(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_a_file_is_read_with_overrides_and_written_back_equal(tmp_path):
    path = written(tmp_path, GOOD)
    found = load_settings(
        path, ["draft.vocab=none", "run.updates=500", "objective.step_weights=[1.0, 0.5, 0.25]"]
    )
    assert found.data.train[0].weight == 2.0
    assert found.draft.aux == (2, 12, 24)
    assert found.draft.vocab is None
    assert found.objective.weights == (1.0, 0.5, 0.25)
    assert load_settings(written(tmp_path, to_toml(found))) == found
    odd = parse(TrainSettings, {"out": 'a"b\\c\nd\te\x7f\x01 é\u2028'})
    path.write_text(to_toml(odd), encoding="utf-8", newline="")
    assert parse(TrainSettings, read_toml(path)) == odd


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("run.update=3", r"unknown key run\.update;.*updates"),
        ("run.updates=many", r"run\.updates is 'many'; it must be of type int"),
        ("run.remat=1", r"run\.remat is 1; it must be of type bool"),
        ("data.train=a.jsonl", r"data\.train is a list"),
        ("data.train=[{path=1}]", r"data\.train\[0\]\.path is 1"),
        ("objective.loss=l2", "soft_ce"),
        ("optimizer.name=sgd", "'adamw', 'muon'"),
        ("optimizer.warmup=1000", "leaves nothing"),
        ("data.overlap=3", "too small"),
        ("objective.algorithm=eagle1", "hass"),
        ("out=", "out is not set"),
        ("draft={vocab = 64, target_rows = true, train_head = true}", "target_rows"),
        ("draft={target_rows = true}", "needs draft.vocab"),
        ("draft.vocab_prior=-0.1", "vocab_prior"),
        ("draft.fit_tokens=0", "fit_tokens"),
        ("run=3", "not a section|is a section"),
        ("data.train=[{weight=2}]", r"data\.train\[0\]\.path is not given"),
        ("data.train=[{path='a', limit=0}]", "limit of a is 0"),
        ("data.train=[{path='a'}, {path='a'}]", "a file twice"),
        ("data.mix=false", r"set data\.mix = true"),
        ("data={train=[{path='a'}], total=5}", r"set data\.mix = true"),
        ("draft.vocab=0", r"draft\.vocab is 0; it must be at least 1"),
        ("draft.vocab=-1", r"draft\.vocab is -1; it must be at least 1"),
        ("draft.vocab=64.0", r"draft\.vocab is 64\.0; it must be of type int"),
        ("draft.num_heads=0", r"draft\.num_heads is 0"),
        ("draft={vocab_prior=0.1}", r"set draft\.vocab"),
        ('draft={start="layer", fit_tokens=9}', "for start 'fit'"),
        ("draft.expert_size=8", r"draft\.experts is 0"),
        ("optimizer.clip=-1.0", r"optimizer\.clip is -1\.0; it must be at least 0"),
        ("optimizer.beta2=1.0", r"optimizer\.beta2 is 1\.0; it must be below 1"),
        ("optimizer.learning_rate=nan", "finite"),
        ("run.decode_depth=0", r"run\.decode_depth is 0"),
        ("run.decode_tokens=1", r"run\.decode_tokens is 1; it must be at least 2"),
        ("run.decode_prompts=-1", r"run\.decode_prompts is -1"),
        ("run.most_skipped=0", r"run\.most_skipped is 0"),
        (
            "objective={algorithm='hass', loss='kl'}",
            r"objective\.loss has an effect with algorithm = 'eagle3'",
        ),
        ("objective.token_weight=0.2", r"objective\.token_weight has an effect with algorithm = 'eagle1'"),
        ("objective.kl_scale=0.5", r"objective\.kl_scale has an effect with loss = 'lk_lambda'"),
        ("objective={algorithm='eagle1', steps=1, top_tokens=3}", r"top_tokens has an effect with algorithm"),
        ("data.seed=-1", r"data\.seed is -1; it must lie in 0\.\.4294967295"),
        ("run.seed=4294967296", r"run\.seed is 4294967296"),
        ("draft={experts=4, expert_size=8, intermediate_size=16}", "set one of the two"),
        ("draft.experts_per_token=1", r"draft\.experts is 0"),
        ("optimizer={schedule='constant', final=0.1}", "a constant one does not fall"),
        ("objective={steps=1, step_weights=[1.0], step_decay=0.9}", "no effect beside"),
        ("optimizer.final=1.5", r"optimizer\.final is 1\.5"),
        ("objective={loss='lk_lambda', kl_decay=-1.0}", r"objective\.kl_decay is -1\.0; it must not be"),
        ("objective={position_weights='dpace'}", r"needs objective\.loss 'hard_ce'"),
        (
            "objective={position_weights='dpace', loss='hard_ce', step_decay=0.9}",
            "leave out step_weights and step_decay",
        ),
        (
            "objective={position_weights='dpace', loss='hard_ce', dpace_alpha=0.0}",
            r"dpace_alpha is 0\.0; it lies in",
        ),
        ("objective={dpace_alpha=0.3}", "dpace_alpha has an effect with position_weights"),
        ("objective={algorithm='hass', top_weight=-1.0}", r"objective\.top_weight is -1\.0"),
        ("objective={algorithm='eagle1', steps=1, feature_weight=0, token_weight=0}", "nothing is trained"),
        ("objective.steps=2147483648", r"objective\.steps is 2147483648; at least one step and at most 64"),
        ("data.row_tokens=4294967296", r"data\.row_tokens is 4294967296; it must be at most 1048576"),
        ("draft.num_layers=1000000", r"draft\.num_layers is 1000000; it must be at most 256"),
        ("run.decode_depth=600", r"run\.decode_depth is 600; it must be at most 128"),
        ("run.rows=9223372036854775807", r"run\.rows is 9223372036854775807"),
        ("optimizer.learning_rate=1" + "0" * 400, r"optimizer\.learning_rate is inf; it must be a finite"),
        ("run.updates=1" + "0" * 5000, r"run\.updates is '10000.*; it must be of type int"),
        ("nonsense", "section.key=value"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path, change, words):
    with pytest.raises(ConfigError, match=words):
        load_settings(written(tmp_path, GOOD), [change])


def test_overrides_of_what_is_no_section_and_broken_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="target is not a section"):
        override({"target": "demo"}, "target.x=1")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_settings(written(tmp_path, "a = [1,"))
    for text in ("a = 1" + "0" * 5000, "a = " + "[" * 100_000):
        with pytest.raises(ConfigError, match="not valid TOML"):
            load_settings(written(tmp_path, text))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(tmp_path / "none.toml")
    assert parse(TrainSettings, {}) == TrainSettings()


def test_the_examples_of_the_training_page_are_whole(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "training.md"
    run, sweep = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert load_settings(written(tmp_path, run)).run.decode_prompts == 4
    assert len(read_sweep(written(tmp_path, sweep))) == 12


@pytest.mark.parametrize(("kind", "middle"), [("cosine", 0.5 * 1.1), ("linear", 0.55), ("constant", 1.0)])
def test_the_rate_warms_up_and_falls_to_its_floor(kind, middle):
    rate = schedule(OptimizerSettings(learning_rate=1.0, warmup=10, schedule=kind, final=0.1), 110)
    assert float(rate(0)) == pytest.approx(1 / 11)
    assert float(rate(10)) == pytest.approx(1.0)
    assert float(rate(60)) == pytest.approx(middle, abs=1e-6)
    assert float(rate(110)) == pytest.approx(1.0 if kind == "constant" else 0.1)


def test_event_files_are_what_tensorboard_reads(tmp_path):
    """Parsed back by the format's own rules: framing, checksums, protocol-buffer fields."""
    assert crc32c(b"123456789") == 0xE3069283
    log = TensorBoardLog(tmp_path)
    log.write(300, {"loss": 1.5, "accuracy": [0.25, 0.5], "text": "x"})
    log.close()
    (path,) = tmp_path.iterdir()
    data, records = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        records.append(data[12 : 12 + length])
        for body, at in ((data[:8], 8), (records[-1], 12 + length)):
            crc = crc32c(body)
            masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
            assert struct.unpack("<I", data[at : at + 4])[0] == masked
        data = data[16 + length :]
    assert b"brain.Event:2" in records[0]
    event = fields(records[1])
    assert event[2] == [300]
    values = [fields(v) for v in fields(event[5][0])[1]]
    found = {v[1][0].decode(): struct.unpack("<f", v[2][0])[0] for v in values}
    assert found == {"loss": 1.5, "accuracy/0": 0.25, "accuracy/1": 0.5}


def fields(data):
    """Field number -> values of a protocol buffer, by wire type."""
    out, at = {}, 0

    def varint():
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = varint()
        kind = tag & 7
        if kind == 0:
            value = varint()
        else:
            size = {1: 8, 5: 4}.get(kind) or varint()
            value, at = data[at : at + size], at + size
        out.setdefault(tag >> 3, []).append(value)
    return out


def test_a_log_is_drawn_and_a_resumed_update_counts_once(tmp_path):
    log = JsonLog(tmp_path / "metrics.jsonl")
    for update, loss in ((10, 3.0), (20, 2.0), (20, 1.0)):
        log.write(update, {"train/objective": loss, "train/accuracy": [0.1, 0.2], "decoded/tau": 1.5})
    log.close()
    assert read_scalars(tmp_path)["train/objective"] == [(10, 3.0), (20, 1.0)]
    svg = plot_run(tmp_path).read_text()
    assert svg.count("<polyline") == 4
    assert "held-out prompts decoded" in svg
    assert "top-1 accuracy, training" in svg
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert all(np.isfinite(json.loads(line)["time"]) for line in lines)
    with pytest.raises(ConfigError, match="not the folder of a run"):
        plot_run(tmp_path / "x")


def test_a_log_that_a_kill_cut_goes_on_with_a_whole_line_and_nan_is_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"update": 1, "time": 0, "train/objective": 2.0}\n{"update": 2, "ti')
    log = JsonLog(path)
    log.write(2, {"train/objective": float("nan"), "train/accuracy": [0.5, float("inf")]})
    log.write(3, {"train/objective": 1.0})
    log.close()
    assert "NaN" not in path.read_text()
    assert read_scalars(tmp_path)["train/objective"] == [(1, 2.0), (2, None), (3, 1.0)]
    assert read_scalars(tmp_path)["train/accuracy"] == [(2, [0.5, None])]
    assert plot_run(tmp_path).read_text().count("<polyline") == 1
    path.write_text("[3]\n")
    with pytest.raises(ConfigError, match="line 1 is no row"):
        read_scalars(tmp_path)
