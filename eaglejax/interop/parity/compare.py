"""How two recordings of the same tensors are compared: which entries count, how errors are measured, and what
is still rounding.

Needs NumPy alone, so that it runs on a device's host. The *expected* values are those of the JAX run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from eaglejax.interop.parity.names import LAYER_OPERATIONS, OPERATIONS, STAGES, Place

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
"""Largest error of one operation on equal inputs that is rounding, relative to a row's root mean square, by
the dtype of the computation."""

ATTENTION_TOLERANCE = {**TOLERANCE, "float32": 1e-4}
"""The same for attention: scores go into the hundreds in models with large key biases, and the softmax turns
the absolute rounding of their sums into a relative one (2.7e-5 in Qwen2.5-0.5B's first layer)."""

TIE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.03}
"""Widest near tie, by the dtype of the computation: a gap between two logits, or between two cumulative
log-probabilities of a draft tree."""


def tolerance(dtype: str, place: Place) -> float:
    """What counts as rounding for an operation computed in ``dtype``."""
    return (ATTENTION_TOLERANCE if place.operation == "attention" else TOLERANCE)[dtype]


_PARTS = ("step", "tree", "target", "verify", "observe")
_COARSE = {
    "step": (),
    "tree": ("tokens", "parent", "depth", "valid", "scores"),
    "target": ("tokens", "positions", "visible", "final_norm", "aux", "logits"),
    "verify": ("path", "accepted", "tokens", "count"),
    "observe": ("feature", "state"),
}


def is_coarse(place: Place) -> bool:
    """Whether a tensor is compared at every stage; the others where a difference has to be located."""
    return place.layer is None and place.operation in _COARSE[place.part]


def in_order(places: Iterable[Place]) -> list[Place]:
    """Places in the order of computation: a round's draft levels, tree, target forward, verification, and
    what the draft observes."""

    def key(place: Place) -> tuple[int, ...]:
        operations = list(OPERATIONS[place.part])
        if place.layer is None:
            at = (operations.index(place.operation), 0, 0)
        else:
            at = (operations.index("layers"), place.layer, list(LAYER_OPERATIONS).index(place.operation))
        return (STAGES.index(place.stage), place.index, _PARTS.index(place.part), place.step or 0, *at)

    return sorted(places, key=key)


def follows(place: Place, decision: Place) -> bool:
    """Whether a tensor of a stage depends on a choice made in the same stage."""
    return _PARTS.index(place.part) >= _PARTS.index(decision.part)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A tensor of the JAX run.

    ``values``: [1, ...] float32, float16, integers or bool; ``dtype``: what it was computed in (bfloat16 is
    widened). ``top`` [1, ..., k] int32: of the last axis only these entries were kept (the largest, best
    first), out of ``width``; None: all.
    """

    values: np.ndarray
    dtype: str
    top: np.ndarray | None = None
    width: int = 0

    @classmethod
    def of(cls, array: np.ndarray) -> Recorded:
        """A whole array, those of ``ml_dtypes`` too."""
        wide = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
        return cls(wide, array.dtype.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that was computed."""
        return self.values.shape if self.top is None else (*self.values.shape[:-1], self.width)

    def trimmed(self, count: int) -> Recorded:
        """With the ``count`` largest entries of the last axis alone."""
        if self.top is not None or self.values.shape[-1] <= count:
            return self
        order = np.argsort(-self.values, axis=-1, kind="stable")[..., :count].astype(np.int32)
        kept = np.take_along_axis(self.values, order, axis=-1)
        return Recorded(kept, self.dtype, order, self.values.shape[-1])


@dataclasses.dataclass(frozen=True)
class Committed:
    """What the JAX run held before a stage: ``keys``, ``values`` [1, Hkv, length, d] of each layer, by model
    ("target", "draft"), and the draft's last state ``feature`` [1, H]."""

    keys: dict[str, list[np.ndarray]]
    values: dict[str, list[np.ndarray]]
    feature: np.ndarray


@dataclasses.dataclass(frozen=True)
class Stage:
    """One prompt chunk ("prefill") or one round of the JAX run.

    ``tensors``: by name, in order of computation, those that ``is_coarse`` takes (perhaps fewer, where a
    recording had to be small), without padding. ``ended``: nothing comes after it. ``everything`` gives all
    tensors of the stage and ``committed`` the state before it, or None where a recording does not have them.
    """

    stage: str
    index: int
    tensors: dict[str, Recorded]
    ended: bool
    everything: Callable[[], dict[str, Recorded] | None]
    committed: Callable[[], Committed | None]

    @property
    def name(self) -> str:
        """Such as ``round/3``."""
        return f"{self.stage}/{self.index}"

    @property
    def chunk(self) -> int:
        """Tokens that the target's forward reads."""
        return len(self.value("target", "tokens"))

    def value(self, part: str, operation: str) -> np.ndarray:
        """Values of a tensor of this stage, of its one row."""
        values: np.ndarray = self.tensors[str(Place(self.stage, self.index, part, operation))].values[0]
        return values

    @property
    def extent(self) -> Extent:
        """Which entries of its tensors mean something."""
        count = int(self.value("verify", "count"))
        if self.stage == "prefill":
            return Extent(None, 0, count)
        return Extent(self.value("tree", "valid").astype(bool), int(self.value("verify", "accepted")), count)


