"""Writing a quantised target to a folder that loads by itself: weights, config, rotation and tokenizer."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eaglejax.checkpoint.basis_file import write_basis
from eaglejax.checkpoint.files import check_output, fresh_folder, read_json, require_disk
from eaglejax.checkpoint.gguf.metadata import config_from_metadata
from eaglejax.checkpoint.gguf.reader import GGUFFile
from eaglejax.checkpoint.hf import DESCRIPTION, MARKER, STEM, index_name
from eaglejax.checkpoint.names import rules_of
from eaglejax.checkpoint.quantized.compressed_tensors import config as quant_compressed
from eaglejax.checkpoint.quantized.compressed_tensors import tensors as compressed_tensors
from eaglejax.checkpoint.quantized.modelslim import layout as quant_modelslim
from eaglejax.checkpoint.quantized.own import marker as quant_own
from eaglejax.checkpoint.quantized.parts import Part, kind_of, pending, to_part
from eaglejax.checkpoint.safetensors_io import Pending, write_safetensors
from eaglejax.checkpoint.tables import Assignment, candidates
from eaglejax.errors import ConfigError
from eaglejax.kv_format import kv_format
from eaglejax.models.decoder import param_table
from eaglejax.models.target import Target
from eaglejax.pytree import leaf_paths
from eaglejax.quant.array import QuantArray
from eaglejax.quant.blocks import is_blocks
from eaglejax.quant.schemes import QuantizedForm
from eaglejax.rotation.basis import UNKNOWN_ROTATION

SHARD_BYTES = 4 << 30
"""A file of weights is closed before it grows beyond this."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def write_quantized(
    target: Target,
    out: Path,
    *,
    form: QuantizedForm = "eaglejax",
    config: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write ``target`` to the folder ``out``, which appears complete or not at all.

    ``form``: the layout, see ``quant.schemes``. ``config``: its config.json (None: that of the target's
    source). ``overwrite``: replace a folder that is there. Raises ConfigError for what the form has no place
    for and for a folder that holds something.
    """
    check_form(target, form)
    raw = _stripped(source_config(target) if config is None else config)
    check_output(out, overwrite=overwrite)
    require_disk(out, target.nbytes, f"the quantised {target.name}")
    with fresh_folder(out) as folder:
        _write_tokenizer(target, folder)
        if target.rotation is not None:
            write_basis(folder, target.rotation)
        writers = {"eaglejax": _own, "modelslim": _modelslim, "compressed-tensors": _compressed}
        raw |= {
            "tie_word_embeddings": target.config.tie_embeddings,
            "torch_dtype": target.dtype.name,
            **writers[form](target, folder, shard_bytes),
        }
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def check_form(target: Target, form: QuantizedForm) -> None:
    """Refuse a target that a layout cannot hold; raises ConfigError with what it has no place for."""
    if any(is_blocks(leaf) for leaf in jax.tree.leaves(target.params, is_leaf=is_blocks)):
        raise ConfigError(
            f"{target.name} holds the blocks of a GGUF file, for which the {form} form has no place; "
            "the file itself is their form"
        )
    cache = None if target.cache_format is None else kv_format(target.cache_format)
    static = cache is not None and cache.static
    if static != (target.cache_scales is not None):
        raise ConfigError(
            f"{target.name} asks for an int8-static cache without scales for it; calibrate_cache finds them"
            if static
            else f"{target.name} has scales of an int8-static cache, but asks for "
            f"{'none' if cache is None else cache.name}; leave them out, or ask for int8-static"
        )
    if target.rotation is None and target.basis not in (None, UNKNOWN_ROTATION):
        raise ConfigError(
            f"{target.name} is in basis {target.basis}, whose matrix would have to lie beside it"
        )
    if form == "eaglejax":
        return
    leaves = quant_own.packed_leaves(target.params)
    arrays = [value for value in leaves.values() if isinstance(value, QuantArray)]
    wrapped = [path for path, v in leaves.items() if quant_own.is_packed(v) and not isinstance(v, QuantArray)]
    config = target.config
    kinds = [(kind_of(a), a) for a in arrays]
    groups = {kind.group for kind, _ in kinds} - {None}
    # Of one group and of none the layout has the same tensors; the description's group size tells them apart.
    groupable = [(kind, a) for kind, a in kinds if kind.activation != "static"]
    problems = [
        (bool(wrapped), "rotations that run with the model (R4)"),
        (config.qk_rotation, "rotations of queries and keys (R3)"),
        (config.post_rotation, "the rotation behind closing norms"),
        (any(a.smooth is not None for a in arrays), "factors that smooth a layer's input as it runs"),
        (
            form == "compressed-tensors" and target.basis is not None and target.rotation is None,
            "a rotation whose matrix is not known",
        ),
        (not arrays, "a target without quantised weights"),
        (
            any(not assignment.layout.whole for assignment, _ in _assigned(target)),
            f"the fused or reordered tensors of a {config.family} model",
        ),
        (
            cache is not None and not (static and form == "modelslim"),
            f"a cache format ({'' if cache is None else cache.name})",
        ),
        (form == "modelslim" and len(groups) > 1, "groups of several sizes"),
        (
            form == "modelslim" and any(k.group is None and a.rows in groups for k, a in groupable),
            f"a matrix without groups that is as wide as a group of others ({', '.join(map(str, groups))})",
        ),
    ]
    wrong = [text for has, text in problems if has]
    if wrong:
        raise ConfigError(
            f"the {form} form has no place for {', '.join(wrong)}; use --format eaglejax, which holds all"
        )
    for kind, _ in kinds:
        if form == "modelslim":
            quant_modelslim.label_of(kind)
        elif kind.activation == "static" and kind.group:
            raise ConfigError(f"the {form} form has no static activations with groups of weights")


def source_config(target: Target) -> dict[str, Any]:
    """What config.json of a target's source says.

    Raises ConfigError for a target that comes from no file.
    """
    if target.source is None:
        raise ConfigError(f"{target.name} comes from no file; give its config.json as a dict")
    if target.source.kind == "gguf":
        return config_from_metadata(GGUFFile(target.source.path))
    return read_json(target.source.path / "config.json")


def _stripped(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without what the writer says itself, in the language model of a multimodal one too."""
    own = ("quantization_config", "torch_dtype", "dtype", "tie_word_embeddings", MARKER)
    return {
        key: _stripped(value) if key == "text_config" and isinstance(value, Mapping) else value
        for key, value in raw.items()
        if key not in own
    }


