"""A whole run: learns, evaluates for real, exports, resumes bit for bit, survives kills and NaNs."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_model import VOCAB
from train_tools import leaves_equal

from eaglejax.api import generate
from eaglejax.drafts.registry import load_draft
from eaglejax.drafts.tree import chain
from eaglejax.errors import ConfigError, EaglejaxError, MismatchError
from eaglejax.train import trainer as module
from eaglejax.train.curate import place
from eaglejax.train.optimizers import optimizer
from eaglejax.train.plan import make_plan
from eaglejax.train.prepare import prepare_data, prepare_draft
from eaglejax.train.run_checkpoints import RunCheckpoints
from eaglejax.train.samples import make_sample, read_samples
from eaglejax.train.settings import (
    SourceFile,
    load_settings,
    to_toml,
)
from eaglejax.train.state import init_state
from eaglejax.train.trainer import Trainer, export


@pytest.fixture(scope="module")
def whole(prepared, target):
    settings, data, draft = prepared
    return settings, Trainer(settings, target, data, draft).run()


@pytest.mark.parametrize("rows", [False, True])
def test_a_head_that_is_not_trained_is_shipped_or_borrowed_from_the_target(prepared, target, tmp_path, rows):
    settings, data, _ = prepared
    settings = dataclasses.replace(
        settings, draft=dataclasses.replace(settings.draft, target_rows=rows, start="layer", vocab=48)
    )
    draft = prepare_draft(settings, target, data)
    folder = export(tmp_path / "draft", draft, draft.weights, settings, dtype="float32")
    loaded = load_draft(folder, target)
    assert loaded.proposer.config.target_rows == rows
    assert ("head" in loaded.params.weights) != rows
    head = loaded.params.weights["head"] if not rows else loaded.params.head
    head = head.T if rows and loaded.params.tied else head
    theirs = target.params["embed"].T if "head" not in target.params else target.params["head"]
    np.testing.assert_array_equal(head, np.asarray(theirs)[:, draft.ids])


def test_prompts_are_trained_on_when_asked_and_never_judged(prepared, target):
    settings, data, _ = prepared
    everything = prepare_data(dataclasses.replace(settings.data, supervise="all"), target)
    assert [s.ids.tolist() for s in everything.train] == [s.ids.tolist() for s in data.train]
    assert all(s.supervised.all() for s in everything.train)
    assert not all(s.supervised.all() for s in data.train)
    assert [s.key for s in everything.validation] == [s.key for s in data.validation]


def test_a_mixture_tells_of_files_that_it_repeats_and_rows_beyond_the_context_are_refused(
    prepared, target, rows_file, tmp_path
):
    settings = prepared[0]
    few = tmp_path / "few.jsonl"
    few.write_text(json.dumps({"prompt_ids": [9, 9], "completion_ids": [5, 6, 7]}) + "\n")
    files = (SourceFile(str(rows_file)), SourceFile(str(few)))
    mixed = dataclasses.replace(settings.data, train=files, mix=True, validation=0.0, total=20)
    found = prepare_data(mixed, target)
    assert len(found.train) == 20
    assert found.report.lines() == [f"{few} is gone through 10.00 times"]
    with pytest.raises(ConfigError, match=r"row_tokens is 513.*context of 512"):
        prepare_data(dataclasses.replace(settings.data, row_tokens=513), target)


def read_log(out):
    with open(os.path.join(out, "metrics.jsonl")) as file:
        return [json.loads(line) for line in file]


def test_a_run_lowers_the_loss_and_writes_a_draft_that_decodes_losslessly(whole, target):
    settings, result = whole
    log = read_log(settings.out)
    losses = [row["train/objective"] for row in log if "train/objective" in row]
    assert losses[-1] < 0.93 * losses[0]
    assert not result.interrupted
    assert result.updates == 7
    bound = load_draft(result.draft, target, tree=chain(2))
    prompt = [[40, 41, 42, 43]]
    fast = generate(target, prompt, proposer=bound, max_new_tokens=12)
    plain = generate(target, prompt, max_new_tokens=12)
    assert fast[0].token_ids == plain[0].token_ids


def test_the_last_update_is_saved_once_and_evaluations_report_the_real_tau(whole):
    settings, result = whole
    names = sorted(os.listdir(os.path.join(settings.out, "checkpoints")))
    assert [n for n in names if n.startswith("update-")] == ["update-00000005", "update-00000007"]
    evaluations = [row for row in read_log(settings.out) if "decoded/tau" in row]
    assert [row["update"] for row in evaluations] == [5, 7]
    assert all(1.0 <= row["decoded/tau"] <= 3.0 for row in evaluations)
    assert result.score == max(row["decoded/tau"] for row in evaluations)


def test_a_killed_run_goes_on_bit_for_bit(prepared, whole, target, tmp_path):
    settings, data, draft = prepared
    other = dataclasses.replace(settings, out=str(tmp_path / "run"))
    kill_at = 3

    def notify(update, values):
        del values
        if update >= kill_at:
            os.kill(os.getpid(), signal.SIGTERM)

    first = Trainer(other, target, data, draft, notify).run()
    assert first.interrupted
    assert first.updates == 4
    second = Trainer(other, target, data, draft).run()
    assert second.updates == 7
    like = init_state(draft.weights, optimizer(settings.optimizer, settings.run.updates))
    binds = json.loads((whole_folder(settings) / "update-00000007" / "run.json").read_text())["binds"]
    states = [RunCheckpoints(whole_folder(s), binds, 2).restore(like, 7).state for s in (settings, other)]
    assert leaves_equal(*states)
    assert rates_of(other)[6] == rates_of(settings)[6]


TWO_DEVICES = """
import dataclasses
import sys

