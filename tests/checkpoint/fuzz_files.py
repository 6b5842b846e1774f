"""How the fuzzer makes sound files of each format, reads them, and judges what was read beside the format's
own library."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_export
import hf_export
import jax
import numpy as np
import safetensors.torch
import tokenizers
import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError

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
from eaglejax.config import BadRow, read_prompts
from eaglejax.drafts.eagle.files.load import read_weights
from eaglejax.drafts.eagle.files.read import DraftFile
from eaglejax.drafts.registry import read_draft
from eaglejax.errors import RequestError
from eaglejax.models.families import from_hf

sys.path[:0] = [str(Path(__file__).parent / part) for part in ("quant", "eagle")]
import eagle_files  # noqa: E402
import packed_targets  # noqa: E402

F32 = np.dtype("float32")
Load = Callable[[Path], Any]
Judge = Callable[[Path, Any, Any], None]


def same_bytes(got: np.ndarray, want: np.ndarray) -> bool:
    return got.shape == want.shape and got.tobytes() == want.tobytes()


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Its elements in order, whatever strides a file gives dimensions of one element or none."""
    # Copied as truth values, bytes beyond 1 would become 1.
    raw = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    return torch.empty(raw.shape, dtype=raw.dtype).copy_(raw).flatten().view(torch.uint8).numpy().tobytes()


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
            assert tensor_bytes(tensor) == value.tobytes()


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
        assert tensor_bytes(tensor) == got[name].tobytes()


def make_gguf(folder: Path) -> None:
    gguf_export.write(folder / "m.gguf", "qwen2")


def load_gguf_parts(folder: Path) -> tuple[GGUFFile, Any, Any]:
    """All that a load does before weights are converted, and the rows of every tensor."""
    file = GGUFFile(folder / "m.gguf")
    tokenizer = tokenizer_from_metadata(file.metadata, file.path)
    return file, from_hf(config_from_metadata(file)), tokenizer.encode("hello world")


@functools.lru_cache(maxsize=4)
def _as_gguf_reads(header: bytes, size: int, folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """What the format's own reader says of a header: values by key, tensors by name. It is slow,
    and most damage is behind the header."""
    del header, size
    reader = gguf.GGUFReader(folder / "m.gguf")
    tensors = {
        t.name: (tuple(reversed([int(n) for n in t.shape])), int(t.data_offset), int(t.n_bytes))
        for t in reader.tensors
    }
    return {key: repr(field.contents()) for key, field in reader.fields.items()}, tensors


def as_gguf(folder: Path, got: Any, want: Any) -> None:
    file, config, _ = got
    data = (folder / "m.gguf").read_bytes()
    fields, tensors = _as_gguf_reads(data[: min(t.start for t in file.tensors.values())], len(data), folder)
    assert set(tensors) == set(file.names())
    for name, (shape, start, size) in tensors.items():
        rows = int(np.prod(file.shape(name)[:-1], dtype=np.int64))
        assert file.raw(name, 0, rows).tobytes() == data[start : start + size]
        assert shape == file.shape(name)
    for key, value in file.metadata.items():
        assert fields[key] == repr(value), key
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
    while True:
        try:
            completed = transformers.AutoConfig.for_model(**raw).to_dict()
        except StrictDataclassFieldValidationError as error:
            # It checks keys that nothing depends on (pad_token_id), too; others have to be as it has them.
            del raw[str(error).split("'")[1]]
        except Exception:
            assert got[0] == want[0]
            break
        else:
            assert got[0] == from_hf(completed)
            break
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


TEXT = "hello world <|im_end|>"


def load_tokens(folder: Path) -> Any:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(TEXT, special=False)
    assert tokenizer.vocab_size > max(ids, default=0)
    return ids, tokenizer.decode(ids), tokenizer.eos_ids, tokenizer.hash


def as_tokenizers(folder: Path, got: Any, want: Any) -> None:
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_truncation()
    ids = library.encode(TEXT, add_special_tokens=False).ids
    assert (ids, library.decode(ids, skip_special_tokens=False)) == got[:2]
    assert all(isinstance(i, int) and i >= 0 for i in got[2])


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


FULL = eagle_files.MADE.tensors | eagle_files.maps(eagle_files.MADE)


def make_draft(folder: Path) -> None:
    tensors = eagle_files.rename(eagle_files.MADE.tensors, eagle_files.midlayer)
    eagle_files.save(folder, tensors | eagle_files.maps(eagle_files.MADE), eagle_files.FLAT, form="sharded")


def make_pickled_draft(folder: Path) -> None:
    eagle_files.save(folder, FULL, eagle_files.FLAT, form="bin")


def make_first_draft(folder: Path) -> None:
    made = eagle_files.make(1)
    eagle_files.save(folder, made.tensors, eagle_files.FLAT1 | {"bias": True})


def make_speculators(folder: Path) -> None:
    eagle_files.save(folder, FULL, eagle_files.speculators_config())


def make_written(to: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        eagle_files.save(folder / "from", FULL, eagle_files.FLAT)
        eagle_files.convert(folder / "from", folder / "out", to)
        for path in (folder / "out").iterdir():
            path.rename(folder / path.name)
        for path in (folder / "from").iterdir():
            path.unlink()
        (folder / "from").rmdir()
        (folder / "out").rmdir()

    return make


def load_draft_leaves(folder: Path) -> dict[str, np.ndarray]:
    _, file = read_draft(folder)
    # Taken for a whole model, it has to be refused as one.
    return leaves(read_weights(file, F32) if isinstance(file, DraftFile) else load_folder(folder, F32)[1])


ROWS = (
    {"id": "a", "prompt": "hello", "stop_token_ids": [3]},
    {"messages": [{"role": "user", "content": "hello world"}], "predictions": "x"},
    {"turns": ["hello", "world"], "tools": [], "chat_template_kwargs": {}},
    {"id": 7, "conversations": [{"from": "human", "value": "<|im_end|>"}, {"from": "gpt", "value": "world"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "tools": [{"name": "f"}]},
)


@functools.cache
def _rows_tokenizer() -> Any:
    """A tokenizer whose template reads tools, of a folder that is not kept."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(Path(folder))
        made = load_tokenizer(Path(folder))
    return dataclasses.replace(made, chat_template="{{ tools or '' }}" + gguf_export.TEMPLATE)


def make_rows(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def load_rows(folder: Path) -> list[tuple[int | str, Any]]:
    """(id, ids or the error) of every row."""
    found = []
    tokenizer = _rows_tokenizer()
    for row in read_prompts(folder / "rows.jsonl", prediction_field=None):
        try:
            if isinstance(row, BadRow):
                raise RequestError(row.error)
            request = row.request([], chat=True)
            found.append((row.id, tokenizer.encode_conversation(request, split_special_tokens=True)))
        except RequestError as error:
            found.append((row.id, str(error)))
    assert all(text.isprintable() and len(text) <= 500 for _, text in found if isinstance(text, str))
    return found


def as_rows(folder: Path, got: Any, want: Any) -> None:
    """Lines that were left alone give what they gave, whatever the damaged one does."""
    lines = [line for line in (folder / "rows.jsonl").read_bytes().split(b"\n") if line.strip()]
    assert len(lines) == len(got)
    sound = {json.dumps(row).encode(): found[1] for row, found in zip(ROWS, want, strict=True)}
    for line, (_, found) in zip(lines, got, strict=True):
        assert line not in sound or found == sound[line]
