"""The second stage of a cascade: what the first leaves open is gone on with.

A network drafts as far as it was trained to, and is unsure of what it has not seen; a lookup may know how
the text that was guessed goes on. Where the text is likely to get and least is drafted behind, the parts that
read tokens alone draft once more, behind the guess.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax.drafts.base import Draft, Observation, Proposer
from eaglejax.drafts.cascade.merge import Distinct, Pool, by_depth, said
from eaglejax.sampling import RowSampling


def open_branches(found: Distinct, count: int) -> tuple[jax.Array, jax.Array]:
    """The ``count`` nodes [B, E] int32 of a pool that are most likely to be reached and then left: (places in
    the pool, the chance of that [B, E] f32; 0 where there is no such node).

    It is the chance of a node's path less what its children claim of it: the tokens that a round is expected
    to lack behind it.
    """
    batch, many = found.path.shape
    rows = jnp.arange(batch)[:, None]
    claimed = jnp.zeros((batch, many + 1)).at[rows, found.parent].add(found.path)[:, 1:]
    left = jnp.where(found.first, jnp.maximum(found.path - claimed, 0.0), 0.0)
    count = min(count, many)
    chance, nodes = jax.lax.top_k(left, count)
    return nodes.astype(jnp.int32), chance


def paths(pool: Pool, nodes: jax.Array, depth: int) -> jax.Array:
    """[B, E, D] int32: the tokens on the way from the root to each of ``nodes`` [B, E], itself included;
    zeros behind it."""
    batch, many = nodes.shape
    out, at, here = jnp.zeros((batch, many, depth), jnp.int32), nodes, jnp.ones(nodes.shape, bool)
    for _ in range(depth):
        token, level, above = (
            jnp.take_along_axis(x, jnp.maximum(at, 0), axis=1) for x in (pool.tokens, pool.depth, pool.parent)
        )
        place = jnp.arange(depth) == jnp.where(here, level - 1, -1)[:, :, None]
        out = jnp.where(place, token[:, :, None], out)
        at, here = above, here & (above >= 0)
    return out


@dataclasses.dataclass(frozen=True)
class Behind:
    """Guessed texts as if they had been committed: what a part observes and where it then drafts; all [B * E,
    ...]. ``row`` int32: of the batch."""

    row: jax.Array
    seen: Observation
    root: jax.Array
    lengths: jax.Array

    @classmethod
    def nodes(cls, root: jax.Array, lengths: jax.Array, pool: Pool, nodes: jax.Array, depth: int) -> Behind:
        """Behind each of ``nodes`` [B, E] of a pool whose root [B] sits at ``lengths`` [B]."""
        batch, many = nodes.shape
        row = jnp.repeat(jnp.arange(batch), many)
        following = paths(pool, nodes, depth).reshape(batch * many, depth)
        tokens = jnp.concatenate([root[row][:, None], following[:, :-1]], axis=1)
        count = jnp.take_along_axis(pool.depth, nodes, axis=1).reshape(-1)
        last = jnp.take_along_axis(pool.tokens, nodes, axis=1).reshape(-1)
        seen = Observation(tokens=tokens, following=following, start=lengths[row], count=count)
        return cls(row, seen, last, lengths[row] + count)

    def draft(self, part: Proposer, params: Any, state: Any, rows: RowSampling, keys: jax.Array) -> Draft:
        """What ``part``, which reads tokens alone, guesses there."""

        def of_row(x: jax.Array) -> jax.Array:
            return x[self.row]

        then = part.observe(params, jax.tree.map(of_row, state), self.seen)
        rows, keys = jax.tree.map(of_row, (rows, keys))
        return part.propose(params, then, self.root, self.lengths, rows, keys)[0]


def extended(
    pool: Pool, nodes: jax.Array, chance: jax.Array, drafts: Sequence[Draft], first_source: int
) -> Pool:
    """``pool`` with ``drafts`` [B * E, ...] hung below its ``nodes`` [B, E]; those of no ``chance`` [B, E]
    are not valid. Their sources count from ``first_source``."""
    batch, many = nodes.shape
    parts, first = [pool], pool.tokens.shape[1]
    level = jnp.take_along_axis(pool.depth, nodes, axis=1)
    for number, draft in enumerate(drafts):
        size = draft.tokens.shape[1] - 1
        places = first + size * jnp.arange(many)

        def laid(x: jax.Array, size: int = size) -> jax.Array:
            return x.reshape(batch, many, size + 1)[:, :, 1:]

        inner = laid(draft.parent)
        parent = jnp.where(inner > 0, inner - 1 + places[:, None], nodes[:, :, None])
        fields = (
            laid(draft.tokens),
            parent,
            laid(draft.depth) + level[:, :, None],
            laid(draft.valid) & (chance > 0)[:, :, None],
            jnp.full_like(parent, first_source + number),
            laid(said(draft)),
        )
        parts.append(Pool(*(x.reshape(batch, many * size) for x in fields)))
        first += many * size
    whole = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)
    return by_depth(whole)
