"""Notebooks run from the first cell to the last, on a tiny model here and on the demo model when slow."""

import json
import subprocess
import sys

import pytest

from experiments import record
from experiments.notebooks.run import code_cells, digest, read, run

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
def test_notebooks_hold_the_outputs_of_one_whole_run_or_none(path):
    notebook = read(path)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    cells = code_cells(notebook)
    ran = any(cell["outputs"] for cell in cells)
    assert [cell["execution_count"] for cell in cells] == [
        n if ran else None for n in range(1, len(cells) + 1)
    ]
    for cell in cells:
        kinds = [(out["output_type"], out["name"]) for out in cell["outputs"]]
        assert kinds == [("stream", "stdout")] * (ran and "print(" in "".join(cell["source"]))
    # After a change of a cell: python -m experiments.notebooks.run FILE --store
    assert not ran or notebook["metadata"]["outputs_of"] == digest(notebook)


def test_what_cells_print_is_stored(tmp_path, capsys):
    path = tmp_path / "n.ipynb"
    cells = [
        {"cell_type": "markdown", "source": "# words"},
        {"cell_type": "code", "source": ["x = 1\n", "print(x)"], "outputs": ["old"], "execution_count": 7},
        {"cell_type": "code", "source": "x += 1", "outputs": ["old"], "execution_count": None},
    ]
    path.write_text(json.dumps({"nbformat": 4, "cells": cells}))
    assert run(path, store=True)["x"] == 2
    assert capsys.readouterr().out == "1\n"
    first, second = code_cells(read(path))
    assert first["outputs"] == [{"name": "stdout", "output_type": "stream", "text": ["1\n"]}]
    assert (second["outputs"], first["execution_count"], second["execution_count"]) == ([], 1, 2)
    stored = read(path)
    assert stored["metadata"]["outputs_of"] == digest(stored)
    second["source"] = "x += 2"
    assert digest({**stored, "cells": [first, second]}) != digest(stored)


def test_a_failing_cell_is_named_and_other_files_are_refused(tmp_path):
    path = tmp_path / "n.ipynb"
    cells = [{"cell_type": "code", "source": ["x = 1\n", "y = 2"]}, {"cell_type": "code", "source": "x / 0"}]
    path.write_text(json.dumps({"nbformat": 4, "cells": cells}))
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="code cell 2: division by zero"):
        run(path, store=True)
    assert path.read_bytes() == before
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
