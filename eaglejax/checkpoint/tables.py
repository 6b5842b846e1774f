"""Name tables: how the tensors of a file become the leaves of a parameter table.

A format is data: a list of ``Rule``, each of which names a leaf, the tensors it is made of and a layout.
``plan`` joins the rules with a parameter table and a file, strictly: every leaf is made by exactly one rule,
every tensor of the file is used exactly once or listed as ignorable, and every shape fits. Only then is
anything read. ``materialize`` fills one leaf at a time, a few rows at a time, so that a model is never held
twice.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from eaglejax import pytree
from eaglejax.checkpoint.safetensors_io import ALIGNMENT
from eaglejax.devices.adapter import MeshDefaults
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.models.memory import require_free


class TensorStore(Protocol):
    """What a plan needs from a file format."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def rows(self, name: str, start: int, stop: int) -> np.ndarray: ...


Rows = np.ndarray
"""[rows, last dimension] as the store returns them: any float dtype."""


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The rows ``index`` [n] of a stored tensor of ``of`` rows, in the leaf's order. The leaves that one
    tensor is split into take each of its rows once."""

    index: np.ndarray
    of: int


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns ``taken`` of a stored tensor of ``of`` columns, as :class:`Part` is of rows."""

    taken: range
    of: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a stored tensor relates to its leaf.

    ``transposed``: the last two dimensions are swapped (files keep weights as [out, in]). ``rows``: maps all
    rows of the tensor to those of the leaf (None: as they are, which lets them stream); ``value``: maps the
    values in f32. ``part``: the leaf is some of the tensor's rows; ``columns``: some of its columns.
    ``depthwise``: the tensor has a dimension of 1 before its last (convolutions).
    """

    transposed: bool = False
    rows: Callable[[Rows], Rows] | None = None
    value: Callable[[Rows], Rows] | None = None
    part: Part | None = None
    columns: Columns | None = None
    depthwise: bool = False

    @property
    def whole(self) -> bool:
        """Whether the tensor is the leaf, transposed at most."""
        return self == Layout(self.transposed)


COPY = Layout()
TRANSPOSE = Layout(transposed=True)
MINUS_ONE = Layout(value=lambda weight: weight - 1)
"""A norm weight that the file stores as 1 + w."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """``leaf`` is a dotted path of the parameter table, ``name`` a tensor name.

    ``{l}`` stands for the layer in both. ``{e}`` in ``name`` stands for every expert: their tensors are
    stacked on a new leading dimension.
    """

    leaf: str
    name: str
    layout: Layout = COPY


@dataclasses.dataclass(frozen=True)
class Assignment:
    """One leaf and the tensors (several: stacked) that make it."""

    leaf: str
    info: pytree.ArrayInfo
    names: tuple[str, ...]
    layout: Layout
    stacked: bool = False


def plan(
    table: Any, rules: Sequence[Rule], store: TensorStore, *, where: str, ignorable: Sequence[str] = ()
) -> list[Assignment]:
    """Join a parameter table, a name table and a file.

    ``ignorable``: regular expressions of tensor names that carry no parameters. ``where`` names the file in
    errors. Raises ``CheckpointError`` that lists missing tensors, tensors that no rule maps, tensors mapped
    twice and shapes that do not fit.
    """
    present = set(store.names())
    assignments, missing = [], []
    for leaf, info in pytree.leaf_paths(table).items():
        possible = list(candidates(leaf, info, rules))
        found = [c for c in possible if present.issuperset(c.names)]
        if len(found) > 1:
            raise CheckpointError(
                f"{where} holds {leaf} twice: as {_some([n for c in found for n in c.names])}; keep one of "
                "them"
            )
        if found:
            assignments.append(found[0])
        else:
            lists = [[n for n in c.names if n not in present] for c in possible]
            shortest = sorted(lists, key=lambda names: len(names))[:1]
            missing += shortest[0] if shortest else [f"(no name is known for {leaf})"]
    if missing:
        raise CheckpointError(
            f"{where} lacks {len(missing)} tensors that its configuration asks for: {_some(missing)}"
        )
    used: dict[str, str] = {}
    split: dict[str, list[Layout]] = {}
    for assignment in assignments:
        for name in assignment.names:
            layout = assignment.layout
            partial = layout.part is not None or layout.columns is not None
            if partial and (name in split or name not in used):
                split.setdefault(name, []).append(layout)
            elif name in used:
                raise CheckpointError(
                    f"{where}: tensor {name!r} would fill both {used[name]} and {assignment.leaf}"
                )
            used[name] = assignment.leaf
        _check_shape(assignment, store, where)
    for name, layouts in split.items():
        if not _make_up(layouts):
            raise CheckpointError(f"{where}: the leaves that tensor {name!r} is split into do not make it up")
    patterns = [re.compile(pattern) for pattern in ignorable]
    unknown = [n for n in present.difference(used) if not any(p.fullmatch(n) for p in patterns)]
    if unknown:
        raise CheckpointError(
            f"{where} holds {len(unknown)} tensors that its configuration has no use for: "
            f"{_some(sorted(unknown))}"
        )
    return assignments


def _make_up(layouts: Sequence[Layout]) -> bool:
    """Whether parts of one tensor take each of its rows, or columns, once."""
    rows = [layout.part for layout in layouts if layout.part is not None]
    if rows:
        taken = np.sort(np.concatenate([part.index for part in rows]))
        return len(rows) == len(layouts) and np.array_equal(taken, np.arange(rows[0].of))
    columns = [layout.columns for layout in layouts if layout.columns is not None]
    return sorted(n for c in columns for n in c.taken) == [*range(columns[0].of)]


_NUMBERED = re.compile(r"(?:^|\.)(?:layers|blk)\.(\d{1,9})\.")


def check_layers(names: Collection[str], layers: int, where: str) -> None:
    """Refuse a configuration of more layers than a file has tensors of, before anything is made for them."""
    found = 1 + max((int(m[1]) for name in names if (m := _NUMBERED.search(name))), default=-1)
    if layers > found:
        raise CheckpointError(
            f"{where} lacks layers: its configuration asks for {layers}, there are tensors of {found}"
        )


def candidates(leaf: str, info: pytree.ArrayInfo, rules: Sequence[Rule]) -> Iterator[Assignment]:
    """Every way in which the rules can make a leaf; whether a file holds the tensors is not asked."""
    for rule in rules:
        match = re.fullmatch(re.escape(rule.leaf).replace(r"\{l\}", r"(?P<l>\d+)"), leaf)
        if match:
            layer = match.groupdict().get("l", "")
            stacked = "{e}" in rule.name
            names = tuple(rule.name.format(l=layer, e=e) for e in range(info.shape[0] if stacked else 1))
            yield Assignment(leaf, info, names, rule.layout, stacked)


def _stored_shape(assignment: Assignment) -> tuple[int, ...]:
    """The shape of what each tensor of the assignment gives to the leaf."""
    shape = assignment.info.shape[1:] if assignment.stacked else assignment.info.shape
    return (*shape[:-2], shape[-1], shape[-2]) if assignment.layout.transposed else shape


def _check_shape(assignment: Assignment, store: TensorStore, where: str) -> None:
    right, layout = _stored_shape(assignment), assignment.layout
    if layout.part is not None:
        right = (layout.part.of, *right[1:])
    if layout.columns is not None:
        right = (*right[:-1], layout.columns.of)
    if layout.depthwise:
        right = (*right[:-1], 1, right[-1])
    for name in assignment.names:
        if store.shape(name) != right:
            raise CheckpointError(
                f"{where}: tensor {name!r} has shape {store.shape(name)}, the configuration asks for {right}"
            )


def _some(names: Sequence[str], most: int = 6) -> str:
    """The first few names, for an error message."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised array whose data starts at a multiple of ``ALIGNMENT``, so that XLA on CPU can adopt
    it."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def placement(
    table: Any, mesh: Mesh | None, where: str, *, mapped: bool = False
) -> Callable[[str, np.ndarray], jax.Array]:
    """How a leaf of the table, by its path, comes to where it is used: in one piece on the default device,
    or, with a ``mesh``, to each device its part of it, which is all that it ever holds. ``mapped``: leaves
    are parts of a mapped file, which a CPU uses where they lie. Raises ConfigError for a mesh of axes that
    are not known, and for weights, those of ``where``, that memory has no room for."""
    if not (mapped and jax.default_backend() == "cpu"):
        sizes = [math.prod(i.shape) * np.dtype(i.dtype).itemsize for i in pytree.leaf_paths(table).values()]
        require_free(
            f"the model in {where}",
            sum(sizes) // (1 if mesh is None else mesh.devices.size),
            "take a narrower dtype or fewer bits (quant), or divide it among more devices (mesh)",
        )
    if mesh is None:
        return lambda path, value: jax.device_put(value, may_alias=True)
    defaults = MeshDefaults()
    if not set(defaults.axes) & set(mesh.axis_names):
        raise ConfigError(f"the mesh has the axes {mesh.axis_names}; known are {', '.join(defaults.axes)}")
    places = pytree.shardings(table, mesh, dict(defaults.rules))
    named = {
        jax.tree_util.keystr(path, simple=True, separator="."): sharding
        for path, sharding in jax.tree_util.tree_flatten_with_path(places)[0]
    }
    return lambda path, value: jax.device_put(value, named[path])