@dataclasses.dataclass(frozen=True)
class Extent:
    """Which entries of a stage's tensors mean something.

    ``nodes`` [N] bool: nodes of the tree that are proposed (None for a prompt's chunk). ``accepted``: drafts
    kept. ``count``: tokens emitted.
    """

    nodes: np.ndarray | None
    accepted: int
    count: int

    def cut(self, place: Place, values: np.ndarray) -> np.ndarray:
        """The entries of ``values`` [1, ...] at ``place`` that mean something, without the row axis."""
        values = np.asarray(values[0])
        if place.part == "verify" and values.ndim:
            return values[: {"path": self.accepted + 1, "tokens": self.count}[place.operation]]
        if self.nodes is None or place.part == "step" or place.operation == "valid" or not values.ndim:
            return values
        if place.part == "observe":
            return values[: self.count]
        kept = values[self.nodes]
        return kept[:, self.nodes] if place.operation == "visible" else kept


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a tensor is from what was expected.

    ``shape``, ``dtype``: as recorded by the JAX run. ``max_abs``: largest absolute difference; ``relative``:
    root mean square of a row's difference over the row's own, the largest over all rows (a row is what one
    token has). ``index``: of the largest difference, in the recorded shape; ``expected`` and ``found`` there.
    ``wrong_rows``: rows whose error exceeds the tolerance, out of ``rows``. Numbers that are not finite on
    one side alone count as infinitely far. For integers and truth values every difference does.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    max_abs: float
    relative: float
    index: tuple[int, ...]
    expected: float
    found: float
    wrong_rows: tuple[int, ...] = ()
    rows: int = 0

    @property
    def exact(self) -> bool:
        """Integers or truth values, of which none may differ."""
        return _is_exact(self.dtype)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; what is infinite or not a number is text."""
        data = dataclasses.asdict(self)
        for key in ("max_abs", "relative", "expected", "found"):
            if not math.isfinite(data[key]):
                data[key] = str(data[key])
        return {
            **data,
            "shape": list(self.shape),
            "index": list(self.index),
            "wrong_rows": list(self.wrong_rows),
        }


def _is_exact(dtype: str) -> bool:
    return dtype == "bool" or dtype.startswith(("int", "uint"))


def difference(
    place: Place, expected: Recorded, found: np.ndarray, extent: Extent, allowed: float
) -> Difference:
    """Compare one tensor, rows within ``allowed``; where the shapes differ nothing else is looked at and the
    error is infinite."""
    dtype, name = expected.dtype, str(place)
    if expected.shape != found.shape:
        return Difference(name, expected.shape, dtype, math.inf, math.inf, (), math.nan, math.nan)
    # Positions are taken along, so that an index counts in the recorded shape and not in what was cut.
    places = np.arange(found.size).reshape(found.shape)
    if expected.top is not None:
        found, places = (np.take_along_axis(x, expected.top, axis=-1) for x in (found, places))
    a, b, at = (extent.cut(place, x) for x in (expected.values, found, places))
    if a.size == 0:
        return Difference(name, expected.shape, dtype, 0.0, 0.0, (), math.nan, math.nan)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    if place.operation == "scores":
        # The smaller a probability, the less its logarithm says about the tree.
        wide_a, wide_b = np.exp(wide_a), np.exp(wide_b)
    gaps = _gaps(wide_a, wide_b)
    errors = _errors(wide_a, gaps, place, exact=_is_exact(dtype))
    worst = int(gaps.argmax())
    return Difference(
        name=name,
        shape=expected.shape,
        dtype=dtype,
        max_abs=float(gaps.reshape(-1)[worst]),
        relative=float(errors.max()),
        index=tuple(int(i) for i in np.unravel_index(int(at.reshape(-1)[worst]), expected.shape)),
        expected=float(a.reshape(-1)[worst]),
        found=float(b.reshape(-1)[worst]),
        wrong_rows=tuple(int(i) for i in np.flatnonzero(~(errors <= allowed))),
        rows=len(errors),
    )


def _gaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b|; 0 where both are the same infinity or both not a number, infinite where one side alone is."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    both = np.isfinite(a) & np.isfinite(b)
    with np.errstate(invalid="ignore"):
        return np.where(same, 0.0, np.where(both, np.abs(a - b), np.inf))


def _errors(a: np.ndarray, gaps: np.ndarray, place: Place, *, exact: bool) -> np.ndarray:
    """rms(gap) / rms(a) of every row; infinite for integers that differ."""
    # The features of one token may differ in scale by orders of magnitude; probabilities are on one scale.
    rows = {"aux": math.prod(a.shape[:2]), "scores": 1}.get(place.operation, a.shape[0] if a.ndim else 1)
    gap = np.sqrt(np.mean(np.square(gaps.reshape(rows, -1)), axis=1))
    size = np.sqrt(np.mean(np.square(np.where(np.isfinite(a), a, 0.0).reshape(rows, -1)), axis=1))
    # A row of zeros has no scale: it is met exactly or not at all.
    scale = 0.0 if exact else size
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(gap == 0, 0.0, gap / scale)
