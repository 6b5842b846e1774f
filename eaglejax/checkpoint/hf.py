"""Hugging Face folders: configuration and safetensors, one file or sharded."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from eaglejax.checkpoint import scaled
from eaglejax.checkpoint.files import progress, read_json, say_strays, shards_without_index, weight_files
from eaglejax.checkpoint.names import ignorable_of, rules_of
from eaglejax.checkpoint.safetensors_io import SafetensorsFile
from eaglejax.checkpoint.tables import TensorStore, check_layers, materialize, placement, plan
from eaglejax.errors import CheckpointError
from eaglejax.models.config import ModelConfig
from eaglejax.models.decoder import param_table
from eaglejax.models.families import from_hf
from eaglejax.pytree import unflatten
from eaglejax.quant.schemes import QuantizedForm

_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_HEADS = ("language_model.lm_head.", "lm_head.")


PLAIN_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Dtypes whose values are the weights themselves; narrower ones come with scales, in quantised formats."""


class NormalizedStore:
    """A safetensors store whose names are those of ``*ForCausalLM``, whatever wrapper the checkpoint was
    saved from.

    Known schemes: ``model.x``, ``x`` alone (the bare decoder), ``language_model.model.x`` and
    ``model.language_model.x`` (inside a multimodal model). Raises ``CheckpointError`` when two tensors get
    one name.
    """

    def __init__(self, files: SafetensorsFile, where: str) -> None:
        self._files = files
        self._stored: dict[str, str] = {}
        for name in files.names():
            plain = plain_name(name)
            if plain in self._stored:
                raise CheckpointError(f"{where} holds {plain} twice: as {self._stored[plain]!r} and {name!r}")
            self._stored[plain] = name

    def names(self) -> Any:
        return self._stored.keys()

    def spelt(self, name: str) -> str:
        """The name that the files have for a tensor; ``name`` where they have none."""
        return self._stored.get(name, name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.shape(self._stored[name])

    def dtype(self, name: str) -> np.dtype:
        return self._files.dtype(self._stored[name])

    def array(self, name: str) -> np.ndarray:
        return self._files.array(self._stored[name])

    def check_dtypes(self, names: Iterable[str]) -> None:
        """Refuse tensors that hold no plain floating-point weights."""
        for name in names:
            dtype = self._files.dtype(self._stored[name])
            if dtype.name not in PLAIN_DTYPES:
                where = self._files.where(self._stored[name])
                raise CheckpointError(
                    f"{where}: tensor {name!r} is {dtype.name}; weights are read as {', '.join(PLAIN_DTYPES)}"
                )

    def rows(self, name: str, start: int, stop: int) -> Any:
        return self._files.rows(self._stored[name], start, stop)


def plain_name(name: str) -> str:
    """A tensor's name as ``*ForCausalLM`` has it."""
    for prefix in _HEADS:
        if name.startswith(prefix):
            return "lm_head." + name.removeprefix(prefix)
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return "model." + name if name.startswith(("layers.", "embed_tokens.", "norm.", "rotary_emb.")) else name


STEM = "model"
"""What the names of weight files begin with."""


def index_name(stem: str) -> str:
    """Name of the index of shards."""
    return f"{stem}.safetensors.index.json"


INDEX = index_name(STEM)


def open_weights(folder: Path, stem: str = STEM) -> SafetensorsFile:
    """The weights of a folder: those its index names, else its one safetensors file of that name.

    ``stem``: what their names begin with. Raises ``CheckpointError`` naming what is missing: a shard, a
    tensor that the index promises, or all weights.
    """
    index, single = index_name(stem), f"{stem}.safetensors"
    paths, places = weight_files(folder, stem, ".safetensors")
    if paths:
        files = SafetensorsFile(paths)
        present = set(files.names())
        for name, shard in places.items():
            if name not in present:
                raise CheckpointError(f"{folder / shard} lacks tensor {name!r}, which {index} places there")
            if files.where(name).name != shard:
                raise CheckpointError(
                    f"{index} places {name!r} in {shard}, but it is in {files.where(name).name}"
                )
        say_strays(folder, paths)
        return files
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if len(found) == 1 and (parts := shards_without_index(found)):
        raise CheckpointError(f"{folder} has no {index}{parts}")
    if len(found) == 1:
        raise CheckpointError(
            f"{folder} holds {found[0]}, which is no name of a model's weights; if it holds them, name it "
            f"{single}"
        )
    if found:
        raise CheckpointError(
            f"{folder} holds {len(found)} safetensors files but no {index}, which says which belong together"
        )
    other = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
    hint = f"; it holds {', '.join(other[:3])}, convert them or name a .gguf file itself" if other else ""
    raise CheckpointError(f"{folder} holds no safetensors weights ({single} or {index}){hint}")


DESCRIPTION = "quant_model_description.json"
"""The file that marks the modelslim layout."""


def description_path(folder: Path) -> Path | None:
    """The description of a modelslim folder, None where there is none.

    The tool has called it otherwise (``quant_model_description_w8a8.json``): any one file of the kind is
    taken. Raises ``CheckpointError`` where several could be meant.
    """
    if (folder / DESCRIPTION).is_file():
        return folder / DESCRIPTION
    found = sorted(folder.glob("quant*description*.json"))
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} holds {', '.join(path.name for path in found[:4])}; call the description of its "
            f"weights {DESCRIPTION}"
        )
    return found[0] if found else None