import jax
from run_settings import settings_for
from eaglejax.checkpoint.target import load_target
from eaglejax.train.prepare import prepare_data, prepare_draft
from eaglejax.train.trainer import Trainer


class Watched(Trainer):
    def _place(self, batches):
        placed = super()._place(batches)
        for array in (placed.tokens, placed.aux):
            assert len({s.device for s in array.addressable_shards}) == 2
            assert array.addressable_shards[0].data.shape[:2] == (1, 1)
        return placed


folder, rows, out = sys.argv[1:]
target = load_target(folder, dtype="float32")
settings = settings_for(folder, rows, out, decode_prompts=0, remat=True)
data = prepare_data(settings.data, target)
draft = prepare_draft(settings, target, data)
run = Watched(settings, target, dataclasses.replace(data, validation=[]), draft)
assert all(len(x.devices()) == 2 for x in jax.tree.leaves(run.target.params))
assert run.run().updates == 7
"""


def test_two_devices_do_what_one_does(whole, folder, rows_file, tmp_path):
    """In a process of its own: how many devices a CPU has is settled when jax starts. The other run kept its
    attention's weights, this one computes them anew on each device. Each update then divides by the size of
    its gradient, so that rounding grows."""
    script, out = tmp_path / "two.py", tmp_path / "run"
    script.write_text(TWO_DEVICES)
    here = Path(__file__).parent
    env = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2",
        "PYTHONPATH": os.pathsep.join(map(str, (here, here.parent, here.parent.parent))),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(script), str(folder), str(rows_file), str(out)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (
        {row["update"]: row for row in read_log(place) if "train/loss" in row}
        for place in (whole[0].out, out)
    )
    assert list(one) == list(two) == [2, 4, 6, 7]
    for update, row in one.items():
        for name in ("train/loss", "train/rows", "gradient_norm"):
            np.testing.assert_allclose(two[update][name], row[name], rtol=1e-4 if update == 2 else 1e-2)


def whole_folder(settings):
    return Path(settings.out) / "checkpoints"


def rates_of(settings):
    return {row["update"]: row["learning_rate"] for row in read_log(settings.out) if "learning_rate" in row}


def test_checkpoints_of_another_run_are_refused_by_name(prepared, whole, target):
    settings, data, draft = prepared
    layers = [{**target.params["layers"][0], "up": target.params["layers"][0]["up"] * 2}]
    other = dataclasses.replace(
        target, params={**target.params, "layers": layers + target.params["layers"][1:]}
    )

    def changed(**sections):
        return dataclasses.replace(
            settings, **{n: dataclasses.replace(getattr(settings, n), **v) for n, v in sections.items()}
        )

    for name, run, model in (
        ("optimizer", changed(optimizer={"learning_rate": 1e-3}), target),
        ("target", settings, other),
        ("start", changed(draft={"start": "layer"}), target),
        ("train_head", changed(draft={"train_head": True}), target),
        ("compute_dtype", changed(run={"compute_dtype": "bfloat16"}), target),
        ("score", changed(run={"decode_tokens": 13}), target),
    ):
        with pytest.raises(MismatchError, match=f"another run: {name} was"):
            Trainer(run, model, data, draft).run()
    # As many tokens, but others: what other data or another tokenizer gives.
    recounted = dataclasses.replace(draft, vocab=dataclasses.replace(draft.vocab, key="0" * 32))
    with pytest.raises(MismatchError, match="another run: vocabulary was"):
        Trainer(settings, target, data, recounted).run()


def test_resolved_settings_read_back_equal(whole, tmp_path):
    settings, _ = whole
    assert load_settings(os.path.join(settings.out, "config.toml")) == settings
    path = tmp_path / "again.toml"
    path.write_text(to_toml(settings))
    changed = load_settings(path, ["run.updates=9", "objective.loss=kl", "data.total=none"])
    assert changed.run.updates == 9
    assert changed.objective.loss == "kl"


def test_a_document_with_nan_features_is_left_out_and_a_hopeless_run_stops(
    prepared, target, tmp_path, monkeypatch
):
    settings, data, draft = prepared
    real = module.with_features

    def poisoned(target, batch, aux):
        found = real(target, batch, aux)
        bad = np.asarray(found.aux).copy()
        bad[0, 1, 0, 0] = np.nan
        return found.replace(aux=bad)

    monkeypatch.setattr(module, "with_features", poisoned)
    out = dataclasses.replace(settings, out=str(tmp_path / "one"))
    quick = dataclasses.replace(
        out, run=dataclasses.replace(out.run, updates=3, decode_prompts=0, evaluate_every=100, log_every=1)
    )
    Trainer(quick, target, data, draft).run()
    last = [row for row in read_log(quick.out) if "discarded_documents" in row][-1]
    assert last["discarded_documents"] == 3
    assert last["skipped_updates"] == 0
    assert np.isfinite(last["train/objective"])

    def hopeless(target, batch, aux):
        found = real(target, batch, aux)
        return found.replace(hidden=np.full(found.hidden.shape, np.nan, np.float32))

    monkeypatch.setattr(module, "with_features", hopeless)
    stopping = dataclasses.replace(
        quick, out=str(tmp_path / "all"), run=dataclasses.replace(quick.run, most_skipped=2)
    )
    with pytest.raises(EaglejaxError, match="2 updates in a row"):
        Trainer(stopping, target, dataclasses.replace(data, validation=[]), draft).run()
    # An update that was left out has no loss to tell.
    (only,) = read_log(stopping.out)
    assert only["skipped_updates"] == 1
    assert not [name for name in only if name.startswith("train/")]


def sample_of(prompt, answer):
    return make_sample([*prompt, *answer], [False] * len(prompt) + [True] * len(answer), "s", VOCAB)


def test_prompts_that_are_decoded_are_held_out_whole_and_can_be_asked(prepared, target, tmp_path):
    settings, _, draft = prepared
    rows = [
        {"prompt_ids": list(range(5, 9)), "completion_ids": list(range(10, 150))},
        {"input_ids": list(range(20, 40)), "loss_mask": [1] * 20},
        {"prompt_ids": [7] * 600, "completion_ids": [5, 6, 7]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # By the hash of their prompts the three are held out at this share, and a fourth is not.
    share = max(map(place, read_samples(path, target.tokenizer, vocab_size=VOCAB)[0])) + 1e-9
    with path.open("a") as file:
        kept = next(n for n in range(99) if place(sample_of([n, n], [5, 6])) > share)
        file.write(json.dumps({"prompt_ids": [kept, kept], "completion_ids": [5, 6]}) + "\n")
    source = dataclasses.replace(settings.data, train=(SourceFile(str(path)),), validation=share)
    data = prepare_data(source, target)
    assert len(data.train) == 1
    assert len(data.validation) > 4
    assert [p.ids.tolist() for p in data.prompts] == [[*range(5, 9), *range(10, 150)]]
    data = dataclasses.replace(data, prompts=[])
    with pytest.raises(ConfigError, match="no prompt is held out"):
        Trainer(settings, target, data, draft)
    with pytest.raises(ConfigError, match="no prompt is held out"):
        make_plan(settings, target, data)


def test_a_plan_that_memory_or_disk_has_no_room_for(prepared, target):
    settings, data, _ = prepared
    plan = make_plan(settings, target, data)
    plan.check_room(target, settings)
    with pytest.raises(ConfigError, match=r"the run, its target apart, takes about 931 GiB.*run\.rows"):
        dataclasses.replace(plan, device_bytes=10**12).check_room(target, settings)
    with pytest.raises(EaglejaxError, match=r"checkpoints of the run together takes about 93132\d+\.\d+ GiB"):
        dataclasses.replace(plan, disk_bytes=10**17).check_room(target, settings)