def _write_tokenizer(target: Target, folder: Path) -> None:
    if target.source is not None and target.source.kind == "folder":
        for name in TOKENIZER_FILES:
            path = target.source.path / name
            if path.is_file():
                shutil.copyfile(path, folder / name)
    elif target.tokenizer is not None:
        target.tokenizer.save(folder)


def _assigned(target: Target) -> Iterator[tuple[Assignment, Any]]:
    """Every leaf with the names that its tensors have in a Hugging Face folder."""
    table = leaf_paths(param_table(target.config, target.dtype))
    for path, value in quant_own.packed_leaves(target.params).items():
        yield next(candidates(path, table[path], rules_of(target.config))), value


def _parts(
    assignment: Assignment, value: QuantArray
) -> Iterator[tuple[str, tuple[int, int], Callable[[], Part]]]:
    """(module, [O, I] shape, how to make it) of each matrix of a leaf."""
    shape = (value.values.shape[-1], value.rows)
    for number, name in enumerate(assignment.names):
        load = functools.partial(to_part, value, number if assignment.stacked else None)
        yield name.removesuffix(".weight"), shape, load


def _plain(assignment: Assignment, value: Any) -> Iterator[tuple[str, Pending]]:
    """Tensors of a leaf that is not quantised, as files lay them out."""
    transposed = assignment.layout.transposed

    def make(number: int) -> np.ndarray:
        array = np.asarray(value[number] if assignment.stacked else value)
        return array.T if transposed else array

    shape = tuple(value.shape[1:] if assignment.stacked else value.shape)
    for number, name in enumerate(assignment.names):
        stored = shape[::-1] if transposed else shape
        yield name, Pending(stored, np.dtype(value.dtype), functools.partial(make, number))


