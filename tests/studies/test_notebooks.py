"""Notebooks run from the first cell to the last, on a tiny model here and on the demo model when slow."""

import json
import subprocess
import sys

import pytest

from experiments import record
from experiments.notebooks.run import code_cells, run

FOLDER = record.ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture
def small(monkeypatch, model, draft):
    monkeypatch.setenv("EAGLEJAX_NOTEBOOK_QUICK", "1")
    monkeypatch.setenv("EAGLEJAX_NOTEBOOK_TARGET", model)
    monkeypatch.setenv("EAGLEJAX_NOTEBOOK_DRAFT", draft)


def test_quickstart_runs(small, capsys):
    names = run(FOLDER / "quickstart.ipynb")
    out = capsys.readouterr().out
    assert len(names["answers"]) == 3
    assert names["plain"].token_ids == names["drafted"].token_ids == names["looked_up"].token_ids
    assert names["plain"].text in out


def test_train_a_draft_runs_and_its_draft_decodes(small, capsys):
    names = run(FOLDER / "train_a_draft.ipynb")
    assert (names["result"].updates, names["result"].interrupted) == (2, False)
    assert names["drafted"].stats.num_drafts > 0
    assert names["plain"].token_ids == names["drafted"].token_ids
    assert "update 2: held-out tau" in capsys.readouterr().out


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_hold_no_outputs(path):
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


def test_a_failing_cell_is_named_and_other_files_are_refused(tmp_path):
    path = tmp_path / "n.ipynb"
    cells = [{"cell_type": "code", "source": ["x = 1\n", "y = 2"]}, {"cell_type": "code", "source": "x / 0"}]
    path.write_text(json.dumps({"nbformat": 4, "cells": cells}))
    assert code_cells(path)[0] == "x = 1\ny = 2"
    with pytest.raises(RuntimeError, match="code cell 2: division by zero"):
        run(path)
    path.write_text(json.dumps({"nbformat": 3, "worksheets": []}))
    with pytest.raises(ValueError, match="format 4"):
        run(path)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_run_in_full(path):
    command = [sys.executable, "-m", "experiments.notebooks.run", str(path)]
    done = subprocess.run(command, cwd=record.ROOT.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tau" in done.stdout