MARKER = "eaglejax"
"""Key of config.json that marks our own layout."""


def quantization_settings(config: Mapping[str, Any]) -> Any:
    """What a config.json says of how its weights are quantised, None where it says nothing: at the top, of
    the language model of a multimodal one, or under the key of older compressed-tensors."""
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    places = (config, "quantization_config"), (inner, "quantization_config"), (config, "compression_config")
    return next((place[key] for place, key in places if place.get(key)), None)


_INSTEAD = (
    "use the unquantised checkpoint, a GGUF, a folder in the form of modelslim or compressed-tensors, or "
    f"narrow floats ({', '.join(scaled.FORMS)})"
)
_BESIDE = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Where modelopt, AutoGPTQ and AutoAWQ describe their weights, apart from config.json."""
_QUANTISED = re.compile(r"\.(weight_packed|weight_scale(_inv)?|qweight|qzeros|SCB|absmax)$")


def quantized_form(folder: Path) -> QuantizedForm | None:
    """The layout of a folder's quantised weights, None for plain ones.

    Raises ``CheckpointError`` for a layout that is not read.
    """
    config = read_json(folder / "config.json")
    given = quantization_settings(config)
    if MARKER in config:
        return "eaglejax"
    if description_path(folder) is not None:
        return "modelslim"
    if not given:
        for name in _BESIDE:
            if (folder / name).is_file():
                raise CheckpointError(
                    f"{folder} holds weights quantised as {name} describes, which are not read; {_INSTEAD}"
                )
        return None
    method = given.get("quant_method", "unknown") if isinstance(given, Mapping) else given
    if method == "compressed-tensors":
        return "compressed-tensors"
    if method in scaled.FORMS:
        return None
    raise CheckpointError(f"{folder} holds weights quantised by {method!r}, which are not read; {_INSTEAD}")


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a folder. Raises ``CheckpointError`` when it is missing, damaged or of weights in a
    quantised layout that is not read."""
    quantized_form(folder)
    return read_json(folder / "config.json")


def settle_tying(config: ModelConfig, store: TensorStore, where: str) -> tuple[ModelConfig, tuple[str, ...]]:
    """The config with ``tie_embeddings`` as the weights have it, and what has thereby become ignorable.

    Untied without a head is refused: nothing else can stand in. Tied with a head in the file: the head is
    ignored when it is the embedding; when it differs the config's claim is untrue, the head is used and a
    warning says so.
    """
    if "lm_head.weight" not in store.names():
        if not config.tie_embeddings:
            raise CheckpointError(
                f"{where} lacks lm_head.weight although its config does not tie the head to the embedding; "
                "add the "
                "tensor, or set tie_word_embeddings to true if the head is the embedding"
            )
        return config, ()
    if not config.tie_embeddings:
        return config, ()
    if _same(store, "lm_head.weight", "model.embed_tokens.weight"):
        return config, ("lm_head[.]weight",)
    warnings.warn(
        f"{where}: config.json ties the head to the embedding, but lm_head.weight differs from it; "
        "lm_head.weight is used",
        stacklevel=2,
    )
    return dataclasses.replace(config, tie_embeddings=False), ()


def _same(store: TensorStore, a: str, b: str, step: int = 4096) -> bool:
    """Whether two matrices of a file hold the same values (NaN equals nothing)."""
    if b not in store.names() or store.shape(a) != store.shape(b):
        return False
    rows = store.shape(a)[0]
    return all(
        np.array_equal(store.rows(a, i, min(i + step, rows)), store.rows(b, i, min(i + step, rows)))
        for i in range(0, rows, step)
    )


def load_folder(
    folder: Path, dtype: Any, *, context: int | None = None, mesh: Mesh | None = None
) -> tuple[ModelConfig, Any]:
    """(config, params) of a Hugging Face folder, every weight converted to ``dtype`` on its way and put in
    its parts on the devices of ``mesh`` (see ``tables.placement``).

    ``context`` is the length that length-dependent rotary kinds are evaluated for. Quantised folders are read
    by ``quant_read.load_quantized``. Raises ``CheckpointError`` or ``ConfigError``.
    """
    form = quantized_form(folder)
    if form is not None:
        raise CheckpointError(f"{folder} holds quantised weights ({form}); load_target reads them")
    raw = read_config(folder)
    config = from_hf(raw, context=context)
    files, given = NormalizedStore(open_weights(folder), str(folder)), quantization_settings(raw)
    odd = [] if given else sorted(name for name in files.names() if _QUANTISED.search(name))
    if odd:
        raise CheckpointError(
            f"{folder} holds quantised weights ({odd[0]}), but its config.json says nothing of that "
            "(quantization_config) and no description lies beside them; copy the one that belongs to them"
        )
    store = scaled.as_floats(files, given, str(folder))
    check_layers(store.names(), config.num_layers, str(folder))
    config, ignorable = settle_tying(config, store, str(folder))
    table = param_table(config, dtype)
    assignments = plan(
        table,
        rules_of(config),
        store,
        where=str(folder),
        ignorable=(*ignorable_of(config), *ignorable),
    )
    store.check_dtypes(name for assignment in assignments for name in assignment.names)
    leaves, place = {}, placement(table, mesh, str(folder))
    with progress(f"loading {folder.name}", len(assignments)) as advance:
        for assignment in assignments:
            leaves[assignment.leaf] = place(assignment.leaf, materialize(assignment, store))
            advance()
    return config, unflatten(table, leaves)
