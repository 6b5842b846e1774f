"""Our own layout of a quantised target: what ``config.json`` says of it, and the arrays that it names.

Every array of every leaf is named by its path, in shards. ``config.json`` is the model's, and says under
``eaglejax`` what the shards hold: how each packed weight is made of arrays, the settings that rotation adds
to the model, and the SHA-256 of every file. Whatever a ``Target`` can hold comes back bit for bit.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eaglejax.checkpoint.quantized.parts import pending
from eaglejax.checkpoint.safetensors_io import Pending
from eaglejax.kv_format import kv_format
from eaglejax.models.config import ModelConfig
from eaglejax.nn.cache import CacheScales
from eaglejax.quant.array import QuantArray
from eaglejax.quant.online import HadamardInput

VERSION = 1


PACKED = {"quantized": QuantArray, "hadamard": HadamardInput}
"""Packed weights by the name that the files give them."""


MODEL_FLAGS = ("qk_rotation", "post_rotation")
"""Settings of ModelConfig that rotation adds and that a Hugging Face config has no place for."""


ARRAY = "array"


DERIVED = ("offset_sums",)
"""Fields that follow from others; they are made again."""


def is_packed(value: Any) -> bool:
    """True for a leaf that is a packed weight."""
    return isinstance(value, tuple(PACKED.values()))


def spec_of(value: Any) -> Any:
    """What a leaf is made of, as JSON: ``"array"``, null, or an object with the fields of a packed weight."""
    if value is None:
        return None
    if not is_packed(value):
        return ARRAY
    name = next(name for name, type_ in PACKED.items() if isinstance(value, type_))
    spec: dict[str, Any] = {"type": name}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if field.name in DERIVED:
            continue
        if field.metadata.get("pytree_node", True):
            spec[field.name] = spec_of(part)
        else:
            spec[field.name] = np.dtype(part).name if field.name == "dtype" else part
    return spec


def arrays_of(path: str, value: Any) -> Iterator[tuple[str, Pending]]:
    """The arrays of a leaf by name, in the order of its fields."""
    if value is None:
        return
    if not is_packed(value):
        yield path, Pending(tuple(value.shape), np.dtype(value.dtype), lambda: np.asarray(value))
        return
    for field in dataclasses.fields(value):
        if field.metadata.get("pytree_node", True) and field.name not in DERIVED:
            yield from arrays_of(f"{path}.{field.name}", getattr(value, field.name))


def marker_of(params: Any, config: ModelConfig, **settings: Any) -> dict[str, Any]:
    """The entry of config.json; ``settings``: dtype, quantization, basis, files, cache."""
    weights = {path: spec_of(value) for path, value in packed_leaves(params).items() if is_packed(value)}
    return {
        "version": VERSION,
        **settings,
        "model": {flag: True for flag in MODEL_FLAGS if getattr(config, flag)},
        "weights": weights,
    }


def packed_leaves(params: Any) -> dict[str, Any]:
    """Leaves of the parameters by dotted path, packed weights in one piece."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_packed)
    return {jax.tree_util.keystr(path, simple=True, separator="."): value for path, value in leaves}


def cache_entry(named: Any) -> Any:
    """A cache format as JSON: its name, or an object with name and seed where a seed was chosen, or null."""
    if named is None:
        return None
    found = kv_format(named)
    return {"format": found.name, "seed": found.seed} if found.seed else found.name


def cache_arrays(scales: CacheScales | None) -> dict[str, Pending]:
    """Scales of an int8-static cache as arrays ``cache.k.<layer>`` and ``cache.v.<layer>``, f32 [Hkv, d]."""
    sides = {} if scales is None else {"k": scales.k, "v": scales.v}
    named = {f"cache.{side}.{i}": array for side, arrays in sides.items() for i, array in enumerate(arrays)}
    return {name: pending(np.asarray(array, np.float32)) for name, array in named.items()}


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
