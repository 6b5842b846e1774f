"""The folders of a run: who may write there, what is replaced, what cannot be."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from eaglejax.checkpoint.files import only_writer
from eaglejax.drafts.registry import load_draft
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.train.feature_cache import write_features
from eaglejax.train.plan import make_plan
from eaglejax.train.regenerate import RegenerateOptions, regenerate
from eaglejax.train.trainer import Trainer, export


def test_a_plan_asks_for_the_package_that_the_run_will_log_to(prepared, target, monkeypatch):
    settings, data, _ = prepared
    settings = dataclasses.replace(settings, run=dataclasses.replace(settings.run, wandb=True))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb is not installed"):
        make_plan(settings, target, data)


def test_a_draft_is_replaced_without_leftovers(prepared, target, tmp_path):
    settings, _, draft = prepared
    for _ in range(2):
        export(tmp_path / "draft", draft, draft.weights, settings, dtype="float32")
        assert [p.name for p in tmp_path.iterdir()] == ["draft"]
    assert load_draft(tmp_path / "draft", target)


HOLDER = """
import sys, time
from pathlib import Path
from eaglejax.checkpoint.files import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_what_one_process_writes_no_other_one_does_until_it_ends(prepared, target, tmp_path, monkeypatch):
    settings, data, draft = prepared
    out = tmp_path / "taken"
    settings = dataclasses.replace(settings, out=str(out))
    writers = (
        Trainer(settings, target, data, draft).run,
        lambda: write_features(out, target, data.train, draft.config.aux, capacity=64),
        lambda: regenerate(target, iter(()), out, RegenerateOptions()),
    )
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(out)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        for write in writers:
            with pytest.raises(CheckpointError, match="taken is being written by another process"):
                write()
        (tmp_path / "link").symlink_to(out)
        with pytest.raises(CheckpointError, match="link is being written"), only_writer(tmp_path / "link"):
            pass
    finally:
        holder.kill()
        holder.communicate()
    assert not out.exists()
    with only_writer(out):
        pass
    out.mkdir()
    monkeypatch.chdir(out)
    with only_writer(Path(".")):
        pass


def test_a_run_whose_folder_cannot_be_is_refused_with_its_name(prepared, target, tmp_path):
    settings, data, draft = prepared
    (tmp_path / "file").write_text("x")
    for out in ("file", "file/run"):
        settings = dataclasses.replace(settings, out=str(tmp_path / out))
        with pytest.raises(CheckpointError, match="file cannot be made a folder"):
            Trainer(settings, target, data, draft).run()
