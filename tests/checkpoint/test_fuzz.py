"""A fuzzer of what is read: a damaged file loads as the format's own library loads it, or is refused in
one line of at most 500 characters. Nothing else may happen.

``make test`` tries 120 cases of each format, ``make test-all`` two thousand (``FUZZ_CASES``: another
number). A failing case names its seed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import file_mutators as damage
import gguf
import gguf_export
import hf_export
import jax
import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
import transformers

from eaglejax.checkpoint.gguf.metadata import config_from_metadata
from eaglejax.checkpoint.gguf.reader import GGUFFile
from eaglejax.checkpoint.gguf.tokenizer import tokenizer_from_metadata
from eaglejax.checkpoint.hf import load_folder
from eaglejax.checkpoint.quantized.read import load_quantized
from eaglejax.checkpoint.quantized.summary import summary
from eaglejax.checkpoint.quantized.write import write_quantized
from eaglejax.checkpoint.safetensors_io import SafetensorsFile
from eaglejax.checkpoint.tokenizer import load_tokenizer
from eaglejax.checkpoint.torch_bin import TorchBinFile
from eaglejax.drafts.eagle.files.load import read_weights
from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.errors import EaglejaxError
from eaglejax.models.families import from_hf

sys.path[:0] = [str(Path(__file__).parent / part) for part in ("quant", "eagle")]
import eagle_files  # noqa: E402
import packed_targets  # noqa: E402

F32 = np.dtype("float32")
Load = Callable[[Path], Any]
Judge = Callable[[Path, Any, Any], None]


def same_bytes(got: np.ndarray, want: np.ndarray) -> bool:
    return got.shape == want.shape and got.tobytes() == want.tobytes()


def leaves(params: Any) -> dict[str, np.ndarray]:
    """Every array by its path, those inside packed weights too."""
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat}


def as_before(folder: Path, got: Any, want: Any) -> None:
    """What was damaged said what the weights are, not what they hold: they are as they were."""
    for path, value in leaves(got).items():
        assert path not in want or same_bytes(value, want[path]), f"{path} is another"


# One entry a format: make files in a folder, damage them, load, and judge what was loaded.


def make_safetensors(folder: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "a": torch.tensor(rng.normal(size=(3, 4)), dtype=torch.float32),
        "b": torch.tensor(rng.normal(size=(8,)), dtype=torch.bfloat16),
        "c.weight": torch.tensor(rng.integers(-9, 9, (2, 2, 3)), dtype=torch.int8),
        "d": torch.zeros(0, 3),
        "e": torch.tensor(1.5, dtype=torch.float64),
    }
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def load_safetensors(folder: Path) -> dict[str, np.ndarray]:
    file = SafetensorsFile([folder / "model.safetensors"])
    return {name: np.array(file.array(name)) for name in file.names()}


def as_safetensors(folder: Path, got: Any, want: Any) -> None:
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(got)
        for name, value in got.items():
            tensor = file.get_tensor(name)
            assert tuple(tensor.shape) == value.shape
            assert tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() == value.tobytes()


def make_torch(folder: Path) -> None:
    base = torch.arange(12.0)
    state = {
        "a": base.view(3, 4),
        "b": base[2:7],
        "c": torch.ones(2, 3, dtype=torch.bfloat16).T,
        "d": torch.zeros(0),
    }
    torch.save(state, folder / "pytorch_model.bin")


def load_torch(folder: Path) -> dict[str, np.ndarray]:
    file = TorchBinFile([folder / "pytorch_model.bin"])
    return {name: np.array(file.array(name)) for name in file.names()}


def as_torch(folder: Path, got: Any, want: Any) -> None:
    try:
        reference = torch.load(folder / "pytorch_model.bin", weights_only=True)
    except Exception:
        # Of the archive it asks for more than the tensors need: a version, checksums, one root folder.
        assert got.keys() <= want.keys()
        as_before(folder, got, want)
        return
    assert reference.keys() == got.keys()
    for name, tensor in reference.items():
        assert tuple(tensor.shape) == got[name].shape
        assert tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() == got[name].tobytes()


def make_gguf(folder: Path) -> None:
    gguf_export.write(folder / "m.gguf", "qwen2")


def load_gguf_parts(folder: Path) -> tuple[GGUFFile, Any, Any]:
    """All that a load does before weights are converted, and the rows of every tensor."""
    file = GGUFFile(folder / "m.gguf")
    tokenizer = tokenizer_from_metadata(file.metadata, file.path)
    return file, from_hf(config_from_metadata(file)), tokenizer.encode("hello world")


def as_gguf(folder: Path, got: Any, want: Any) -> None:
    file, config, _ = got
    reader = gguf.GGUFReader(folder / "m.gguf")
    assert {tensor.name for tensor in reader.tensors} == set(file.names())
    for tensor in reader.tensors:
        rows = int(np.prod(file.shape(tensor.name)[:-1], dtype=np.int64))
        assert file.raw(tensor.name, 0, rows).tobytes() == np.asarray(tensor.data).tobytes()
        assert tuple(reversed([int(n) for n in tensor.shape])) == file.shape(tensor.name)
    for key, value in file.metadata.items():
        assert repr(reader.fields[key].contents()) == repr(value), key
    assert config.num_layers == file.metadata[f"{file.metadata['general.architecture']}.block_count"]


def make_hf(folder: Path) -> None:
    model, _, _ = hf_export.build("qwen3")
    model.save_pretrained(folder, max_shard_size="20KB")


def load_hf(folder: Path) -> tuple[Any, dict[str, np.ndarray]]:
    config, params = load_folder(folder, F32)
    return config, leaves(params)


def as_transformers(folder: Path, got: Any, want: Any) -> None:
    """The configuration as transformers completes it, and the weights as they were."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    try:
        completed = transformers.AutoConfig.for_model(**raw).to_dict()
    except Exception:
        # It checks keys that nothing depends on (pad_token_id), too; all others have to be as they were.
        assert got[0] == want[0]
    else:
        assert got[0] == from_hf(completed)
    as_before(folder, got[1], want[1])


