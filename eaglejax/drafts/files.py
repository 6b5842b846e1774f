"""The files of a draft, whatever its family, opened once."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from eaglejax.checkpoint.files import read_json, say_strays, shards_without_index, weight_files
from eaglejax.checkpoint.hf import open_weights
from eaglejax.checkpoint.sources import Spec
from eaglejax.checkpoint.torch_bin import TorchBinFile
from eaglejax.drafts.places import BIN, PICKLES, SAFETENSORS, draft_path
from eaglejax.errors import CheckpointError


class TensorFile(Protocol):
    """What ``SafetensorsFile`` and ``TorchBinFile`` have in common."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype: ...

    def array(self, name: str) -> np.ndarray: ...

    def rows(self, name: str, start: int, stop: int) -> np.ndarray: ...


class DraftFiles:
    """A draft's folder, or a GGUF file.

    ``spec``: what the user wrote; ``path``: the local folder or file; ``gguf``: which of the two.
    """

    def __init__(self, spec: str, path: Path, *, gguf: bool = False) -> None:
        self.spec, self.path, self.gguf = spec, path, gguf

    @functools.cached_property
    def raw(self) -> Mapping[str, Any]:
        """config.json, {} where there is none. Raises CheckpointError for a damaged one."""
        return {} if self.gguf else read_json(self.path / "config.json", default={})

    @functools.cached_property
    def tensors(self) -> TensorFile:
        """The weights; see ``open_tensors``."""
        return open_tensors(self.path)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Names of the tensors as they are stored; none where no weights have a usual name."""
        found = [] if self.gguf else [weight_files(self.path, *of)[0] for of in (SAFETENSORS, BIN)]
        return frozenset(self.tensors.names()) if any(found) else frozenset()


def opened(spec: Spec) -> DraftFiles:
    """The files of a draft: the shipped one (``demo``), a folder, a GGUF file, or a Hub id (owner/name,
    optionally @revision), downloaded.

    The same files come back as long as nothing in the folder has changed, so that a command reads their
    headers once however many of its parts ask. Raises CheckpointError.
    """
    path = draft_path(spec)
    return _opened(os.fspath(spec), path, _signature(path))


def _signature(path: Path) -> tuple[tuple[str, int, int], ...]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


@functools.lru_cache(maxsize=4)
def _opened(spec: str, path: Path, signature: tuple[tuple[str, int, int], ...]) -> DraftFiles:
    del signature
    return DraftFiles(spec, path, gguf=not path.is_dir())


def open_tensors(folder: Path) -> TensorFile:
    """The tensors of a folder: safetensors (one file or sharded), else ``pytorch_model.bin`` (one or
    sharded). Files of other names are not taken for weights."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; a draft is a folder with config.json and its weights")
    if weight_files(folder, *SAFETENSORS)[0]:
        return open_weights(folder)
    paths, places = weight_files(folder, *BIN)
    if paths:
        file = TorchBinFile(paths)
        lost = sorted(set(places) - set(file.names()))
        if lost:
            raise CheckpointError(f"{folder} lacks tensor {lost[0]!r}, which {PICKLES[1]} promises")
        say_strays(folder, paths)
        return file
    found = sorted(p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    hint = f"; {', '.join(found[:3])} is no name that producers give weights" if found else ""
    hint = shards_without_index(found) or hint
    raise CheckpointError(
        f"{folder} holds no weights: neither model.safetensors nor {PICKLES[0]}, nor an index of shards{hint}"
    )