_CHUNK_ELEMENTS = 1 << 19


def materialize(assignment: Assignment, store: TensorStore) -> np.ndarray:
    """The leaf's value in the dtype of its table entry."""
    out = aligned_empty(assignment.info.shape, np.dtype(assignment.info.dtype))
    layout, stored = assignment.layout, _stored_shape(assignment)
    if layout.part is not None:
        return _some_rows(assignment, layout.part, store, out)
    width = stored[-1] if stored else 1
    # Every leaf is a stack of matrices [rows, width] as stored; vectors are one row.
    height = stored[-2] if len(stored) > 1 else 1
    matrices = out.reshape(-1, *((width, height) if layout.transposed else (height, width)))
    per_name = matrices.shape[0] // len(assignment.names)
    step = height if layout.rows else max(1, _CHUNK_ELEMENTS // max(width, 1))
    for number, matrix in enumerate(matrices):
        name, first = assignment.names[number // per_name], number % per_name * height
        target = matrix.T if layout.transposed else matrix
        for start in range(0, height, step):
            stop = min(start + step, height)
            rows = store.rows(name, first + start, first + stop)
            if layout.value:
                rows = layout.value(rows.astype(np.float32))
            rows = layout.rows(rows) if layout.rows else rows
            if layout.columns is not None:
                taken = layout.columns.taken
                rows = rows[:, taken.start : taken.stop : taken.step]
            # Cast first: a cast into strided memory goes element by element.
            target[start:stop] = rows.astype(out.dtype, copy=False)
    return out


def _some_rows(assignment: Assignment, part: Part, store: TensorStore, out: np.ndarray) -> np.ndarray:
    """``out`` filled with rows of one stored tensor."""
    (name,) = assignment.names
    layout = assignment.layout
    whole = out.ndim == 1
    rows = store.rows(name, 0, 1).reshape(-1, 1) if whole else store.rows(name, 0, part.of)
    rows = rows[part.index]
    if layout.value:
        rows = layout.value(rows.astype(np.float32))
    target = out.reshape(-1, 1) if whole else out.T if layout.transposed else out
    target[...] = rows.astype(out.dtype, copy=False)
    return out
