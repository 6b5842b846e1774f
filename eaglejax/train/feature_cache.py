"""Features on disk: shards of safetensors beside a manifest that says exactly what they are.

``manifest.json`` holds the identity (``features.identity``). Each shard's header lists its samples (content
key and length, in the order of their rows). A shard is written whole and then renamed, so that a kill loses
the shard in work and nothing else; a run that is started again computes what is missing.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eaglejax import json_text
from eaglejax.checkpoint.files import make_folder, only_writer, read_json, write_text
from eaglejax.checkpoint.safetensors_io import Pending, SafetensorsFile, write_safetensors
from eaglejax.errors import CheckpointError
from eaglejax.models.target import Target
from eaglejax.train.features import check_identity, identity, target_features
from eaglejax.train.packing import Features, assemble, pack
from eaglejax.train.samples import Sample

FORMAT = 1
MANIFEST = "manifest.json"


class FeatureCache:
    """Reads cached features. Raises CheckpointError for a damaged folder and MismatchError, naming each
    difference, for features that were made of another target or in another way than ``wanted``."""

    def __init__(self, folder: str | Path, wanted: dict[str, Any]) -> None:
        self.folder = Path(folder)
        if not (self.folder / MANIFEST).is_file():
            raise CheckpointError(
                f"{folder} holds no features; make them with `eaglejax features --out {folder}` and the same "
                "settings"
            )
        _check_manifest(self.folder, wanted)
        self._shards = _open_shards(self.folder)
        self._index = _index(self._shards)

    def __contains__(self, sample: Sample) -> bool:
        return sample.key in self._index

    def __len__(self) -> int:
        return len(self._index)

    def read(self, sample: Sample) -> Features:
        """The sample's arrays, views of the mapped file. Raises CheckpointError when it has none, or when the
        tokens stored beside them are others."""
        entry = self._index.get(sample.key)
        if entry is None:
            raise CheckpointError(
                f"{self.folder} holds no features of {sample.name}; run `eaglejax features`"
            )
        shard, start, length = entry
        file = self._shards[shard]
        rows = {name: file.array(name)[start : start + length] for name in file.names()}
        if not np.array_equal(rows.pop("tokens"), sample.ids):
            raise CheckpointError(
                f"{self.folder / shard} is damaged: its tokens are not those of {sample.name}"
            )
        return rows


def write_features(
    folder: str | Path,
    target: Target,
    samples: Sequence[Sample],
    aux: tuple[int, ...],
    *,
    capacity: int,
    shard_tokens: int = 16384,
    advance: Callable[[int], None] = lambda tokens: None,
) -> int:
    """Compute and store the features of all samples that the folder lacks; how many there were.

    ``capacity``: tokens of a packed row; samples must fit it. ``advance`` is told the tokens done. Raises
    MismatchError when the folder holds features of another kind, and CheckpointError while another process
    writes to it.
    """
    folder = Path(folder)
    with only_writer(folder):
        make_folder(folder)
        wanted = identity(target, aux)
        if (folder / MANIFEST).exists():
            _check_manifest(folder, wanted)
        else:
            write_text(folder / MANIFEST, json.dumps({"format": FORMAT, "identity": wanted}, indent=2) + "\n")
        shards = _open_shards(folder)
        known = _index(shards)
        todo = list({s.key: s for s in samples if s.key not in known}.values())
        number = max((int(name[6:-12]) for name in shards), default=-1) + 1
        for group in _shards(todo, shard_tokens):
            parts = []
            for row in pack([len(s) for s in group], capacity):
                chosen = [group[i] for i in row]
                parts.append((chosen, _features_of(target, chosen, aux, capacity)))
                advance(sum(len(s) for s in chosen))
            _write_shard(folder, f"shard-{number:05d}.safetensors", parts)
            number += 1
        return len(todo)


def _check_manifest(folder: Path, wanted: dict[str, Any]) -> None:
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder}: feature format {manifest.get('format')!r} is not {FORMAT}")
    check_identity(manifest.get("identity", {}), wanted, str(folder))


def _features_of(
    target: Target, samples: Sequence[Sample], aux: tuple[int, ...], capacity: int
) -> list[Features]:
    """The features of samples that share one packed row."""
    found = jax.device_get(target_features(target.params, target.config, assemble(samples, capacity), aux))
    arrays = {"hidden": found.hidden, "top": found.top, "log_norm": found.log_norm}
    if found.aux is not None:
        arrays["aux"] = found.aux
    out, at = [], 0
    for sample in samples:
        out.append({name: np.asarray(a[0, at : at + len(sample)]) for name, a in arrays.items()})
        at += len(sample)
    return out


def _write_shard(
    folder: Path, name: str, parts: Iterable[tuple[Sequence[Sample], Sequence[Features]]]
) -> None:
    flat = [(s, f) for samples, features in parts for s, f in zip(samples, features, strict=True)]
    joined = {key: np.concatenate([f[key] for _, f in flat]) for key in flat[0][1]}
    joined["tokens"] = np.concatenate([s.ids for s, _ in flat])
    pending = {key: Pending(a.shape, a.dtype, functools.partial(np.asarray, a)) for key, a in joined.items()}
    listing = json.dumps([[s.key, len(s)] for s, _ in flat])
    write_safetensors(folder / name, pending, {"samples": listing})


def _shards(samples: Sequence[Sample], tokens: int) -> Iterable[list[Sample]]:
    group: list[Sample] = []
    for sample in samples:
        group.append(sample)
        if sum(len(s) for s in group) >= tokens:
            yield group
            group = []
    if group:
        yield group


def _open_shards(folder: Path) -> dict[str, SafetensorsFile]:
    return {path.name: SafetensorsFile([path]) for path in sorted(folder.glob("shard-*.safetensors"))}


def _index(shards: dict[str, SafetensorsFile]) -> dict[str, tuple[str, int, int]]:
    """Content key -> (shard, first row, length)."""
    index = {}
    for name, file in shards.items():
        at = 0
        try:
            for key, length in json_text.parse(file.metadata["samples"]):
                index[str(key)] = (name, at, int(length))
                at += int(length)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{file.paths[0]} is damaged: its list of samples cannot be read"
            ) from error
    return index
