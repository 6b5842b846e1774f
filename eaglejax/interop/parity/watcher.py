"""What sees every tensor of a torch run: it keeps, compares, and leads."""

from __future__ import annotations

import numpy as np

from eaglejax.interop.backends.arrays import to_numpy, to_tensor
from eaglejax.interop.backends.torch_import import torch
from eaglejax.interop.parity.compare import Difference, Extent, Recorded, difference, is_coarse, tolerance
from eaglejax.interop.parity.names import parse


class Watcher:
    """What a ``TorchRunner`` calls with every tensor.

    It keeps the coarse ones; in a led run it compares all that ``lead`` has and overwrites them. The tensor
    called ``keep`` is ``kept`` as it was found.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self.keep = ""
        self.kept: np.ndarray | None = None
        self.begin(None, Extent(None, 0, 0))

    def begin(self, lead: dict[str, Recorded] | None, extent: Extent) -> None:
        """Before a stage is run."""
        self._lead, self._extent = lead, extent
        self.found: dict[str, np.ndarray] = {}
        self.differences: dict[str, Difference] = {}
        self.hints: dict[str, str] = {}

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        place = parse(name)
        if is_coarse(place):
            self.found[name] = np.array(to_numpy(tensor))
        if self._lead is None or name not in self._lead:
            return
        expected, found = self._lead[name], to_numpy(tensor)
        if name == self.keep:
            self.kept = np.array(found)
        allowed = tolerance(self._dtype, place)
        self.differences[name] = difference(place, expected, found, self._extent, allowed)
        if self.differences[name].wrong_rows and place.operation in ("q", "k"):
            self.hints[name] = _rotation_hint(expected.values, found, allowed)
        shared = any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        # A tensor that repeats another's memory has been led where that one was recorded.
        if expected.top is None and tensor.shape == expected.shape and not shared:
            tensor.copy_(to_tensor(expected.values).to(tensor.dtype))


def _rotation_hint(expected: np.ndarray, found: np.ndarray, allowed: float) -> str:
    """A rotation leaves the length of every head as it is; another weight does not."""
    lengths = [np.linalg.norm(x.astype(np.float64), axis=-1) for x in (expected, found)]
    kept = np.abs(lengths[0] - lengths[1]) <= allowed * np.maximum(lengths[0], 1e-30)
    if kept.all():
        return "every head has its right length: the rotation is wrong (frequencies, positions, pairing)"
    return "the heads' lengths are wrong too: it is not the rotation alone"