def _own(target: Target, folder: Path, limit: int) -> dict[str, Any]:
    arrays: dict[str, Pending] = {}
    for path, value in quant_own.packed_leaves(target.params).items():
        arrays |= dict(quant_own.arrays_of(path, value))
    arrays |= quant_own.cache_arrays(target.cache_scales)
    files = write_shards(folder, STEM, arrays, limit)
    marker = quant_own.marker_of(
        target.params,
        target.config,
        dtype=target.dtype.name,
        quantization=target.quantization,
        basis=target.basis,
        cache=quant_own.cache_entry(target.cache_format),
        files={name: quant_own.file_hash(folder / name) for name in files},
    )
    return {MARKER: marker}


def _modelslim(target: Target, folder: Path, limit: int) -> dict[str, Any]:
    arrays: dict[str, Pending] = {}
    types: dict[str, str] = {}
    leaves = list(_assigned(target))
    values = {name: value for assignment, value in leaves for name in assignment.names}
    group, symmetric = 0, []
    for assignment, value in leaves:
        if not isinstance(value, QuantArray):
            tensors = dict(_plain(assignment, value))
            types |= dict.fromkeys(tensors, quant_modelslim.FLOAT)
            arrays |= tensors
            continue
        kind = kind_of(value)
        group = kind.group or group
        for module, shape, load in _parts(assignment, value):
            symmetric += [module] if kind.activation == "static" and not kind.asymmetric else []
            bias = values.get(f"{module}.bias")
            make = None if bias is None else functools.partial(np.asarray, bias, np.float32)
            tensors = quant_modelslim.encode(module, kind, shape, load, make, target.dtype)
            types |= dict.fromkeys(tensors, quant_modelslim.label_of(kind))
            arrays |= tensors
    if target.cache_scales is not None:
        for name, array in quant_modelslim.cache_tensors(target.cache_scales).items():
            types[name], arrays[name] = quant_modelslim.KV_TYPES[0], pending(array)
    write_shards(folder, quant_modelslim.STEM, arrays, limit)
    description = quant_modelslim.describe(
        types,
        group,
        symmetric=symmetric,
        rotated=target.basis is not None,
        exported=target.rotation is not None,
        kv=target.cache_scales is not None,
    )
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    return {}


def _compressed(target: Target, folder: Path, limit: int) -> dict[str, Any]:
    arrays: dict[str, Pending] = {}
    kinds, plain = {}, []
    for assignment, value in _assigned(target):
        if not isinstance(value, QuantArray):
            arrays |= dict(_plain(assignment, value))
            if assignment.layout.transposed:
                plain += [name.removesuffix(".weight") for name in assignment.names]
            continue
        if not assignment.layout.transposed:
            raise ConfigError("the compressed-tensors form has no quantised embedding; exclude 'embed'")
        for module, shape, load in _parts(assignment, value):
            kinds[module] = kind_of(value)
            arrays |= compressed_tensors.encode(module, kinds[module], shape, load)
    if target.config.tie_embeddings:
        plain.append("lm_head")
    write_shards(folder, STEM, arrays, limit)
    return {"quantization_config": quant_compressed.config_of(kinds, plain)}


def write_shards(folder: Path, stem: str, arrays: Mapping[str, Pending], limit: int) -> list[str]:
    """Write arrays as ``stem-00001-of-0000N.safetensors`` of at most ``limit`` bytes each, with their index.

    An array larger than ``limit`` gets a file of its own. Returns the files' names.
    """
    shards: list[dict[str, Pending]] = [{}]
    size = total = 0
    for name, array in arrays.items():
        nbytes = math.prod(array.shape) * array.dtype.itemsize
        if shards[-1] and size + nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size, total = size + nbytes, total + nbytes
    names = [f"{stem}-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, {"format": "pt"})
    index = {
        "metadata": {"total_size": total},
        "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
    }
    (folder / index_name(stem)).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return names
