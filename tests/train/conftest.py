"""A tiny target and tiny data for all training tests."""

import json

import numpy as np
import pytest
from run_settings import settings_for
from train_tools import tiny_folder

from eaglejax.checkpoint.target import load_target
from eaglejax.train.prepare import prepare_data, prepare_draft


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="session")
def target(folder):
    return load_target(folder, dtype="float32")


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory):
    """Forty pretokenised rows of a text with structure, so that there is something to learn."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for n in range(40):
            start, size = int(rng.integers(20, 60)), int(rng.integers(6, 20))
            answer = [start + (i * 3) % 17 for i in range(size)] + [262]
            prompt = rng.integers(10, 90, int(rng.integers(3, 9))).tolist()
            file.write(json.dumps({"id": n, "prompt_ids": prompt, "completion_ids": answer}) + "\n")
    return path


@pytest.fixture(scope="session")
def prepared(folder, target, rows_file, tmp_path_factory):
    """(settings, data, draft) of a run that has not begun."""
    settings = settings_for(folder, rows_file, tmp_path_factory.mktemp("whole") / "run")
    data = prepare_data(settings.data, target)
    return settings, data, prepare_draft(settings, target, data)
