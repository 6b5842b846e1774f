"""A recording stands on its own: what is in it, how a host without jax replays it, what damage is refused."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from parity_tools import PROMPTS, ROUNDS, TOKENS, recorded

import eaglejax as ej
from eaglejax.drafts.tree import DynamicTree
from eaglejax.errors import CheckpointError, ConfigError, EaglejaxError
from eaglejax.interop.backends.torch_cpu import TorchCPU
from eaglejax.interop.convert.export import export_draft, export_target
from eaglejax.interop.parity.blob import Blob, write_blob
from eaglejax.interop.parity.bundle import Bundle, StageWriter, write_manifest
from eaglejax.interop.parity.compare import Recorded
from eaglejax.interop.parity.replay import open_bundle, replay

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from file_mutators import change_json

WITHOUT_JAX = """
import runpy, sys
for module in ("jax", "jaxlib", "flax", "ml_dtypes", "safetensors", "kernels_pallas"):
    sys.modules[module] = None  # importing it raises ImportError
sys.argv = [sys.argv[1], *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def recording():
    return recorded()


@pytest.fixture
def bundle(recording, tmp_path):
    """A copy with its weights inside, which a test may damage."""
    folder = tmp_path / "bundle"
    shutil.copytree(recording.path, folder)
    shutil.copy(recording.weights, folder / "weights.bin")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["weights"]["embedded"] = True
    write_manifest(folder, manifest)
    return folder


def test_the_recorded_tokens_are_those_of_generate(recording):
    target = ej.load_target(recording.folder / "target", dtype="float32")
    draft = ej.load_draft(recording.folder / "draft", target, tree=DynamicTree(3, 2, 6))
    bundle = recording.open()
    answers = ej.generate(target, list(PROMPTS), proposer=draft, max_new_tokens=TOKENS, batch_size=1)
    for number, (prompt, answer) in enumerate(zip(bundle.prompts, answers, strict=True)):
        stages = list(bundle.stages(number))
        counts = [int(stage.value("verify", "count")) for stage in stages]
        tokens = [
            t for s, n in zip(stages, counts, strict=True) for t in s.value("verify", "tokens")[:n].tolist()
        ]
        assert tokens == answer.token_ids
        assert prompt.name == f"p{number}"
        assert [s.ended for s in stages] == [False] * (len(stages) - 1) + [True]


def test_first_rounds_are_whole_and_later_ones_trimmed(recording):
    bundle = recording.open()
    chunk, whole, *rest = bundle.stages(0)
    later = rest[ROUNDS - 1]
    assert chunk.everything() is not None
    assert "round/0/draft/step/2/layers/0/attention" in whole.everything()
    assert whole.tensors["round/0/target/logits"].top is None
    # Before a round the caches hold the prompt and what was emitted, but for the root.
    for model in ("target", "draft"):
        assert whole.committed().keys[model][-1].shape == (1, 2, len(PROMPTS[0]), 8)
    assert later.everything() is None
    logits = later.tensors[f"round/{ROUNDS}/target/logits"]
    assert logits.shape == (1, 6, 264)
    assert logits.values.shape == logits.top.shape == (1, 6, 64)
    assert (np.diff(logits.values, axis=-1) <= 0).all()


@pytest.mark.parametrize(
    ("budget", "rounds", "first", "later"),
    [(300_000, 0, "all", "coarse"), (12_000, ROUNDS, "choices", "choices")],
)
def test_what_does_not_fit_is_recorded_in_less_detail(recording, bundle, budget, rounds, first, later):
    """And is still compared by its trees, paths and tokens."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    stages = list(recording.open().stages(0))
    with write_blob(bundle / "records.bin") as blob:
        writer = StageWriter(blob, budget=budget, rounds=rounds)
        entries = [writer.add(0, stage) for stage in stages]
    assert [entry["level"] for entry in entries] == [first] + [later] * (len(stages) - 1)
    manifest["prompts"] = [{**manifest["prompts"][0], "stages": entries}]
    write_manifest(bundle, {**manifest, "records": blob.describe()})
    report = replay(Bundle(bundle), TorchCPU())
    assert report["agrees"]
    assert report["prompts"][0]["identical"]
    assert bool(report["operations"]) == (first == "all")


def run_script(folder, *argv, weights=None):
    """Run the bundle's own script where neither jax nor this checkout can be imported."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    more = [] if weights is None else ["--weights", str(weights)]
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX, str(folder / "replay.py"), *argv, *more],
        capture_output=True,
        text=True,
        cwd=folder,
        env=env,
        check=False,
    )


