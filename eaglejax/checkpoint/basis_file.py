"""The file in which a rotated target's folder keeps its basis."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eaglejax.checkpoint.files import read_json
from eaglejax.checkpoint.hf import description_path
from eaglejax.checkpoint.safetensors_io import Pending, SafetensorsFile, write_safetensors
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.rotation.basis import Basis

FILE = "optional/quarot.safetensors"
"""Where a target's folder keeps its basis; modelslim's place and key, which its description names too."""
MATRIX, GAMMA = "global_rotation", "final_norm"


def write_basis(folder: Path, basis: Basis) -> Path:
    """Write ``optional/quarot.safetensors`` into a target's ``folder``: f32 ``global_rotation`` [H, H] and
    ``final_norm`` [H]; metadata ``basis`` is the id."""
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {MATRIX: basis.matrix} | ({} if basis.gamma is None else {GAMMA: basis.gamma})

    def pending(value: np.ndarray) -> Pending:
        return Pending(value.shape, np.dtype(np.float32), lambda: value.astype(np.float32))

    write_safetensors(path, {k: pending(v) for k, v in arrays.items()}, {"format": "pt", "basis": basis.id})
    return path


def read_basis(path: Path) -> Basis:
    """The basis in a file. Raises CheckpointError for a missing matrix and for one that is not what its id
    says."""
    file = SafetensorsFile([path])
    if MATRIX not in file.names():
        raise CheckpointError(
            f"{path} holds no tensor {MATRIX!r}: {', '.join(sorted(file.names())) or 'nothing'}"
        )
    gamma = file.array(GAMMA).astype(np.float32) if GAMMA in file.names() else None
    try:
        basis = Basis(file.array(MATRIX).astype(np.float32), gamma)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    stated = file.metadata.get("basis")
    if stated not in (None, basis.id):
        raise CheckpointError(f"{path} says basis {stated}, its matrix is {basis.id}: the file was changed")
    return basis


def named_rotation(description: Mapping[str, Any]) -> Any:
    """What modelslim's ``description`` names as the file of its rotation, relative to the folder; None for
    nothing."""
    found: Any = description.get("optional")
    for key in ("quarot", "rotation_map", MATRIX):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def find_basis(folder: Path) -> Path | None:
    """The file with the basis of the target in ``folder``: where its description says, else the usual place.

    Raises CheckpointError when the description names a file that is not there.
    """
    description = description_path(folder)
    named = None if description is None else named_rotation(read_json(description))
    if named is not None:
        # By name alone: in the Hub's cache every file of a folder is a link to somewhere else.
        path = folder / os.path.normpath(str(named))
        if not path.is_relative_to(folder) or ".." in path.parts[len(folder.parts) :] or not path.is_file():
            raise CheckpointError(
                f"{description} names the rotation {named!r:.200}, which is not in the folder"
            )
        return path
    path = folder / FILE
    return path if path.is_file() else None
