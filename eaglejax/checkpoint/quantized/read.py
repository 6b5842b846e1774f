"""Reading a folder of quantised weights, in whichever layout, into parameters with ``QuantArray`` leaves."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from eaglejax.checkpoint.basis_file import find_basis, read_basis
from eaglejax.checkpoint.files import progress, read_json, weight_files
from eaglejax.checkpoint.hf import (
    DESCRIPTION,
    STEM,
    NormalizedStore,
    description_path,
    open_weights,
    plain_name,
    quantization_settings,
    quantized_form,
    settle_tying,
)
from eaglejax.checkpoint.names import ignorable_of, rules_of
from eaglejax.checkpoint.quantized.compressed_tensors import config as quant_compressed
from eaglejax.checkpoint.quantized.compressed_tensors import tensors as compressed_tensors
from eaglejax.checkpoint.quantized.modelslim import layout as quant_modelslim
from eaglejax.checkpoint.quantized.modelslim import read as modelslim_read
from eaglejax.checkpoint.quantized.own import read as own_read
from eaglejax.checkpoint.quantized.parts import Encoded, QuantizedStore, from_parts, require
from eaglejax.checkpoint.safetensors_io import SafetensorsFile
from eaglejax.checkpoint.tables import Assignment, candidates, check_layers, materialize, plan
from eaglejax.kv_format import KVFormat
from eaglejax.models.config import ModelConfig
from eaglejax.models.decoder import param_table
from eaglejax.models.families import from_hf
from eaglejax.models.memory import require_free
from eaglejax.nn.cache import CacheScales
from eaglejax.pytree import leaf_paths, unflatten
from eaglejax.quant.schemes import QuantizedForm
from eaglejax.rotation.basis import UNKNOWN_ROTATION, Basis


@dataclasses.dataclass(frozen=True)
class QuantizedFolder:
    """What a folder of quantised weights holds; the fields of ``Target`` of these names.

    ``cache_scales`` come with the format int8-static.
    """

    config: ModelConfig
    params: Any
    quantization: str
    basis: str | None
    rotation: Basis | None
    cache_format: str | KVFormat | None
    cache_scales: CacheScales | None

    def told(self) -> dict[str, Any]:
        """What a ``Target`` says beside its config and weights."""
        names = ("quantization", "basis", "rotation", "cache_format", "cache_scales")
        return {name: getattr(self, name) for name in names}


def load_quantized(folder: Path, dtype: Any, *, context: int | None = None) -> QuantizedFolder:
    """Read a folder that ``hf.quantized_form`` recognises; plain weights become ``dtype``.

    Raises ``CheckpointError`` or ``ConfigError`` naming what is missing, contradictory or not read.
    """
    form = quantized_form(folder)
    raw = read_json(folder / "config.json")
    config = from_hf(raw, context=context)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    require_free(f"the model in {folder}", size, "take one of fewer bits, or a smaller one")
    if form == "eaglejax":
        return _own(folder, raw, config, dtype)
    where = str(folder)
    store = NormalizedStore(open_quantized(folder, form), where)
    check_layers(store.names(), config.num_layers, where)
    ignorable = ignorable_of(config)
    scales = None
    hidden: tuple[str, ...] = ()
    rotated = False
    if form == "modelslim":
        description = read_description(folder)
        modelslim_read.check_complete(description, store, ignorable)
        encoded = modelslim_read.find(description, store)
        scales = modelslim_read.cache_scales(
            description, store, config.num_layers, config.num_kv_heads, config.head_dim
        )
        hidden = description.cache_names
        rotated = description.rotated
    else:
        encoded = compressed_tensors.find(
            read_scheme(folder, raw), store, matrices_of(config), ignorable, store.spelt
        )
    config, leaves = _leaves(config, store, encoded, hidden, dtype, where, ignorable)
    path = find_basis(folder) if not rotated or description.exported else None
    rotation = None if path is None else _rotation(path, config)
    basis = rotation.id if rotation else UNKNOWN_ROTATION if rotated else None
    return QuantizedFolder(
        config=config,
        params=unflatten(param_table(config, dtype), leaves),
        quantization=label(e.kind for e in encoded.values()),
        basis=basis,
        rotation=rotation,
        cache_format=None if scales is None else "int8-static",
        cache_scales=scales,
    )


def open_quantized(folder: Path, form: QuantizedForm | None) -> SafetensorsFile:
    """The weights of a folder in a layout."""
    return open_weights(folder, _modelslim_stem(folder) if form == "modelslim" else STEM)


_MODELSLIM_WEIGHTS = re.compile(
    r"(quant_model_weights?[\w-]*?)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
)


def _modelslim_stem(folder: Path) -> str:
    """What the weights of a modelslim folder are called: the tool's name, with a scheme at its end in older
    releases, or that of plain weights. Raises ``CheckpointError`` where several could be meant."""
    matches = [_MODELSLIM_WEIGHTS.fullmatch(path.name) for path in folder.iterdir()]
    stems = sorted({match[1] for match in matches if match})
    if quant_modelslim.STEM in stems:
        return quant_modelslim.STEM
    require(
        len(stems) < 2, f"{folder} holds weights called {', '.join(stems[:4])}; keep those of its description"
    )
    if stems:
        return stems[0]
    return STEM if weight_files(folder, STEM, ".safetensors")[0] else quant_modelslim.STEM


def read_description(folder: Path) -> modelslim_read.Description:
    """The checked description of a modelslim folder."""
    path = description_path(folder)
    assert path is not None
    if path.name != DESCRIPTION:
        warnings.warn(f"{folder} has no {DESCRIPTION}; {path.name} is taken for it", stacklevel=2)
    return modelslim_read.parse_description(read_json(path), str(path), plain_name)


def read_scheme(folder: Path, raw: Mapping[str, Any]) -> quant_compressed.Scheme:
    """The checked ``quantization_config`` of a compressed-tensors folder."""
    given = quantization_settings(raw)
    require(isinstance(given, Mapping), f"{folder / 'config.json'}: quantization_config must be an object")
    assert isinstance(given, Mapping)
    return quant_compressed.parse_config(given, str(folder / "config.json"), plain_name)


def matrices_of(config: ModelConfig) -> list[str]:
    """Modules of a model whose weight is a matrix that multiplies, in the names of ``*ForCausalLM``."""
    untied = dataclasses.replace(config, tie_embeddings=False)
    table = leaf_paths(param_table(untied))
    return [
        name.removesuffix(".weight")
        for leaf, info in table.items()
        for assignment in candidates(leaf, info, rules_of(config))
        if assignment.layout.transposed
        for name in assignment.names
    ]


def label(kinds: Any) -> str:
    """What ``Target.quantization`` says of matrices of these kinds: labels of their schemes, joined by +."""
    labels = sorted({k.scheme if k.group is None else f"{k.scheme}-g{k.group}" for k in kinds})
    return "+".join(labels) or "none"


def _leaves(
    config: ModelConfig,
    files: NormalizedStore,
    encoded: Mapping[str, Encoded],
    hidden: tuple[str, ...],
    dtype: Any,
    where: str,
    ignorable: tuple[str, ...],
) -> tuple[ModelConfig, dict[str, Any]]:
    """(config, leaves by path) of a store whose quantised matrices are known."""
    store = QuantizedStore(files, encoded, hidden)
    config, tied = settle_tying(config, store, where)
    table = param_table(config, dtype)
    assignments = plan(table, rules_of(config), store, where=where, ignorable=(*ignorable, *tied))
    store.check_dtypes(name for assignment in assignments for name in assignment.names)
    leaves = {}
    with progress(f"loading {Path(where).name}", len(assignments)) as advance:
        for assignment in assignments:
            leaves[assignment.leaf] = _leaf(assignment, store, dtype, where)
            advance()
    return config, leaves


def _leaf(assignment: Assignment, store: QuantizedStore, dtype: Any, where: str) -> Any:
    packed = [name for name in assignment.names if name in store.encoded]
    if not packed:
        return jax.device_put(materialize(assignment, store), may_alias=True)
    rest = [name for name in assignment.names if name not in store.encoded]
    require(
        not rest,
        f"{where}: {assignment.leaf} is quantised in part: {packed[0]} is, {rest[:1]} is not; experts of a "
        "layer are read when quantised alike",
    )
    require(
        assignment.layout.whole,
        f"{where}: {packed[0]} is quantised, and {assignment.leaf} is a part of it or has its rows in "
        "another order; read the float weights and quantise them here",
    )
    return from_parts(
        (store.encoded[name].decode() for name in assignment.names),
        stacked=assignment.stacked,
        transposed=not assignment.layout.transposed,
        dtype=dtype,
        where=f"{where}: {assignment.leaf}",
    )


def _own(folder: Path, raw: Mapping[str, Any], config: ModelConfig, dtype: Any) -> QuantizedFolder:
    config, leaves, cache, scales, marker = own_read.load(folder, raw, config, dtype)
    stated, path = marker["basis"], find_basis(folder)
    rotation = None if path is None else _rotation(path, config)
    require(
        stated == (rotation.id if rotation else None) or (stated == UNKNOWN_ROTATION and rotation is None),
        f"{folder}: config.json says basis {stated!r}, but the folder "
        + (f"holds {rotation.id}" if rotation else "holds no rotation (optional/quarot.safetensors)"),
    )
    return QuantizedFolder(
        config=config,
        params=unflatten(param_table(config, dtype), leaves),
        quantization=marker["quantization"],
        basis=stated,
        rotation=rotation,
        cache_format=cache,
        cache_scales=scales,
    )


def exported_rotation(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """What a ``Target`` says of the rotation that lies in a folder of plain weights, {} where none does."""
    path = find_basis(folder)
    if path is None:
        return {}
    rotation = _rotation(path, config)
    return {"basis": rotation.id, "rotation": rotation}


def _rotation(path: Path, config: ModelConfig) -> Basis:
    basis = read_basis(path)
    require(
        basis.size == config.hidden_size,
        f"{path} holds a rotation of {basis.size} dimensions, the model has {config.hidden_size}",
    )
    return basis
