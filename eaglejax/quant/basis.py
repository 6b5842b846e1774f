"""Which basis a target's residual stream is in, and the file that says so.

A rotated target computes ``x Q`` wherever the model it was made from computes ``x``, and its final norm has
lost its weight to the head. Whoever reads its features needs both, the matrix and that weight: they are kept
together, under the id of the matrix, and never made again from a seed.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eaglejax.checkpoint.files import read_json
from eaglejax.checkpoint.hf import DESCRIPTION
from eaglejax.checkpoint.safetensors_io import Pending, SafetensorsFile, write_safetensors
from eaglejax.errors import CheckpointError, ConfigError

FILE = "optional/quarot.safetensors"
"""Where a target's folder keeps its basis; modelslim's place and key, which its description names too."""
UNKNOWN_ROTATION = "unknown rotation"
"""The basis of a target that is said to be rotated and comes without its matrix."""
MATRIX, GAMMA = "global_rotation", "final_norm"


def basis_id(matrix: np.ndarray) -> str:
    """Id of a basis: SHA-256 of the matrix [H, H] as little-endian f32, hexadecimal, the first 32 digits."""
    return hashlib.sha256(np.ascontiguousarray(matrix, "<f4").tobytes()).hexdigest()[:32]


@dataclasses.dataclass(frozen=True, eq=False)
class Basis:
    """A change of basis of the residual stream.

    ``matrix`` Q f32 [H, H], orthogonal: the stream of the rotated target is ``x Q``. ``gamma`` f32 [H]: the
    weight of the final norm (1 + w where norms store w) that was folded into the head, or None where the file
    does not hold it. Raises ConfigError for a matrix that is not orthogonal and for sizes that do not fit.
    """

    matrix: np.ndarray
    gamma: np.ndarray | None

    def __post_init__(self) -> None:
        shape = self.matrix.shape
        if len(shape) != 2 or shape[0] != shape[1]:
            raise ConfigError(f"a rotation has shape {shape}; it must be square")
        wide = self.matrix.astype(np.float64)
        error = float(np.max(np.abs(wide @ wide.T - np.eye(shape[0]))))
        if not error < 1e-3:
            raise ConfigError(
                f"the matrix [{shape[0]}, {shape[0]}] is no rotation: Q Qᵀ - 1 reaches {error:.2g}"
            )
        if self.gamma is not None and self.gamma.shape != shape[:1]:
            raise ConfigError(f"the final norm has {self.gamma.shape} weights for a rotation of {shape[0]}")

    @property
    def size(self) -> int:
        """H."""
        return self.matrix.shape[0]

    @functools.cached_property
    def id(self) -> str:
        """See :func:`basis_id`."""
        return basis_id(self.matrix)

    @property
    def identity(self) -> bool:
        """Whether norms were folded and nothing was turned."""
        return bool(np.array_equal(self.matrix, np.eye(self.size)))

    def need_gamma(self) -> np.ndarray:
        """``gamma`` f64; raises ConfigError where the file holds none."""
        if self.gamma is None:
            raise ConfigError(
                "the rotation was exported without the weight of the final norm, which has been folded into "
                "the head; name the original target (--original-target), which still has it"
            )
        return self.gamma.astype(np.float64)


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
    named = named_rotation(read_json(folder / DESCRIPTION, default={}))
    if named is not None:
        path = (folder / str(named)).resolve()
        if not path.is_relative_to(folder.resolve()) or not path.is_file():
            raise CheckpointError(
                f"{folder / DESCRIPTION} names the rotation {named!r}, which is not in the folder"
            )
        return path
    path = folder / FILE
    return path if path.is_file() else None
