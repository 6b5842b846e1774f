"""Which basis a target's residual stream is in.

A rotated target computes ``x Q`` wherever the model it was made from computes ``x``, and its final norm has
lost its weight to the head. Whoever reads its features needs both, the matrix and that weight: they are kept
together, under the id of the matrix, and never made again from a seed.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib

import numpy as np

from eaglejax.errors import ConfigError

UNKNOWN_ROTATION = "unknown rotation"
"""The basis of a target that is said to be rotated and comes without its matrix."""


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