def make_tokenizer(folder: Path) -> None:
    gguf_export.write(folder / "m.gguf", "qwen2")
    file = GGUFFile(folder / "m.gguf")
    tokenizer_from_metadata(file.metadata, file.path).save(folder)
    (folder / "m.gguf").unlink()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "eos_token_id": [265], "bos_token_id": None})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 263, "temperature": 0.7}))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "pad_token": "x"})
    )
    (folder / "chat_template.jinja").write_text(gguf_export.TEMPLATE)


def load_tokens(folder: Path) -> Any:
    tokenizer = load_tokenizer(folder)
    return tokenizer.encode("hello world <|im_end|>", special=False), tokenizer.eos_ids, tokenizer.hash


def as_tokenizers(folder: Path, got: Any, want: Any) -> None:
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert library.encode("hello world <|im_end|>", add_special_tokens=False).ids == got[0]
    assert all(isinstance(i, int) and i >= 0 for i in got[1])


def make_quantised(form: str, scheme: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        target = packed_targets.make_target("llama", packed_targets.SCHEMES[scheme])
        write_quantized(target, folder / "out", form=form, config=packed_targets.raw_config("llama"))
        for path in (folder / "out").iterdir():
            path.rename(folder / path.name)
        (folder / "out").rmdir()

    return make


def load_packed_leaves(folder: Path) -> dict[str, np.ndarray]:
    summary(folder)
    return leaves(load_quantized(folder, F32).params)


def make_draft(folder: Path) -> None:
    tensors = eagle_files.rename(eagle_files.MADE.tensors, eagle_files.midlayer)
    eagle_files.save(folder, tensors | eagle_files.maps(eagle_files.MADE), eagle_files.FLAT, form="sharded")


def make_speculators(folder: Path) -> None:
    tensors = eagle_files.MADE.tensors | eagle_files.maps(eagle_files.MADE)
    eagle_files.save(folder, tensors, eagle_files.speculators_config())


def load_draft_leaves(folder: Path) -> dict[str, np.ndarray]:
    return leaves(read_weights(read_draft(folder), F32))


CONFIG, INDEX = ("config.json", damage.damage_json), ("*.index.json", damage.damage_json)
SETTINGS = (("*config.json", damage.damage_json), ("special_tokens_map.json", damage.damage_json))
OWN = ("config.json", damage.damage_part("eaglejax"))
FOREIGN = ("config.json", damage.damage_part("quantization_config"))
DESCRIBED = ("quant_model_description.json", damage.damage_json)

FORMATS: dict[str, tuple[Callable[[Path], None], damage.Mutator, Load, Judge]] = {
    "safetensors": (
        make_safetensors,
        damage.any_of(("model.safetensors", damage.damage_header)),
        load_safetensors,
        as_safetensors,
    ),
    "pytorch": (make_torch, damage.any_of(("*.bin", damage.damage_archive)), load_torch, as_torch),
    "gguf": (make_gguf, damage.any_of(("m.gguf", damage.damage_bytes)), load_gguf_parts, as_gguf),
    "gguf metadata": (make_gguf, damage.any_of(("m.gguf", damage.damage_gguf)), load_gguf_parts, as_gguf),
    "configuration": (make_hf, damage.any_of(CONFIG, CONFIG, INDEX), load_hf, as_transformers),
    "tokenizer": (
        make_tokenizer,
        damage.any_of(*SETTINGS, ("tokenizer.json", damage.damage_json), ("*.jinja", damage.damage_bytes)),
        load_tokens,
        as_tokenizers,
    ),
    "draft": (make_draft, damage.any_of(CONFIG, CONFIG, INDEX), load_draft_leaves, as_before),
    "speculators": (make_speculators, damage.any_of(CONFIG), load_draft_leaves, as_before),
    "modelslim": (
        make_quantised("modelslim", "w8a8-static"),
        damage.any_of(DESCRIBED, DESCRIBED, INDEX),
        load_packed_leaves,
        as_before,
    ),
    "compressed-tensors": (
        make_quantised("compressed-tensors", "w4a16-g16"),
        damage.any_of(FOREIGN, FOREIGN, INDEX),
        load_packed_leaves,
        as_before,
    ),
    "eaglejax": (
        make_quantised("eaglejax", "w4a8"),
        damage.any_of(OWN, OWN, INDEX),
        load_packed_leaves,
        as_before,
    ),
}


class Hang(BaseException):
    """A load that does not end."""


def verdict(folder: Path, load: Load, judge: Judge, want: Any) -> str:
    """ "loaded" or "refused"; anything else that happens is told in a text of its own."""
    try:
        got = load(folder)
    except EaglejaxError as error:
        text = str(error)
        return (
            "refused" if "\n" not in text and len(text) <= 500 else f"a message of {len(text)}: {text:.300}"
        )
    except Hang:
        return "hangs"
    except BaseException as error:
        return f"{type(error).__name__}: {error!s:.200}"
    try:
        judge(folder, got, want)
    except AssertionError as error:
        return f"loaded otherwise: {error!s:.300}"
    except Exception as error:
        return f"loaded, and the reference refuses: {type(error).__name__}: {error!s:.200}"
    return "loaded"


def fuzz(name: str, seeds: range) -> Counter[str]:
    """Verdicts of these cases; what failed is under the text of its failure, with the seeds."""
    make, mutate, load, judge = FORMATS[name]
    found: Counter[str] = Counter()

    def alarm(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, alarm)
    with tempfile.TemporaryDirectory(prefix="f") as top, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, folder = Path(top) / "whole", Path(top) / "m"
        whole.mkdir()
        make(whole)
        want = load(whole)
        try:
            for seed in seeds:
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(whole, folder)
                mutate(random.Random(f"{name} {seed}"), folder)
                signal.alarm(60)
                result = verdict(folder, load, judge, want)
                signal.alarm(0)
                found[result if result in ("loaded", "refused") else f"seed {seed}: {result}"] += 1
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
    return found


def check(name: str, cases: int) -> None:
    found = fuzz(name, range(cases))
    loaded, refused = found.pop("loaded", 0), found.pop("refused", 0)
    assert not found, f"{name}: {len(found)} of {cases} fail: " + "; ".join(sorted(found)[:5])
    assert loaded, f"{name}: nothing loads; the damage is too great to test anything"
    assert refused > cases // 10, f"{name}: {refused} of {cases} are refused; the damage is not found"


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_load_as_elsewhere_or_are_refused(name):
    check(name, 120)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_many_damaged_files(name):
    check(name, int(os.environ.get("FUZZ_CASES", "2000")))
