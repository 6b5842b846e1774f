"""Weights are the files that a producer names; whatever else lies beside them is said, never read."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import safetensors.numpy
from eagle_files import FLAT, MADE, draft, maps, midlayer, rename, save

from eaglejax.checkpoint.hf import open_weights
from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.drafts.places import draft_path
from eaglejax.errors import CheckpointError

TENSORS = rename(MADE.tensors, midlayer) | maps(MADE)


def stray(folder, name="old-epoch-1.safetensors"):
    safetensors.numpy.save_file({n: np.zeros_like(v) for n, v in TENSORS.items()}, folder / name)
    return folder


@pytest.mark.parametrize("form", ["bin", "safetensors", "sharded"])
@pytest.mark.parametrize("name", ["old-epoch-1.safetensors", "adapter_model.safetensors"])
def test_a_stray_file_replaces_nothing_and_is_said(form, name, tmp_path):
    folder = stray(save(tmp_path / "it", TENSORS, FLAT, form=form), name)
    with pytest.warns(UserWarning, match=f"{name} is not read; the weights are (model|pytorch_model)"):
        store = read_draft(folder).store
    np.testing.assert_array_equal(store.array("fc.weight"), MADE.tensors["fc.weight"])


def test_weights_without_a_stray_say_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_draft(save(tmp_path / "1", TENSORS, FLAT))
        read_draft(save(tmp_path / "2", TENSORS, FLAT, form="bin"))
        (save(tmp_path / "3", TENSORS, FLAT) / "model.safetensors").rename(
            tmp_path / "3/model-00001-of-00001.safetensors"
        )
        read_draft(tmp_path / "3")


def test_a_stray_alone_is_no_weights(tmp_path):
    folder = stray(draft(tmp_path))
    (folder / "model.safetensors").unlink()
    for reader in (read_draft, open_weights):
        with pytest.raises(CheckpointError, match=r"old-epoch-1\.safetensors.* is no name"):
            reader(folder)


def test_a_hub_draft_without_safetensors_comes_in_one_pickle_or_in_shards(tmp_path, monkeypatch):
    """The stray safetensors of a repository is no reason to leave its pickles behind."""
    import huggingface_hub

    folder = stray(save(tmp_path / "hub", TENSORS, FLAT))
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(folder))
    there = {"pytorch_model.bin"}
    asked = []

    def fetch(repo, name, revision=None):
        asked.append((repo, name, revision))
        if name not in there:
            raise OSError(name)
        return str(folder / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    assert draft_path("some/draft@v2") == folder
    assert asked == [("some/draft", "pytorch_model.bin", "v2")]
    shards = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    index = {"weight_map": dict(zip("ab", shards, strict=True))}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    there = {*shards, "pytorch_model.bin.index.json"}
    asked.clear()
    draft_path("some/draft")
    assert [name for _, name, _ in asked[1:]] == ["pytorch_model.bin.index.json", *shards]
    there = set()
    with pytest.raises(CheckpointError, match="cannot be fetched"):
        draft_path("some/draft")
