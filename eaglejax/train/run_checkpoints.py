"""Checkpoints of a training run: everything that the next update depends on, in one folder that exists whole
or not at all.

``checkpoints/update-00000200/`` holds ``state/`` (weights, optimiser, counters, by Orbax) and ``run.json``
(the data stream's position, scores, versions). It is written under another name and renamed. ``latest`` is
the highest number; ``best.json`` names the best one, which is kept whatever its age.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from eaglejax.checkpoint.files import read_json, write_text
from eaglejax.errors import CheckpointError, MismatchError
from eaglejax.train.state import TrainState

_PREFIX = "update-"
_VERSIONED = ("eaglejax", "jax", "optax", "orbax-checkpoint", "grain")


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint read back. ``data``: the stream's position; ``binds``: what the run was about."""

    state: TrainState
    data: Any
    update: int


class RunCheckpoints:
    """The checkpoints of one run.

    ``binds``: what a checkpoint belongs to (settings that shape the state, vocabulary key); one made under
    others is refused by ``restore`` with every difference named. ``keep``: latest ones that stay.
    """

    def __init__(self, folder: Path, binds: dict[str, Any], keep: int) -> None:
        self.folder, self.binds, self.keep = folder, binds, keep
        folder.mkdir(parents=True, exist_ok=True)
        for stray in folder.glob(".update-*"):
            shutil.rmtree(stray)

    def updates(self) -> list[int]:
        """Numbers of the checkpoints, ascending."""
        return sorted(int(p.name.removeprefix(_PREFIX)) for p in self.folder.glob(f"{_PREFIX}*"))

    @property
    def latest(self) -> int | None:
        """The newest checkpoint's number, None without any."""
        return max(self.updates(), default=None)

    @property
    def best(self) -> tuple[int, float] | None:
        """(number, score) of the best checkpoint, None before the first evaluation."""
        found = read_json(self.folder / "best.json", default={"update": None})
        return None if found["update"] is None else (found["update"], found["score"])

    def path(self, update: int) -> Path:
        """The folder of one checkpoint."""
        return self.folder / f"{_PREFIX}{update:08d}"

    def save(self, state: TrainState, data: Any, *, score: float | None = None) -> Path:
        """Write one checkpoint; the same update is not written twice. A ``score`` above the best so far
        (higher is better) makes it the best one."""
        update = int(state.update)
        final = self.path(update)
        if not final.exists():
            temporary = self.folder / f".{final.name}"
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            with ocp.StandardCheckpointer() as writer:
                writer.save((temporary / "state").absolute(), state)
            versions = {name: _version(name) for name in _VERSIONED}
            document = {"update": update, "data": data, "binds": self.binds, "versions": versions}
            (temporary / "run.json").write_text(json.dumps(document, indent=2), encoding="utf-8")
            os.replace(temporary, final)
        if score is not None and (self.best is None or score > self.best[1]):
            write_text(self.folder / "best.json", json.dumps({"update": update, "score": score}))
        self._prune()
        return final

    def restore(self, like: TrainState, update: int | None = None) -> Restored:
        """Read a checkpoint, the latest by default; ``like`` gives shapes, dtypes and shardings.

        Raises CheckpointError when there is none, and MismatchError when it belongs to another run. What an
        earlier version did not write down of a run is not compared.
        """
        update = self.latest if update is None else update
        if update is None or not self.path(update).is_dir():
            raise CheckpointError(
                f"{self.folder} holds no checkpoint{'' if update is None else f' {update}'}"
            )
        document = read_json(self.path(update) / "run.json")
        found, wanted = document["binds"], json.loads(json.dumps(self.binds))
        wrong = [
            f"{name} was {found[name]!r} and is {wanted.get(name)!r}"
            for name in sorted(found)
            if found[name] != wanted.get(name)
        ]
        if wrong:
            raise MismatchError(
                f"{self.path(update)} belongs to another run: {'; '.join(wrong)}. Name a new folder for "
                "a new run"
            )
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        with ocp.StandardCheckpointer() as reader:
            state = reader.restore((self.path(update) / "state").absolute(), shapes)
        return Restored(state, document["data"], update)

    def _prune(self) -> None:
        best = self.best
        for update in self.updates()[: -self.keep]:
            if best is None or update != best[0]:
                shutil.rmtree(self.path(update))


def _version(package: str) -> str:
    """The package's version; a checkout that is run without being installed has none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