def test_a_host_without_jax_replays_it(recording):
    done = run_script(recording.path, "--backend", "torch-cpu", "--json", weights=recording.weights)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["agrees"]
    assert [p["identical"] for p in report["prompts"]] == [True, True]
    assert report["jax_side"]["versions"]["jax"]
    assert "jax" not in report["torch_side"]


def test_the_script_says_what_is_damaged(bundle):
    (bundle / "records.bin").write_bytes((bundle / "records.bin").read_bytes()[:-1])
    done = run_script(bundle, "--backend", "torch-cpu")
    assert done.returncode == 2
    assert "records.bin is truncated" in done.stderr
    assert "Traceback" not in done.stderr


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name",
    ["records.bin", "weights.bin", "manifest.json", "replay.py", "code/eaglejax/tap.py"],
)
def test_what_was_changed_is_refused_by_name(bundle, name):
    flip(bundle / name, at=40)
    with pytest.raises(CheckpointError, match=f"{name} was changed"):
        Bundle(bundle)


@pytest.mark.parametrize("name", ["records.bin", "weights.bin", "code/eaglejax/interop/parity/names.py"])
def test_what_was_cut_off_or_went_missing_is_refused_by_name(bundle, name):
    path = bundle / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        CheckpointError, match=f"{name} is truncated: it has {len(whole) // 2} of {len(whole)}"
    ):
        Bundle(bundle)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match=f"{name} has {len(whole) + 1} bytes"):
        Bundle(bundle)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        Bundle(bundle)


def test_another_format_is_refused(bundle, tmp_path):
    manifest = json.loads((bundle / "manifest.json").read_text())
    write_manifest(bundle, {**manifest, "version": 2})
    with pytest.raises(
        CheckpointError, match=r"'eaglejax-parity-bundle' version 2; this replays .* version 1"
    ):
        Bundle(bundle)
    (bundle / "manifest.sha256").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.sha256 is missing"):
        Bundle(bundle)
    with pytest.raises(CheckpointError, match=r"nowhere is missing"), open_bundle(tmp_path / "nowhere"):
        pass


def test_weights_elsewhere_are_told_by_their_hash(recording, tmp_path):
    folder = recording.path
    digest = hashlib.sha256(recording.weights.read_bytes()).hexdigest()
    assert not (folder / "weights.bin").exists()
    with pytest.raises(ConfigError, match=f"SHA-256 {digest} with --weights"):
        Bundle(folder)
    other = tmp_path / "other.bin"
    shutil.copy(recording.weights, other)
    flip(other)
    with pytest.raises(CheckpointError, match=r"other\.bin was changed"):
        Bundle(folder, weights=other)


def test_a_zip_is_the_folder(bundle, tmp_path):
    path = tmp_path / "bundle.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in bundle.rglob("*"):
            archive.write(file, file.relative_to(bundle))
    with open_bundle(path) as opened:
        assert [p.name for p in opened.prompts] == ["p0", "p1"]
    path.write_bytes(path.read_bytes()[:-100])
    with (
        pytest.raises(CheckpointError, match=r"bundle\.zip is no \.zip, or a damaged one"),
        open_bundle(path),
    ):
        pass


