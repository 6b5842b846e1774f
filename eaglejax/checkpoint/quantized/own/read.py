"""Reading our own layout: leaves built as the marker describes them, and files that are what it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.checkpoint.hf import MARKER, open_weights
from eaglejax.checkpoint.quantized.own.marker import (
    ARRAY,
    DERIVED,
    MODEL_FLAGS,
    PACKED,
    VERSION,
    file_hash,
    is_packed,
)
from eaglejax.checkpoint.quantized.parts import checked_scale, require, with_offset_sums
from eaglejax.checkpoint.safetensors_io import SafetensorsFile
from eaglejax.checkpoint.tables import check_layers
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.kv_format import FORMATS, KVFormat
from eaglejax.models.config import ModelConfig
from eaglejax.models.decoder import param_table
from eaglejax.nn.cache import CacheScales
from eaglejax.pytree import leaf_paths
from eaglejax.quant.array import QuantArray
from eaglejax.quant.online import HadamardInput

_DTYPES = ("int8", "float32", "bfloat16", "float16")
"""Of arrays in the shards. Jax would narrow others without a word."""


def build(path: str, spec: Any, file: SafetensorsFile, used: set[str], where: str, dtype: Any) -> Any:
    """The leaf that ``spec`` describes, packed weights to stand for one of ``dtype``; names of its arrays are
    added to ``used``.

    Raises ``CheckpointError`` for a spec or an array that cannot be.
    """
    if spec is None:
        return None
    if spec == ARRAY:
        require(path in file.names(), f"{where} describes the array {path!r}, which its shards do not hold")
        dtype = file.dtype(path).name
        require(dtype in _DTYPES, f"{where}: {path} is {dtype}; arrays are {', '.join(_DTYPES)}")
        used.add(path)
        return jax.device_put(file.array(path), may_alias=True)
    type_ = PACKED.get(str(spec.get("type"))) if isinstance(spec, Mapping) else None
    require(type_ is not None, f"{where}: {path} is described as {spec!r}; known are {', '.join(PACKED)}")
    assert type_ is not None
    fields = {f.name: f for f in dataclasses.fields(type_) if f.name not in DERIVED}
    require(
        set(spec) == {"type", *fields},
        f"{where}: {path} is described by {sorted(spec)}; a {spec['type']} weight has {sorted(fields)}",
    )
    values = {}
    for name, field in fields.items():
        if field.metadata.get("pytree_node", True):
            values[name] = build(f"{path}.{name}", spec[name], file, used, where, dtype)
        else:
            values[name] = _static(path, name, spec[name], where)
    found = type_(**values)
    if isinstance(found, HadamardInput):
        inner = found.inner
        return HadamardInput(inner if is_packed(inner) else inner.astype(dtype))
    return with_offset_sums(_checked(path, dataclasses.replace(found, dtype=np.dtype(dtype)), where))


def _static(path: str, name: str, value: Any, where: str) -> Any:
    allowed: dict[str, tuple[Any, ...]] = {
        "bits": (8, 4),
        "activation": ("dynamic", "static", None),
        "transposed": (True, False),
        "dtype": ("bfloat16", "float32", "float16"),
    }
    right = any(value == a and type(value) is type(a) for a in allowed.get(name, ()))
    require(right, f"{where}: {name} of {path} is {value!r}; it can be {allowed.get(name)}")
    return jnp.dtype(value) if name == "dtype" else value


def _checked(path: str, array: QuantArray, where: str) -> QuantArray:
    """Refuse integers and scales whose shapes or dtypes do not go together."""
    values, scale = array.values, array.scale
    require(
        values is not None and values.dtype == jnp.int8 and values.ndim in (2, 3),
        f"{where}: {path}.values must be int8 [..., I, O]",
    )
    columns = (*values.shape[:-2], values.shape[-1])
    grouped = scale is not None and scale.ndim == values.ndim
    shape = (*scale.shape[:-2], scale.shape[-1]) if grouped else None if scale is None else scale.shape
    require(
        scale is not None and scale.dtype == jnp.float32 and shape == columns,
        f"{where}: {path}.scale has shape {None if scale is None else scale.shape}; values {values.shape} "
        f"ask for {columns}, or that with a dimension of groups before the last",
    )
    require(
        array.groups > 0 and array.rows % array.groups == 0,
        f"{where}: {path}.scale has {array.groups} groups, which do not divide {array.rows} input rows",
    )
    sizes = {"input_scale": (), "input_offset": (), "smooth": (array.rows,)}
    for name, right in sizes.items():
        part = getattr(array, name)
        require(
            part is None or (part.shape == right and part.dtype == jnp.float32),
            f"{where}: {path}.{name} must be float32 of shape {right}",
        )
    require(
        (array.input_scale is not None) == (array.activation == "static"),
        f"{where}: {path} has activation {array.activation!r}, which "
        f"{'needs' if array.activation == 'static' else 'has no'} input_scale",
    )
    return array


def read_cache(entry: Any, where: str) -> str | KVFormat | None:
    """The inverse of ``cache_entry``. Raises ``CheckpointError``."""
    seeded = isinstance(entry, Mapping) and set(entry) == {"format", "seed"}
    name = entry["format"] if seeded else entry
    require(
        name is None if entry is None else isinstance(name, str) and name in FORMATS,
        f"{where}: {MARKER}.cache is {entry!r}; it can be one of {', '.join(FORMATS)}, perhaps with a seed",
    )
    try:
        return KVFormat(name, entry["seed"]) if seeded else name
    except ConfigError as error:
        raise CheckpointError(f"{where}: {MARKER}.cache: {error}") from error


def _cache_scales(file: SafetensorsFile, config: ModelConfig, used: set[str], where: str) -> CacheScales:
    def side(letter: str) -> tuple[jax.Array, ...]:
        names = [f"cache.{letter}.{i}" for i in range(config.num_layers)]
        absent = [n for n in names if n not in file.names()]
        require(
            not absent, f"{where} says that there are cache scales; its shards lack {', '.join(absent[:4])}"
        )
        used.update(names)
        right = (config.num_kv_heads, config.head_dim)
        for name in names:
            got = file.shape(name)
            require(got == right, f"{where}: {name} has shape {got}; the configuration asks for {right}")
        return tuple(jnp.asarray(checked_scale(file.array(n), n)) for n in names)

    return CacheScales(k=side("k"), v=side("v"))


def load(
    folder: Path, raw: Mapping[str, Any], config: ModelConfig, dtype: Any
) -> tuple[ModelConfig, dict[str, Any], str | KVFormat | None, CacheScales | None, Mapping[str, Any]]:
    """(config, leaves by path, cache format, its scales, marker) of a folder.

    ``raw``: its config.json; ``dtype`` of plain weights, and of what packed ones stand for.

    Raises ``CheckpointError`` for files that are missing, changed or not what the marker describes.
    """
    where, marker = str(folder / "config.json"), raw[MARKER]
    require(isinstance(marker, Mapping), f"{where}: {MARKER} must be an object")
    require(
        marker.get("version") == VERSION,
        f"{where}: {MARKER}.version is {marker.get('version')!r}; this release reads {VERSION}",
    )
    lacking = [
        k for k in ("dtype", "quantization", "basis", "files", "cache", "model", "weights") if k not in marker
    ]
    require(not lacking, f"{where}: {MARKER} lacks {', '.join(lacking)}; it is truncated")
    _check_hashes(folder, marker["files"], where)
    flags = marker["model"]
    require(
        isinstance(flags, Mapping)
        and set(flags) <= set(MODEL_FLAGS)
        and all(v is True for v in flags.values()),
        f"{where}: {MARKER}.model is {flags!r}; it can set {', '.join(MODEL_FLAGS)}",
    )
    config = dataclasses.replace(config, **flags)
    file = open_weights(folder)
    check_layers(file.names(), config.num_layers, where)
    table = leaf_paths(param_table(config, dtype))
    unhashed = sorted({path.name for path in file.paths} - set(marker["files"]))
    require(
        not unhashed, f"{where}: {MARKER}.files leaves out {', '.join(unhashed[:4])}, which the index names"
    )
    specs = marker["weights"]
    require(isinstance(specs, Mapping), f"{where}: {MARKER}.weights must be an object")
    unknown = [path for path in specs if path not in table]
    require(not unknown, f"{where} describes {', '.join(unknown[:4])}, which the model does not have")
    used: set[str] = set()
    leaves = {}
    for path, info in table.items():
        value = build(path, specs.get(path, ARRAY), file, used, where, info.dtype)
        require(
            value is not None and tuple(value.shape) == info.shape,
            f"{where}: {path} has shape {getattr(value, 'shape', None)}, the configuration asks for "
            f"{info.shape}",
        )
        leaves[path] = value if is_packed(value) else value.astype(info.dtype)
    cache = read_cache(marker["cache"], where)
    scales = _cache_scales(file, config, used, where) if cache == "int8-static" else None
    extra = sorted(set(file.names()) - used)
    require(
        not extra,
        f"{folder} holds {len(extra)} arrays that {where} does not describe: {', '.join(extra[:4])}",
    )
    return config, leaves, cache, scales, marker


def _check_hashes(folder: Path, files: Any, where: str) -> None:
    require(isinstance(files, Mapping) and files, f"{where}: {MARKER}.files must name the weight files")
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} lacks {name}, which its config.json names")
        found = file_hash(path)
        require(
            found == digest, f"{path} was changed or damaged: its SHA-256 is {found}, {where} says {digest}"
        )
