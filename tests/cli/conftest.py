"""Fixtures for the console command."""

import json

import pytest
from tiny_draft import EAGLE1, EAGLE3, write_eagle
from tiny_model import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Folder of the tiny model."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def drafts(tmp_path_factory):
    """Folders of random EAGLE drafts for the tiny model, by method."""
    folder = tmp_path_factory.mktemp("drafts")
    return {
        "eagle1": write_eagle(folder / "one", EAGLE1),
        "eagle3": write_eagle(folder / "three", EAGLE3),
    }


@pytest.fixture
def rows_file(tmp_path):
    """Write rows (objects, or raw lines as str or bytes) to a prompt file and give its path."""

    def write(*rows, name="prompts.jsonl"):
        raw = [
            r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode() for r in rows
        ]
        path = tmp_path / name
        path.write_bytes(b"\n".join(raw) + b"\n")
        return path

    return write


@pytest.fixture(autouse=True)
def _notes_of_this_test(monkeypatch, tmp_path):
    """What was said of a draft in another test, or to the user, is said again."""
    monkeypatch.setattr("eaglejax.cli.show.cache_dir", lambda: tmp_path / "cache")
