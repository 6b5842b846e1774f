"""What a target's folder says of itself, quantised or not, told without reading its weights."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from eaglejax.checkpoint.basis_file import find_basis, read_basis
from eaglejax.checkpoint.files import read_json
from eaglejax.checkpoint.hf import (
    MARKER,
    NormalizedStore,
    plain_name,
    quantized_form,
)
from eaglejax.checkpoint.names import ignorable_of, rules_of
from eaglejax.checkpoint.quantized.compressed_tensors import tensors as compressed_tensors
from eaglejax.checkpoint.quantized.modelslim import read as modelslim_read
from eaglejax.checkpoint.quantized.own import read as own_read
from eaglejax.checkpoint.quantized.parts import Kind, require
from eaglejax.checkpoint.quantized.read import (
    label,
    matrices_of,
    open_quantized,
    read_description,
    read_scheme,
)
from eaglejax.checkpoint.safetensors_io import SafetensorsFile
from eaglejax.checkpoint.tables import candidates, check_layers
from eaglejax.errors import CheckpointError
from eaglejax.kv_format import KVFormat
from eaglejax.models.config import ModelConfig
from eaglejax.models.decoder import param_table
from eaglejax.models.families import from_hf
from eaglejax.pytree import leaf_paths
from eaglejax.rotation.basis import UNKNOWN_ROTATION

_OF_A_MODEL = frozenset(
    ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight")
)


def holds_target(folder: Path, names: Collection[str]) -> bool:
    """Whether a folder that is no draft of another kind holds a target: by its layout, or by the ``names`` of
    its tensors."""
    return quantized_form(folder) is not None or {plain_name(name) for name in names} >= _OF_A_MODEL


def summary(folder: Path) -> dict[str, Any]:
    """The object that ``inspect --json`` prints of a target's folder.

    ``form``: the layout, "plain" where nothing is quantised; ``family``; ``schemes``: matrices by scheme,
    experts counted one by one; ``kinds``: schemes by kind of weight (``layers.*.gate``), with their matrices;
    ``plain``: likewise, matrices left as they are; ``basis`` and ``rotation`` (the file with its matrix);
    ``cache``: form of keys and values; ``bytes`` of all weight files. Raises as ``load_quantized`` does for
    what shows without the values.
    """
    form, raw = quantized_form(folder), read_json(folder / "config.json")
    config, files = from_hf(raw), open_quantized(folder, form)
    check_layers(files.names(), config.num_layers, str(folder))
    basis = cache = None
    exported = True
    if form == "eaglejax":
        marker = raw[MARKER]
        require(
            isinstance(marker, Mapping) and isinstance(marker.get("weights"), Mapping),
            f"{folder / 'config.json'}: the entry {MARKER} is truncated",
        )
        leaves = dict(_own(config, marker["weights"], files))
        basis = marker.get("basis")
        asked = own_read.read_cache(marker.get("cache"), str(folder / "config.json"))
        cache = f"{asked.name}, seed {asked.seed}" if isinstance(asked, KVFormat) else asked
    else:
        store = NormalizedStore(files, str(folder))
        ignorable = ignorable_of(config)
        if form == "modelslim":
            description = read_description(folder)
            modelslim_read.check_complete(description, store, ignorable)
            encoded = modelslim_read.find(description, store)
            cache = "int8-static" if description.cache_names else None
            basis = UNKNOWN_ROTATION if description.rotated else None
            exported = not description.rotated or description.exported
        elif form == "compressed-tensors":
            scheme = read_scheme(folder, raw)
            encoded = compressed_tensors.find(scheme, store, matrices_of(config), ignorable)
        else:
            encoded = {}
        kinds = {f"{module}.weight": e.kind for module, e in encoded.items()}
        leaves = dict(_foreign(config, kinds, store))
    path = find_basis(folder) if exported else None
    schemes: Counter[str] = Counter()
    by_kind: dict[str, Counter[str]] = {}
    plain: Counter[str] = Counter()
    for leaf, found in leaves.items():
        name = re.sub(r"\.\d+\.", ".*.", leaf)
        for kind in found:
            if kind is None:
                plain[name] += 1
                continue
            schemes[label([kind])] += 1
            by_kind.setdefault(name, Counter())[label([kind])] += 1
    return {
        "form": form or "plain",
        "family": config.family,
        "schemes": dict(schemes),
        "kinds": {name: dict(counts) for name, counts in by_kind.items()},
        "plain": dict(plain),
        "basis": read_basis(path).id if path else basis,
        "rotation": None if path is None else os.path.relpath(path, folder),
        "cache": cache,
        "bytes": sum(file.stat().st_size for file in files.paths),
    }


def _foreign(
    config: ModelConfig, kinds: Mapping[str, Kind], store: NormalizedStore
) -> Iterator[tuple[str, list[Kind | None]]]:
    """(path, kind of each of its matrices or None) of every leaf that multiplies, and of the embedding."""
    names = {*store.names(), *kinds}
    tied = config.tie_embeddings and "lm_head.weight" not in names
    for leaf, info in leaf_paths(param_table(dataclasses.replace(config, tie_embeddings=tied))).items():
        if len(info.shape) > 1:
            possible = [a.names for a in candidates(leaf, info, rules_of(config))]
            found = next((n for n in possible if names.issuperset(n)), ())
            yield leaf, [kinds.get(name) for name in found]


def _own(
    config: ModelConfig, weights: Mapping[str, Any], files: SafetensorsFile
) -> Iterator[tuple[str, list[Kind | None]]]:
    for leaf, info in leaf_paths(param_table(config)).items():
        if len(info.shape) > 1:
            kinds = _kinds_of_spec(leaf, weights.get(leaf), files)
            yield leaf, kinds or [None] * math.prod(info.shape[:-2])


def _kinds_of_spec(path: str, spec: Any, files: SafetensorsFile) -> list[Kind | None]:
    """The kind of each matrix of a packed weight of our own layout, by its description and shapes."""
    while isinstance(spec, Mapping) and spec.get("type") == "hadamard":
        path, spec = f"{path}.inner", spec.get("inner")
    if not isinstance(spec, Mapping):
        return []
    try:
        values, scale = files.shape(f"{path}.values"), files.shape(f"{path}.scale")
        rows = values[-2] * (2 if spec["bits"] == 4 else 1)
        group = rows // scale[-2] if len(scale) == len(values) else None
        return [Kind(spec["bits"], spec["activation"], group)] * math.prod(values[:-2])
    except (KeyError, IndexError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"{path} is described as {json.dumps(spec)}, which its shards do not bear out"
        ) from error
