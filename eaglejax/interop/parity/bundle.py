"""A parity recording as a folder that carries all it needs: configurations, weights, prompts, the JAX run's
tensors, and the sources that replay it with Python, NumPy and torch alone.

    manifest.json, manifest.sha256    what is here: versions, specs, prompts, stages, hashes of all files
    weights.bin                       weights of target and draft (or a reference by hash, see ``Weights``)
    records.bin                       the JAX run's tensors
    code/eaglejax/..., replay.py      the sources; ``python replay.py --backend ascend`` compares

Stages are recorded at one of three levels. ``all``: every intermediate tensor and the caches before the
stage, so that a fault can be located; ``coarse``: what every stage is compared by; ``choices``: trees, paths,
tokens and the largest logits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eaglejax.errors import CheckpointError, ConfigError, EaglejaxError
from eaglejax.interop.models.runner import TorchDraft, TorchTarget
from eaglejax.interop.parity.blob import Blob, BlobWriter, check_file, sha256
from eaglejax.interop.parity.compare import Committed, Recorded, Stage, is_coarse
from eaglejax.interop.parity.names import parse
from eaglejax.interop.parity.weights import read_models

FORMAT = "eaglejax-parity-bundle"
VERSION = 1

TOP_LOGITS = 64
"""Logits of a row that are kept where not all are."""

_CHOICES = {
    "tree": ("tokens", "parent", "depth", "valid", "scores"),
    "target": ("tokens", "positions", "logits"),
    "verify": ("path", "accepted", "tokens", "count"),
}


class StageWriter:
    """Writes stages to a blob of about ``budget`` bytes: in less detail as they run short, choices always.
    ``rounds``: how many first rounds of a prompt (and its chunks) are written whole while they fit."""

    def __init__(self, blob: BlobWriter, *, budget: int, rounds: int) -> None:
        self._blob, self._budget, self._rounds = blob, budget, rounds
        self._whole = True

    def add(self, prompt: int, stage: Stage) -> dict[str, Any]:
        """Write one stage of the prompt numbered so; what the manifest says of it."""
        level = "coarse"
        tensors = {name: _small(name, x) for name, x in stage.tensors.items()}
        if self._whole and (stage.stage == "prefill" or stage.index < self._rounds):
            everything, committed = stage.everything(), stage.committed()
            assert everything is not None
            assert committed is not None
            held = _committed_arrays(stage, committed)
            size = sum(x.values.nbytes for x in everything.values()) + sum(x.nbytes for x in held.values())
            # Half of what is left stays for the stages to come.
            if size <= (self._budget - self._blob.nbytes) / 2:
                level, tensors = "all", everything
                for name, array in held.items():
                    self._blob.add_array(f"{prompt}/{name}", array)
            else:
                # A later stage alone could be located in no better than this one.
                self._whole = False
        if level != "all" and _size(tensors) > (self._budget - self._blob.nbytes) / 8:
            level, tensors = "choices", {n: x for n, x in tensors.items() if _is_choice(n)}
        entries = {}
        for name, recorded in tensors.items():
            self._blob.add_array(f"{prompt}/{name}", recorded.values)
            entries[name] = {"dtype": recorded.dtype, "width": recorded.width}
            if recorded.top is not None:
                self._blob.add_array(f"{prompt}/{name}/top", recorded.top)
        return {
            "stage": stage.stage,
            "index": stage.index,
            "level": level,
            "ended": stage.ended,
            "tensors": entries,
        }


def _small(name: str, recorded: Recorded) -> Recorded:
    return recorded.trimmed(TOP_LOGITS) if parse(name).operation == "logits" else recorded


def _size(tensors: Mapping[str, Recorded]) -> int:
    return sum(x.values.nbytes + (0 if x.top is None else x.top.nbytes) for x in tensors.values())


def _is_choice(name: str) -> bool:
    place = parse(name)
    return place.operation in _CHOICES.get(place.part, ())


def _committed_arrays(stage: Stage, committed: Committed) -> dict[str, np.ndarray]:
    """Arrays of the state before a stage, by the name they have in the blob."""
    arrays = {f"{stage.name}/before/feature": committed.feature}
    for kind, models in (("k", committed.keys), ("v", committed.values)):
        for model, layers in models.items():
            for i, array in enumerate(layers):
                arrays[f"{stage.name}/before/{model}/{kind}/{i}"] = array
    return arrays


@dataclasses.dataclass(frozen=True)
class BundlePrompt:
    """A prompt of a bundle: see ``check.Prompt``."""

    name: str | int
    tokens: tuple[int, ...]
    budget: int
    stages: tuple[dict[str, Any], ...]


class Bundle:
    """A bundle on disk; everything is checked against its hashes before any of it is used.

    ``weights``: the file that the manifest refers to by hash, where weights are not in the bundle. Raises
    CheckpointError that names the file that is missing, truncated or changed.
    """

    def __init__(self, folder: Path, *, weights: Path | None = None) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        with understood(folder):
            self._open(folder, weights)

    def _open(self, folder: Path, weights: Path | None) -> None:
        for name, description in self.manifest["files"].items():
            check_file(folder / name, description)
        described = self.manifest["weights"]
        own = folder / "weights.bin"
        if not described["embedded"] and weights is None:
            raise ConfigError(
                f"the weights are not in {folder}: name the file with SHA-256 {described['sha256']} "
                "with --weights"
            )
        self._weights = Blob(own if described["embedded"] else _named(weights), described)
        self._records = Blob(folder / "records.bin", self.manifest["records"])

    @property
    def dtype(self) -> str:
        """Of the computation."""
        with understood(self.folder):
            return str(self.manifest["models"]["dtype"])

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        with understood(self.folder):
            return tuple(self.manifest["eos_ids"])

    @property
    def prompts(self) -> list[BundlePrompt]:
        """What was asked."""
        with understood(self.folder):
            return [
                BundlePrompt(p["id"], tuple(p["tokens"]), p["budget"], tuple(p["stages"]))
                for p in self.manifest["prompts"]
            ]

    def stages(self, number: int) -> Iterator[Stage]:
        """The recorded stages of the prompt numbered so."""
        for entry in self.prompts[number].stages:
            with understood(self.folder):
                stage = self._stage(number, entry)
            yield stage

    def _stage(self, number: int, entry: Mapping[str, Any]) -> Stage:
        tensors = {name: self._recorded(number, name, about) for name, about in entry["tensors"].items()}
        whole = entry["level"] == "all"
        return Stage(
            entry["stage"],
            entry["index"],
            {name: x for name, x in tensors.items() if is_coarse(parse(name))},
            entry["ended"],
            everything=lambda: tensors if whole else None,
            committed=lambda: self._committed(number, entry) if whole else None,
        )

    def _recorded(self, number: int, name: str, about: Mapping[str, Any]) -> Recorded:
        top = f"{number}/{name}/top"
        return Recorded(
            self._records.array(f"{number}/{name}"),
            about["dtype"],
            self._records.array(top) if top in self._records else None,
            about["width"],
        )

    def _committed(self, number: int, entry: Mapping[str, Any]) -> Committed:
        before = f"{number}/{entry['stage']}/{entry['index']}/before"
        specs = self.manifest["models"]

        def layers(kind: str) -> dict[str, list[np.ndarray]]:
            return {
                model: [
                    self._records.array(f"{before}/{model}/{kind}/{i}")
                    for i in range(specs[model]["spec"]["num_layers"])
                ]
                for model in ("target", "draft")
            }

        return Committed(layers("k"), layers("v"), self._records.array(f"{before}/feature"))

    def models(self) -> tuple[TorchTarget, TorchDraft]:
        """Target and draft for a ``TorchRunner``, with their weights."""
        with understood(self.folder):
            return read_models(self._weights, self.manifest["models"])


@contextlib.contextmanager
def understood(folder: Path) -> Iterator[None]:
    """What goes wrong while the body reads a manifest is the manifest's fault: CheckpointError. Its hash
    tells that nobody changed it, not that whoever wrote it told the truth."""
    try:
        yield
    except EaglejaxError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        told = f"{type(error).__name__}: {error!s:.200}"
        raise CheckpointError(f"{folder / 'manifest.json'} describes no parity recording ({told})") from error


def _named(path: Path | None) -> Path:
    assert path is not None
    return path


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a bundle; raises CheckpointError where it is missing, changed or of another format."""
    path, digest = folder / "manifest.json", folder / "manifest.sha256"
    for file in (path, digest):
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; {folder} is no parity bundle, or not all of one")
    text = path.read_bytes()
    if hashlib.sha256(text).hexdigest() != digest.read_text(encoding="utf-8", errors="replace").strip():
        raise CheckpointError(f"{path} was changed after it was written: its SHA-256 is another")
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON that can be read: {error!s:.200}") from error
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{path} holds no object; it is no manifest of a parity recording")
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is {manifest.get('format')!r} version {manifest.get('version')!r}; this replays "
            f"{FORMAT!r} version {VERSION}: use the replay.py that came with the bundle"
        )
    return manifest


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest and its hash; the manifest comes last, so that half a bundle is none."""
    text = json.dumps(manifest, indent=1, allow_nan=False).encode()
    _replace(folder / "manifest.sha256", hashlib.sha256(text).hexdigest().encode() + b"\n")
    _replace(folder / "manifest.json", text)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def describe_files(folder: Path, paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Bytes and SHA-256 of files, by their path below ``folder``."""
    return {p.relative_to(folder).as_posix(): {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in paths}
