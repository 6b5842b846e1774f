"""What a model keeps of each row's text: one ``LayerCache`` a layer, and a length a row.

A forward over N new tokens writes them behind the lengths without moving these; ``Cache.advance`` then keeps
the first of them and ``Cache.commit`` keeps one path of a tree. What lies behind the lengths is never read. A
kind of layer (keys and values, a compressed latent, a recurrent state) is one class; nothing here or above
asks which it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.errors import ConfigError
from eaglejax.nn.visible import Visible
from eaglejax.pytree import ArrayInfo

SLOTS = "slots"
"""Logical axis of cache slots."""


class LayerCache(Protocol):
    """The memory of one layer: a pytree with a leading batch axis in every array that belongs to rows.

    How new tokens are written and attended is between a kind of cache and its kind of layer. A *table* is the
    same pytree with ``ArrayInfo`` leaves: shapes, dtypes and logical axes, hence bytes and shardings.
    """

    @property
    def capacity(self) -> int | None:
        """Slots a row; None for a memory that does not grow."""

    def commit(self, lengths: jax.Array, path: jax.Array | None, kept: jax.Array) -> Self:
        """Keep the first ``kept[b]`` nodes of ``path`` [B, P] among the new tokens behind ``lengths`` [B].

        ``path`` None: of the new tokens in their order. Entries behind ``kept`` are valid and ignored.
        """

    def insert(self, slot: jax.Array, other: Self, row: jax.Array) -> Self:
        """Row ``slot`` becomes row ``row`` of ``other``, whose capacity is no larger."""

    def release(self, slot: jax.Array) -> Self:
        """Row ``slot`` begins a new text."""


@pytree.dataclass
class Placement:
    """Where the N new tokens of a forward stand, as every layer of the model needs it.

    ``lengths`` [B] int32: committed tokens; ``positions`` [B, N] int32 of the new ones; ``visible``: who sees
    whom among them. ``slot_positions`` [B, M] int32: positions of all M new slots where they are more than
    these N (None: ``positions``).
    """

    lengths: jax.Array
    positions: jax.Array
    visible: Visible
    slot_positions: jax.Array | None = None


@pytree.dataclass
class Cache:
    """``layers``: one a layer; ``lengths`` [B] int32: committed tokens of each row.

    Slot s of a row belongs to the token at position s: committed tokens are always contiguous. The caller
    guarantees ``lengths + N <= capacity`` before each forward.
    """

    layers: tuple[Any, ...]
    lengths: jax.Array

    @property
    def capacity(self) -> int | None:
        """Slots a row (S); None where no layer has any."""
        return min((n for layer in self.layers if (n := layer.capacity) is not None), default=None)

    def advance(self, count: jax.Array) -> Cache:
        """Commit the first ``count[b]`` of the tokens written last."""
        return self.commit(None, count)

    def commit(self, path: jax.Array | None, kept: jax.Array) -> Cache:
        """Keep ``kept[b]`` nodes of one root-to-leaf path of the tree written last, next to the committed
        tokens.

        ``path`` [B, D+1] int32: node index at each depth, the root first; None where node i always sits at
        depth i, so that nothing has to move.
        """
        return Cache(
            tuple(layer.commit(self.lengths, path, kept) for layer in self.layers), self.lengths + kept
        )

    def insert(self, slot: jax.Array | int, other: Cache, row: jax.Array | int = 0) -> Cache:
        """A text joins: row ``slot`` becomes row ``row`` of ``other``, a cache of the same model and format.

        Raises ConfigError where ``other`` has more slots a row.
        """
        if self.capacity is not None and (other.capacity or 0) > self.capacity:
            raise ConfigError(
                f"a row of {other.capacity} slots does not fit a cache of {self.capacity}; make it larger"
            )
        slot, row = jnp.asarray(slot, jnp.int32), jnp.asarray(row, jnp.int32)
        layers = (a.insert(slot, b, row) for a, b in zip(self.layers, other.layers, strict=True))
        return Cache(tuple(layers), self.lengths.at[slot].set(other.lengths[row]))

    def release(self, slot: jax.Array | int) -> Cache:
        """A text leaves: row ``slot`` is empty."""
        slot = jnp.asarray(slot, jnp.int32)
        return Cache(tuple(layer.release(slot) for layer in self.layers), self.lengths.at[slot].set(0))


@pytree.dataclass
class CacheScales:
    """Calibrated scales of an int8-static cache: ``k``, ``v``, one a layer, [Hkv, head_dim] f32, positive.

    A channel's number x is stored as x / scale, rounded and cut to [-127, 127].
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]


def table(layers: tuple[Any, ...], batch: int) -> Cache:
    """The table of a cache of ``batch`` rows, from its layers' tables."""
    return Cache(layers, ArrayInfo((batch,), jnp.int32, ("batch",)))  # type: ignore[arg-type]


def put_row(own: jax.Array, slot: jax.Array, other: jax.Array, row: jax.Array) -> jax.Array:
    """``own`` [B, ...] with row ``row`` of ``other`` at ``slot``; a shorter axis fills its beginning."""
    one = jax.lax.dynamic_slice_in_dim(other, row, 1)
    return jax.lax.dynamic_update_slice(own, one.astype(own.dtype), (slot, *[0] * (own.ndim - 1)))


def rewind(cache: Cache, lengths: jax.Array) -> Cache:
    """The cache with fewer committed tokens, ``lengths`` [B]: those behind are as if never committed.

    Raises ConfigError where a layer's memory does not grow, for what it took in cannot be taken out.
    """
    if any(layer.capacity is None for layer in cache.layers):
        raise ConfigError("a recurrent layer's state cannot go back to an earlier token")
    return dataclasses.replace(cache, lengths=lengths)
