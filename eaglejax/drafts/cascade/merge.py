"""Several drafts of one text as one tree: equal paths become one, and the likeliest nodes stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.drafts.base import Draft, Proposal
from eaglejax.drafts.grow import rerank


@pytree.dataclass
class Pool:
    """The nodes of several drafts beside each other, roots left out, a parent before its child.

    ``tokens``, ``depth`` [B, M] int32, ``valid`` [B, M] bool; ``parent`` [B, M] int32: place in the pool, -1
    for the root. ``source`` [B, M] int32: which draft a node is of. ``chance`` [B, M] f32: what that draft
    says of it, given its parent; -1 where it says nothing.
    """

    tokens: jax.Array
    parent: jax.Array
    depth: jax.Array
    valid: jax.Array
    source: jax.Array
    chance: jax.Array


def pooled(drafts: Sequence[Draft]) -> Pool:
    """The pool of ``drafts``."""
    parts, first = [], 0
    for number, draft in enumerate(drafts):
        parent = jnp.where(draft.parent > 0, draft.parent - 1 + first, -1)
        fields = (draft.tokens, parent, draft.depth, draft.valid, jnp.full_like(parent, number))
        parts.append([x[:, 1:] for x in (*fields, said(draft))])
        first += draft.tokens.shape[1] - 1
    return by_depth(Pool(*(jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))))


def said(draft: Draft) -> jax.Array:
    """[B, N] f32: what a draft says of its nodes, given their parents; -1 where it says nothing."""
    if draft.cut_score is None:
        return jnp.full(draft.tokens.shape, -1.0)
    above = jnp.take_along_axis(draft.cut_score, draft.parent, axis=1)
    return jnp.where(above > 0, draft.cut_score / jnp.where(above > 0, above, 1.0), 0.0)


def by_depth(pool: Pool) -> Pool:
    """A pool in the order of its nodes' depths: one of a draft may come to hang below one of another, so that
    all of a depth stand before the next."""
    order = jnp.argsort(pool.depth, axis=1, stable=True)
    place = jnp.argsort(order, axis=1)
    moved = jnp.where(pool.parent < 0, -1, jnp.take_along_axis(place, jnp.maximum(pool.parent, 0), axis=1))
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, order, axis=1), dataclasses.replace(pool, parent=moved)
    )


def right(pool: Pool, truth: jax.Array, known: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which nodes [B, M] say what came, and which could be judged, all above them having been right.

    ``truth`` [B, D] int32: the tokens behind the root, of which the first ``known`` [B] are.
    """
    levels = truth.shape[1]
    at = jnp.clip(pool.depth - 1, 0, levels - 1)
    says = pool.valid & (pool.depth <= known[:, None])
    says = says & (pool.tokens == jnp.take_along_axis(truth, at, axis=1))
    whole = jnp.ones_like(says)
    above = jnp.maximum(pool.parent, 0)
    for _ in range(levels):
        whole = (pool.parent < 0) | jnp.take_along_axis(says & whole, above, axis=1)
    judged = pool.valid & whole & (pool.depth <= known[:, None])
    return says & whole, judged


@pytree.dataclass
class Distinct:
    """A pool's nodes that say the same behind the same text as one: of each [B, M], whether it is the
    ``first`` of its like, how likely its whole ``path`` is by the best that any of them says (0 for those
    that are not first), and its ``parent``'s first, counted from 1 (0: the root)."""

    first: jax.Array
    path: jax.Array
    parent: jax.Array


def distinct(pool: Pool, chance: jax.Array, depth: int) -> Distinct:
    """``chance`` [B, M] f32: that a node is accepted once its parent is. ``depth``: of the deepest node that
    counts."""
    many = pool.tokens.shape[1]
    pool = dataclasses.replace(pool, valid=pool.valid & (pool.depth <= depth))
    alike = (pool.tokens[:, :, None] == pool.tokens[:, None]) & (
        pool.depth[:, :, None] == pool.depth[:, None]
    )
    alike &= pool.valid[:, :, None] & pool.valid[:, None]
    rows, above = jnp.arange(pool.tokens.shape[0])[:, None, None], jnp.maximum(pool.parent, 0)
    tops = (pool.parent < 0)[:, :, None] & (pool.parent < 0)[:, None]
    both = (pool.parent >= 0)[:, :, None] & (pool.parent >= 0)[:, None]
    same = alike & tops
    for _ in range(1, depth):
        same = alike & (tops | both & same[rows, above[:, :, None], above[:, None]])
    best = own_chance = jnp.where(pool.valid, jnp.clip(chance, 0.0, 1.0), 0.0)
    for level in range(depth):
        # Of what it hangs on, the best that any part thinks.
        path = jnp.where(pool.parent < 0, 1.0, jnp.take_along_axis(best, above, axis=1)) if level else 1.0
        best = jnp.max(jnp.where(same, (own_chance * path)[:, None], 0.0), axis=2)
    first = jnp.argmax(same, axis=2)
    own = pool.valid & (first == jnp.arange(many))
    parent = jnp.where(pool.parent < 0, 0, 1 + jnp.take_along_axis(first, above, axis=1))
    return Distinct(own, jnp.where(own, best, 0.0), parent)


def merge(root: jax.Array, pool: Pool, chance: jax.Array, *, nodes: int, depth: int) -> Draft:
    """The ``nodes`` - 1 nodes with the best chance, as one tree below ``root`` [B] int32.

    ``chance``, ``depth``: see :func:`distinct`. No path's chance exceeds its parent's, so that these are the
    tree of that size with the most tokens expected, if the chances are right: never fewer than any one draft
    of the pool, cut to that size, has.
    """
    batch, found = pool.tokens.shape[0], distinct(pool, chance, depth)
    chosen, parent = rerank(found.path, found.parent, nodes)
    score = jnp.take_along_axis(found.path, chosen, axis=1)
    valid = score > 0

    def with_root(x: jax.Array, at_root: jax.Array | float) -> jax.Array:
        return jnp.concatenate([jnp.broadcast_to(at_root, (batch,)).astype(x.dtype)[:, None], x], axis=1)

    def of_chosen(x: jax.Array, otherwise: jax.Array | int) -> jax.Array:
        return jnp.where(valid, jnp.take_along_axis(x, chosen, axis=1), otherwise)

    return Draft(
        tokens=with_root(of_chosen(pool.tokens, root[:, None]), root),
        # What is left over hangs below the root, so that an invalid node is well placed too.
        parent=with_root(jnp.where(valid, parent, 0), 0),
        depth=with_root(of_chosen(pool.depth, 1), 0),
        valid=with_root(valid, True),
        proposal=Proposal(),
        cut_score=with_root(score, 1.0),
        max_depth=depth,
    )
