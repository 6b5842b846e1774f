"""A sweep's points, what names a run, and what a draft costs; the command itself runs in tests/cli."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from train_tools import EXPERTS, draft_config

from eaglejax.cli.sweep import _Session
from eaglejax.drafts.eagle.model import init_eagle
from eaglejax.errors import ConfigError
from eaglejax.train.curate import split_validation
from eaglejax.train.eagle import start
from eaglejax.train.eagle.cost import draft_cost
from eaglejax.train.grid import read_sweep, short
from eaglejax.train.samples import Sample
from eaglejax.train.settings import SourceFile
from eaglejax.train.sweep import (
    common_prompts,
    draft_digest,
    prompts_digest,
    read_result,
    run_key,
    write_result,
)
from experiments.sweep import without_places

RUN = """
out = "runs/s"
[data]
train = [{ path = "a.jsonl" }]
[run]
decode_prompts = 2
"""
SWEEP = """
[base]
out = "runs/s"
[base.data]
train = [{ path = "a.jsonl" }]
[base.run]
decode_prompts = 2
[grid]
draft.intermediate_size = [1216, 2432]
"objective.steps" = [3, 5]
"""


def written(tmp_path, text):
    path = tmp_path / "s.toml"
    path.write_text(text)
    return path


def test_every_combination_is_a_run_with_its_values_resolved(tmp_path):
    points = read_sweep(written(tmp_path, SWEEP), ["run.updates=70"])
    assert [tuple(p.values.values()) for p in points] == [(1216, 3), (1216, 5), (2432, 3), (2432, 5)]
    for point in points:
        assert point.settings.draft.intermediate_size == point.values["draft.intermediate_size"]
        assert point.settings.objective.steps == point.values["objective.steps"]
        assert point.settings.run.updates == 70
    assert points[1].label() == "draft.intermediate_size=1216, objective.steps=5"


def test_a_plain_run_file_and_the_command_lines_grid_are_the_same(tmp_path):
    grid = ["draft.intermediate_size=[1216, 2432]", "objective.steps=[3, 5]"]
    assert read_sweep(written(tmp_path, RUN), grid=grid) == read_sweep(written(tmp_path, SWEEP))


def test_data_mixes_are_values_too(tmp_path):
    grid = ["data.train=[[{path='x/a.jsonl'}], [{path='x/a.jsonl', weight=2}, {path='b.jsonl', weight=0.5}]]"]
    points = read_sweep(written(tmp_path, RUN), ["data.mix=true"], grid)
    assert [len(p.settings.data.train) for p in points] == [1, 2]
    assert points[1].label() == "data.train=2 a+0.5 b"
    assert short([1, 2]) == "[1, 2]"


@pytest.mark.parametrize(
    ("text", "overrides", "grid", "words"),
    [
        (RUN, (), (), "grid is empty"),
        (SWEEP + "[more]\n", (), (), "unknown section 'more'"),
        ("base = 3\n", (), (), "are sections"),
        (SWEEP, (), ("objective.steps=[1]",), "on the command line; give it once"),
        (RUN, (), ("out=['a', 'b']",), "out is one for the whole sweep"),
        (RUN, (), ("run=[{decode_prompts=1}, {decode_prompts=2}]",), "run is one for the whole sweep"),
        (RUN, (), ("draft.vocab=64",), "must be a list"),
        (RUN, (), ("draft.vocab=[]",), "must be a list"),
        (RUN, (), ("draft.vocab=[64, 64]",), "twice"),
        (RUN, (), ("draft.width=[64]",), r"unknown key draft\.width"),
        (RUN, (), ("draft.vocab=['many']",), r"draft\.vocab is 'many'"),
        (RUN, (), ("target.x=[1]",), "target is .* of type str"),
        (RUN, (), ("objective.steps=[3, 64]",), r"with objective\.steps=64: data\.overlap"),
        (RUN, ("run.decode_prompts=0",), ("objective.steps=[3]",), "decode_prompts"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(tmp_path, text, overrides, grid, words):
    with pytest.raises(ConfigError, match=words):
        read_sweep(written(tmp_path, text), overrides, grid)


def test_a_runs_name_follows_settings_data_and_target_but_not_its_folder(tmp_path):
    data = tmp_path / "a.jsonl"
    data.write_text("one")
    (point,) = read_sweep(
        written(tmp_path, RUN), [f"data.train=[{{path='{data}'}}]"], ["objective.steps=[3]"]
    )
    key = run_key(point.settings, "model")
    assert run_key(dataclasses.replace(point.settings, out="elsewhere"), "model") == key
    assert run_key(point.settings, "other") != key
    slower = dataclasses.replace(
        point.settings, optimizer=dataclasses.replace(point.settings.optimizer, learning_rate=1e-5)
    )
    assert run_key(slower, "model") != key
    moved = dataclasses.replace(
        point.settings,
        data=dataclasses.replace(point.settings.data, train=(SourceFile(str(tmp_path / "b.jsonl")),)),
    )
    (tmp_path / "b.jsonl").write_text("one")
    assert run_key(moved, "model") == key
    data.write_text("two")
    assert run_key(point.settings, "model") != key
    data.unlink()
    with pytest.raises(ConfigError, match=r"a\.jsonl cannot be read"):
        run_key(point.settings, "model")


def test_a_run_that_goes_on_from_a_draft_follows_the_drafts_files(tmp_path):
    (tmp_path / "a.jsonl").write_text("one")
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text("{}")
    changes = [f"data.train=[{{path='{tmp_path / 'a.jsonl'}'}}]", f"draft.start={tmp_path / 'draft'}"]
    (point,) = read_sweep(written(tmp_path, RUN), changes, ["objective.steps=[3]"])
    key = run_key(point.settings, "model")
    (tmp_path / "draft" / "model.safetensors").write_bytes(b"weights")
    assert run_key(point.settings, "model") != key


def test_drafts_are_compared_on_prompts_that_no_run_trains_on():
    def talk(first, *later):
        ids = np.asarray([first, *later], np.int32)
        return Sample(ids, np.arange(len(ids)) == len(ids) - 1, f"{first}")

    code, chat = ([talk(base + n, 1) for n in range(60)] for base in (0, 100))
    wide, narrow = (split_validation(code + chat, share)[1] for share in (0.5, 0.2))
    some = split_validation(code, 0.5)[1]
    found = common_prompts([some, wide, narrow], [0.5, 0.5, 0.2], 4)
    assert len(found) == 4
    assert {s.name for s in found} <= {s.name for s in narrow}
    # Other files on the grid, or another order, ask the same prompts as long as they hold them.
    assert found == common_prompts([narrow[::-1], wide], [0.2, 0.5], 4)
    assert prompts_digest(found) != prompts_digest(common_prompts([some], [0.5], 4))
    later = dataclasses.replace(talk(0, 1, 2), conversation=code[0].group)
    assert common_prompts([[code[0], later]], [1.0], 9) == [code[0]]
    with pytest.raises(ConfigError, match="no sample is held out"):
        common_prompts([wide, []], [0.5, 0.0], 4)


def test_the_closed_form_start_reads_its_texts_once_while_nothing_about_them_changes(monkeypatch, tmp_path):
    asked = []

    def counted(target, aux, samples, capacity, tokens):
        asked.append((aux, len(samples), capacity, tokens))
        return object()

    monkeypatch.setattr(start, "fit_data", counted)
    sample = Sample(np.arange(4, dtype=np.int32), np.ones(4, bool), "one")
    other = dataclasses.replace(sample, ids=np.arange(1, 5, dtype=np.int32))
    session = _Session(None, tmp_path, [])

    def read(*asked):
        return start.read_fit(None, *asked, session.remember)

    first = read((0, 1), [sample], 8, 100)
    assert read((0, 1), [dataclasses.replace(sample)], 8, 100) is first
    changed = [((0, 2), [sample], 8, 100), ((0, 2), [other], 8, 100), ((0, 2), [other], 16, 100)]
    found = [read(*arguments) for arguments in [*changed, ((0, 2), [other], 16, 99)]]
    assert len({id(answer) for answer in [first, *found]}) == 5
    assert len(asked) == 5


def test_a_studys_record_says_no_places(tmp_path):
    """Data, draft and features lie somewhere on the machine that ran it."""
    (tmp_path / "a.jsonl").write_text("one")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    changes = [
        f"data.train=[{{path='{tmp_path / 'a.jsonl'}'}}]",
        f"draft.start={tmp_path / 'mine'}",
        f"run.features={tmp_path / 'features'}",
    ]
    (point,) = read_sweep(written(tmp_path, RUN), changes, ["objective.steps=[3]"])
    found = without_places(point.settings)
    assert str(tmp_path) not in json.dumps(found)
    assert found["draft"]["start"] == {"name": "mine", "sha256": draft_digest(str(tmp_path / "mine"))}
    assert found["data"]["train"][0]["name"] == "a.jsonl"


def test_a_run_is_finished_when_its_result_stands(tmp_path):
    assert read_result(tmp_path) is None
    write_result(tmp_path, {"tau": 1.5})
    assert read_result(tmp_path) == {"tau": 1.5}


def test_what_another_grid_trained_is_shown_with_the_values_of_this_one(tmp_path):
    """The key is that of the resolved settings: a grid with more axes finds what one with fewer trained."""
    points = read_sweep(written(tmp_path, SWEEP))
    session = _Session(None, tmp_path, [])
    session.prompts = []
    session._data = {points[0].settings.data: None}
    session.folder("key").mkdir(parents=True)
    before = {
        "values": {"draft.intermediate_size": 1216},
        "prompts": prompts_digest([]),
        "folder": "elsewhere",
    }
    write_result(session.folder("key"), before | {"tau": 1.5, "propose_ms": None})
    found = session.result(points[0], "key", timed=False)
    assert found["values"] == {"draft.intermediate_size": 1216, "objective.steps": 3}
    assert found["folder"] == str(session.folder("key"))
    assert found["tau"] == 1.5


def test_data_that_cannot_be_read_are_the_error_that_is_told(tmp_path):
    points = read_sweep(written(tmp_path, SWEEP), [f"data.train=[{{path='{tmp_path / 'none.jsonl'}'}}]"])
    target = SimpleNamespace(need_tokenizer=lambda: None, context=4096, config=SimpleNamespace(vocab_size=9))
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read"):
        _Session(target, tmp_path, [p.settings for p in points]).result(points[0], "key", timed=False)


@pytest.mark.parametrize(
    "changes", [{}, EXPERTS, {"num_layers": 2}, {"own_head": False, "target_rows": True}]
)
def test_the_cost_counts_what_a_draft_holds_and_what_a_token_meets(changes):
    config = draft_config(**changes)
    weights = init_eagle(config, jax.random.key(0))
    cost = draft_cost(config, np.float16)
    assert cost.parameters == sum(w.size for w in jax.tree.leaves(weights))
    layers = len(weights["layers"])
    router = 32 * 4 if "num_experts" in changes else 0
    assert cost.bytes == 2 * cost.parameters + 2 * router * layers
    # Attention of the first layer reads 2H, later ones H; 24 neurons meet a token, dense or of two experts.
    attention = sum(wide * (32 + 16 + 16) + 32 * 32 for wide in [64, 32][:layers])
    assert cost.step_flops == 2 * (attention + layers * 3 * 32 * 24 + router + 32 * 64)


def test_an_eagle1_step_meets_fc_and_the_targets_whole_head():
    config = draft_config(version=1, draft_vocab_size=264, num_aux=0, aux=(), head_norm=False, own_head=False)
    attention = 32 * (32 + 16 + 16) + 32 * 32
    assert draft_cost(config, np.float32).step_flops == 2 * (64 * 32 + attention + 3 * 32 * 24 + 32 * 264)