def test_an_encrypted_or_swollen_zip(bundle, tmp_path, monkeypatch):
    path = tmp_path / "bundle.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(bundle / "manifest.json", "manifest.json")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10))
    with pytest.raises(CheckpointError, match="and 10 are free"), open_bundle(path):
        pass
    monkeypatch.undo()
    data = bytearray(path.read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.find(mark) + place] |= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"or a damaged one: .*encrypted"), open_bundle(path):
        pass


def test_a_manifest_that_tells_no_truth(bundle):
    """Whoever wrote it hashed it, too: every entry of another type, or none, is refused in a line."""
    whole = json.loads((bundle / "manifest.json").read_text())
    rng = random.Random(0)
    refused = []
    for _ in range(80):
        changed = json.dumps(change_json(rng, whole)).encode()
        (bundle / "manifest.json").write_bytes(changed)
        (bundle / "manifest.sha256").write_text(hashlib.sha256(changed).hexdigest())
        try:
            opened = Bundle(bundle)
            opened.models()
            _ = opened.dtype, opened.eos_ids
            for number in range(len(opened.prompts)):
                list(opened.stages(number))
        except EaglejaxError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert all(text.isprintable() and len(text) <= 500 for text in refused)


def test_weights_come_back_bit_for_bit(recording):
    """A tensor that target and draft share is stored once."""
    target = ej.load_target(recording.folder / "target", dtype="float32")
    draft = ej.load_draft(recording.folder / "draft", target, tree=DynamicTree(3, 2, 6))
    bundle = recording.open()
    sides, read = (export_target(target), export_draft(draft)), bundle.models()
    assert read[0].spec == sides[0].spec
    assert (read[1].spec, read[1].tree) == (sides[1].spec, sides[1].tree)
    torch.testing.assert_close(read[0].params, sides[0].params, rtol=0, atol=0)
    torch.testing.assert_close(read[1].draft.weights, sides[1].draft.weights, rtol=0, atol=0)
    torch.testing.assert_close(read[1].draft.ids, sides[1].draft.ids, rtol=0, atol=0)


def test_arrays_of_every_dtype_cross(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "float": rng.normal(size=(2, 3)).astype(np.float32),
        "bfloat": rng.normal(size=(3, 5)).astype(ml_dtypes.bfloat16),
        "half": rng.normal(size=7).astype(np.float16),
        "int": np.arange(5, dtype=np.int32),
        "truth": np.array([[True, False]]),
        "byte": np.arange(-3, 3, dtype=np.int8),
        "one": np.float32(3).reshape(()),
        "none": np.zeros((0, 4), np.float32),
    }
    with write_blob(tmp_path / "x.bin") as writer:
        for name, array in arrays.items():
            writer.add_array(name, array)
    blob = Blob(tmp_path / "x.bin", writer.describe())
    assert blob.names() == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(
            blob.array(name), array.astype(np.float32) if name == "bfloat" else array
        )
        tensor = blob.tensor(name)
        assert str(tensor.dtype) == f"torch.{array.dtype.name}"
        assert tuple(tensor.shape) == array.shape
        np.testing.assert_array_equal(tensor.float().numpy(), array.astype(np.float32))
    with pytest.raises(CheckpointError, match="holds no other"):
        blob.array("other")
    longer = {**writer.describe(), "index": {"float": {"dtype": "float32", "shape": [999], "offset": 0}}}
    with pytest.raises(CheckpointError, match=r"x\.bin is damaged: its index says that float goes past"):
        Blob(tmp_path / "x.bin", longer)
    assert list(tmp_path.iterdir()) == [tmp_path / "x.bin"]


def test_trimmed_logits_keep_the_largest_in_order():
    values = np.array([[[0.5, 3.0, 3.0, -1.0, 2.0]]], np.float32)
    kept = Recorded.of(values).trimmed(3)
    assert kept.top.tolist() == [[[1, 2, 4]]]
    assert kept.values.tolist() == [[[3.0, 3.0, 2.0]]]
    assert kept.shape == values.shape
    assert Recorded.of(values).trimmed(5).top is None
