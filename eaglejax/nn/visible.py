"""Who sees whom in a forward over N new tokens; all but ``Selected`` and ``Chunked`` see the whole committed
prefix.

An implementation of attention asks for what it reads: the kernels for the dense matrix among ``new`` slots,
XLA for a mask over cache slots (``sees``). Nothing else makes a mask.

The M new slots are those behind a row's prefix that are spoken of: N, or more where the queries are the last
N of them and the others were written by earlier forwards of the same round.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp

from eaglejax import pytree


class Visible(Protocol):
    """See the module's text; ``n`` is the number of queries, N."""

    def slots(self, n: int) -> int:
        """M."""

    def refusal(self, batch: int, n: int) -> str | None:
        """Why this does not speak of ``batch`` rows of ``n`` queries, or None."""

    def sees(self, n: int, slot: jax.Array, lengths: jax.Array) -> jax.Array:
        """[B, N, S] bool: whether each query sees ``slot`` [B, S] int32 of its row, whose prefix has
        ``lengths`` [B] slots."""

    def new(self, n: int, lengths: jax.Array) -> jax.Array:
        """[B, N, M] bool: which new slots each query sees."""


@pytree.dataclass
class Causal:
    """Each new token sees itself and those before it: a prompt, one token, a chain.

    ``documents`` [B, N] int: tokens of different documents, packed into one row, do not see each other.
    """

    documents: jax.Array | None = None

    def slots(self, n: int) -> int:
        """N."""
        return n

    def refusal(self, batch: int, n: int) -> str | None:
        """See :class:`Visible`."""
        if self.documents is None or self.documents.shape == (batch, n):
            return None
        return f"documents {self.documents.shape} are not {(batch, n)}"

    def sees(self, n: int, slot: jax.Array, lengths: jax.Array) -> jax.Array:
        """See :class:`Visible`."""
        node = slot - lengths[:, None]
        seen = node[:, None] <= jnp.arange(n)[:, None]
        if self.documents is None:
            return seen
        theirs = jnp.take_along_axis(
            self.documents, jnp.clip(node, 0, n - 1), axis=1, mode="promise_in_bounds"
        )
        return seen & ((node < 0)[:, None] | (self.documents[:, :, None] == theirs[:, None]))

    def new(self, n: int, lengths: jax.Array) -> jax.Array:
        """See :class:`Visible`."""
        order = jnp.broadcast_to(jnp.tril(jnp.ones((n, n), bool)), (lengths.shape[0], n, n))
        if self.documents is None:
            return order
        return order & (self.documents[:, :, None] == self.documents[:, None])


@pytree.dataclass
class Full:
    """Every new token sees every other: a block whose tokens are guessed together."""

    def slots(self, n: int) -> int:
        """N."""
        return n

    def refusal(self, batch: int, n: int) -> str | None:
        """See :class:`Visible`."""
        del batch, n
        return None

    def sees(self, n: int, slot: jax.Array, lengths: jax.Array) -> jax.Array:
        """See :class:`Visible`."""
        seen = slot < lengths[:, None] + n
        return jnp.broadcast_to(seen[:, None], (slot.shape[0], n, slot.shape[1]))

    def new(self, n: int, lengths: jax.Array) -> jax.Array:
        """See :class:`Visible`."""
        return jnp.ones((lengths.shape[0], n, n), bool)


@pytree.dataclass
class Seen:
    """The matrix among new slots itself, for those that hold it anyway.

    ``matrix`` [B, N, M] bool, or [1, N, M] for all rows alike. Every query should see itself.
    """

    matrix: jax.Array

    def slots(self, n: int) -> int:
        """M."""
        del n
        return self.matrix.shape[2]

    def refusal(self, batch: int, n: int) -> str | None:
        """See :class:`Visible`."""
        b, queries, slots = self.matrix.shape
        if b in (1, batch) and queries == n <= slots:
            return None
        return f"the matrix {self.matrix.shape} is not ({batch}, {n}, {n} or more)"

    def sees(self, n: int, slot: jax.Array, lengths: jax.Array) -> jax.Array:
        """See :class:`Visible`."""
        node, m = slot - lengths[:, None], self.matrix.shape[2]
        among = jnp.take_along_axis(
            self.new(n, lengths), jnp.clip(node, 0, m - 1)[:, None], axis=2, mode="promise_in_bounds"
        )
        return (node < 0)[:, None] | (node < m)[:, None] & among

    def new(self, n: int, lengths: jax.Array) -> jax.Array:
        """See :class:`Visible`."""
        return jnp.broadcast_to(self.matrix, (lengths.shape[0], n, self.matrix.shape[2]))


@pytree.dataclass
class Tree(Seen):
    """A tree, each node of which sees the path from the root to itself: its ancestor-or-self matrix.

    The matrix is made of the nodes' parents once a round (``drafts.tree.ancestors``), not once a layer,
    because sampling asks for it too. A layer that must know that what a token sees is one path, as a
    recurrent one does, takes this or :class:`Causal` and no other.
    """


@pytree.dataclass
class Chunked:
    """What ``inner`` lets a query see, of the chunk of ``size`` positions that the query stands in (Llama 4).

    ``positions`` [B, N] of the queries, ``places`` [B, M] of the new slots; a prefix slot's is its number.
    """

    inner: Visible
    positions: jax.Array
    places: jax.Array
    size: int = pytree.static()

    def slots(self, n: int) -> int:
        """M."""
        return self.inner.slots(n)

    def refusal(self, batch: int, n: int) -> str | None:
        """See :class:`Visible`."""
        return self.inner.refusal(batch, n)

    def sees(self, n: int, slot: jax.Array, lengths: jax.Array) -> jax.Array:
        """See :class:`Visible`."""
        node = slot - lengths[:, None]
        new = jnp.take_along_axis(
            self.places, jnp.clip(node, 0, self.places.shape[1] - 1), axis=1, mode="promise_in_bounds"
        )
        place = jnp.where(node < 0, slot, new)
        same = place[:, None] // self.size == self.positions[:, :, None] // self.size
        return same & self.inner.sees(n, slot, lengths)

    def new(self, n: int, lengths: jax.Array) -> jax.Array:
        """See :class:`Visible`."""
        same = self.places[:, None] // self.size == self.positions[:, :, None] // self.size
        return same & self.inner.new(n, lengths)


@pytree.dataclass
class Selected:
    """The cache slots that each query sees, chosen by a layer: ``chosen`` [B, N, K] int32, -1 for none.

    Slots of the prefix and of new tokens alike, distinct; whoever chooses keeps to what a query may see.
    ``new_slots`` is M.
    """

    chosen: jax.Array
    new_slots: int = pytree.static()

    def slots(self, n: int) -> int:
        """M."""
        del n
        return self.new_slots

    def refusal(self, batch: int, n: int) -> str | None:
        """See :class:`Visible`."""
        if self.chosen.shape[:2] == (batch, n) and n <= self.new_slots:
            return None
        return f"chosen {self.chosen.shape} is not ({batch}, {n}, K), or {n} queries exceed {self.new_slots}"

    def sees(self, n: int, slot: jax.Array, lengths: jax.Array) -> jax.Array:
        """See :class:`Visible`."""
        del n, lengths
        return (self.chosen[:, :, :, None] == slot[:, None, None]).any(2)

    def new(self, n: int, lengths: jax.Array) -> jax.Array:
        """See :class:`Visible`."""
        return self.sees(n, lengths[:, None] + jnp.arange(self.new_slots), lengths)
