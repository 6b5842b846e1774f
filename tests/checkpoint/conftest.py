"""The tiny transformers models of the model tests are the checkpoints of these ones."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Every test converts and downloads into a folder of its own."""
    monkeypatch.setenv("EAGLEJAX_CACHE", str(tmp_path / "cache"))
