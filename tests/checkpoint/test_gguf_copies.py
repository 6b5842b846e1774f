"""What a GGUF file was turned into is kept beside the cache, and read instead of the file."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
from pathlib import Path

import gguf_export
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_export import assert_trees

from eaglejax.checkpoint.files import cache_dir
from eaglejax.checkpoint.gguf import load as gguf_models
from eaglejax.checkpoint.gguf.load import load_gguf
from eaglejax.errors import CheckpointError


def test_two_that_convert_one_file_at_once_both_load(tmp_path):
    path = tmp_path / "m.gguf"
    *_, want = gguf_export.write(path, "qwen2")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: load_gguf(path, jnp.float32)[1], range(4)))
    for params in loaded:
        assert_trees(params, want, np.testing.assert_array_equal)


READER = """
import sys
import jax.numpy as jnp
import numpy as np
from pathlib import Path
from eaglejax.checkpoint.gguf.load import load_gguf
print("ready", flush=True)
sys.stdin.readline()
_, params, tokenizer = load_gguf(Path(sys.argv[1]), jnp.float32)
print(np.asarray(params["embed"]).tobytes().hex()[:64], tokenizer.vocab_size)
"""


def test_two_processes_that_convert_one_file_at_once_both_load(tmp_path):
    path = tmp_path / "m.gguf"
    *_, want = gguf_export.write(path, "qwen2")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    children = [
        subprocess.Popen([sys.executable, "-c", READER, str(path)], text=True, **pipes) for _ in range(3)
    ]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    told = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], told
    lines = {out for out, _ in told}
    assert len(lines) == 1
    assert lines.pop().startswith(np.asarray(want["embed"]).tobytes().hex()[:64])
    (folder,) = (cache_dir() / "converted").iterdir()
    assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]


class TestConvertedCopy:
    def test_a_second_load_reads_the_copy_and_not_the_file(self, tmp_path, monkeypatch):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen3")
        first = load_gguf(path, jnp.bfloat16)
        monkeypatch.setattr(gguf_models, "GGUFFile", None)
        config, params, tokenizer = load_gguf(path, jnp.bfloat16)
        assert config == first[0]
        assert_trees(params, first[1], np.testing.assert_array_equal)
        assert tokenizer.hash == first[2].hash
        assert tokenizer.eos_ids == first[2].eos_ids
        assert tokenizer.chat_template == first[2].chat_template

    def test_weights_are_used_where_they_lie(self, tmp_path):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        for _ in range(2):
            _, params, _ = load_gguf(path, jnp.float32)
        assert params["embed"].unsafe_buffer_pointer() % 64 == 0
        maps = Path("/proc/self/maps")
        if not maps.exists():
            pytest.skip("no /proc to look the mapping up in")
        lines = maps.read_text().splitlines()
        spans = [line.split()[0].split("-") for line in lines if "float32.safetensors" in line]
        address = params["embed"].unsafe_buffer_pointer()
        assert any(int(a, 16) <= address < int(b, 16) for a, b in spans)

    def test_another_dtype_is_another_copy_of_one_description(self, tmp_path):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        for dtype in (jnp.float32, jnp.bfloat16):
            _, params, _ = load_gguf(path, dtype)
            assert params["embed"].dtype == dtype
        (folder,) = (cache_dir() / "converted").iterdir()
        assert {p.name for p in folder.glob("*.safetensors")} == {
            "float32.safetensors",
            "bfloat16.safetensors",
        }

    def test_an_edited_file_is_converted_anew(self, tmp_path):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        before = load_gguf(path, jnp.float32)[1]["norm"]

        def change(writer, tensors):
            tensors["output_norm.weight"] = (tensors["output_norm.weight"][0] * 2, Kind.F32)

        gguf_export.write(path, "qwen2", edit=change)
        np.testing.assert_array_equal(load_gguf(path, jnp.float32)[1]["norm"], before * 2)

    def test_an_interrupted_conversion_leaves_nothing_behind(self, tmp_path, monkeypatch):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        calls = []

        def breaks(assignment, store):
            calls.append(assignment)
            if len(calls) == 5:
                raise KeyboardInterrupt
            return real(assignment, store)

        real = gguf_models.materialize
        monkeypatch.setattr(gguf_models, "materialize", breaks)
        with pytest.raises(KeyboardInterrupt):
            load_gguf(path, jnp.float32)
        (folder,) = (cache_dir() / "converted").iterdir()
        assert sorted(p.name for p in folder.iterdir()) == [
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
        monkeypatch.setattr(gguf_models, "materialize", real)
        load_gguf(path, jnp.float32)

    def test_a_cache_that_cannot_be_written_is_named(self, tmp_path, monkeypatch):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        (tmp_path / "blocked").write_text("")
        monkeypatch.setenv("EAGLEJAX_CACHE", str(tmp_path / "blocked"))
        with pytest.raises(CheckpointError, match="set EAGLEJAX_CACHE"):
            load_gguf(path, jnp.float32)

    def test_a_damaged_copy_says_what_to_delete(self, tmp_path):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        load_gguf(path, jnp.float32)
        (weights,) = cache_dir().glob("converted/*/float32.safetensors")
        weights.write_bytes(weights.read_bytes()[:-100])
        with pytest.raises(CheckpointError, match=r"float32\.safetensors is truncated"):
            load_gguf(path, jnp.float32)
