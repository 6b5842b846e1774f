"""Dataclass pytrees, and tables of arrays from which shapes, shardings and random weights are derived.

A module describes its weights once, as a nested dict (or a dataclass) whose leaves are ``ArrayInfo``.
Abstract values, shardings and initial values all come from that table, so that they cannot drift apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax.struct import dataclass as dataclass  # re-exported: a frozen dataclass registered as a pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def static(**kwargs: Any) -> Any:
    """A dataclass field that is part of the tree structure (hashable, a compile-time constant)."""
    return flax.struct.field(pytree_node=False, **kwargs)


Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


def normal(stddev: float = 0.02) -> Initializer:
    """Gaussian initialiser; drawn in f32 so that the draw does not depend on the storage dtype."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return (stddev * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return init


def constant(value: float) -> Initializer:
    """Initialiser that fills with one value."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        del key
        return jnp.full(shape, value, dtype)

    return init


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """One array of a module: shape, dtype, logical axis names (one a dimension, or None), initialiser."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    init: Initializer = dataclasses.field(default_factory=normal)

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"axes {self.axes} do not name the dimensions of shape {self.shape}")


def is_info(x: Any) -> bool:
    """True for a leaf of a table."""
    return isinstance(x, ArrayInfo)


def leaf_paths(table: Any) -> dict[str, ArrayInfo]:
    """The leaves of a table by dotted path (dict keys, sequence indices and field names), in tree order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(table, is_leaf=is_info)
    return {jax.tree_util.keystr(path, simple=True, separator="."): info for path, info in leaves}


def unflatten(table: Any, leaves: dict[str, Any]) -> Any:
    """A tree like ``table`` with the values of ``leaves`` (dotted path -> value)."""
    treedef = jax.tree.structure(table, is_leaf=is_info)
    return jax.tree.unflatten(treedef, [leaves[path] for path in leaf_paths(table)])


def abstract(table: Any) -> Any:
    """The table as ``jax.ShapeDtypeStruct`` leaves."""
    return jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), table, is_leaf=is_info)


def zeros(table: Any) -> Any:
    """Zeros for every leaf."""
    return jax.tree.map(lambda i: jnp.zeros(i.shape, i.dtype), table, is_leaf=is_info)


def nbytes(table: Any) -> int:
    """Bytes of all leaves, together."""
    leaves = jax.tree.leaves(table, is_leaf=is_info)
    return sum(math.prod(info.shape) * jnp.dtype(info.dtype).itemsize for info in leaves)


def initialize(table: Any, key: jax.Array) -> Any:
    """Random values for every leaf. Each leaf's key is folded from its place in the tree."""
    leaves, treedef = jax.tree.flatten(table, is_leaf=is_info)
    values = [info.init(jax.random.fold_in(key, n), info.shape, info.dtype) for n, info in enumerate(leaves)]
    return jax.tree.unflatten(treedef, values)


def shardings(table: Any, mesh: Mesh, rules: Mapping[str, str]) -> Any:
    """The table as ``NamedSharding`` leaves; ``rules``: logical axis -> mesh axis (absent: replicated).

    A dimension is replicated, too, where its mesh axis splits an earlier one already (experts before their
    width) or has a number of devices that does not divide it.
    """

    def of(info: ArrayInfo) -> NamedSharding:
        spec: list[str | None] = []
        for name, size in zip(info.axes, info.shape, strict=True):
            axis = rules.get(name) if name else None
            splits = axis in mesh.shape and axis not in spec and size % mesh.shape[axis] == 0
            spec.append(axis if splits else None)
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(of, table, is_leaf=is_info)
