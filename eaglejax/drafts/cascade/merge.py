"""Several drafts of one text as one tree: equal paths become one, and the likeliest nodes stay."""

from __future__ import annotations

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
        if draft.cut_score is None:
            chance = jnp.full(draft.tokens.shape, -1.0)
        else:
            above = jnp.take_along_axis(draft.cut_score, draft.parent, axis=1)
            chance = jnp.where(above > 0, draft.cut_score / jnp.where(above > 0, above, 1.0), 0.0)
        parent = jnp.where(draft.parent > 0, draft.parent - 1 + first, -1)
        fields = (draft.tokens, parent, draft.depth, draft.valid, jnp.full_like(parent, number), chance)
        parts.append([x[:, 1:] for x in fields])
        first += draft.tokens.shape[1] - 1
    tokens, parent, depth, valid, source, chance = (
        jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True)
    )
    # A node of one draft may come to hang below one of another, so that all of a depth stand before the next.
    order = jnp.argsort(depth, axis=1, stable=True)
    place = jnp.argsort(order, axis=1)
    moved = jnp.where(parent < 0, -1, jnp.take_along_axis(place, jnp.maximum(parent, 0), axis=1))
    fields = (tokens, moved, depth, valid, source, chance)
    return Pool(*(jnp.take_along_axis(x, order, axis=1) for x in fields))


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


def merge(root: jax.Array, pool: Pool, chance: jax.Array, *, nodes: int, depth: int) -> Draft:
    """The ``nodes`` - 1 nodes with the best chance, as one tree below ``root`` [B] int32.

    ``chance`` [B, M] f32: that a node is accepted once its parent is. Of nodes that say the same behind the
    same text the best chance counts. ``depth``: of the deepest node.
    """
    batch, many = pool.tokens.shape
    alike = (pool.tokens[:, :, None] == pool.tokens[:, None]) & (
        pool.depth[:, :, None] == pool.depth[:, None]
    )
    alike &= pool.valid[:, :, None] & pool.valid[:, None]
    rows, above = jnp.arange(batch)[:, None, None], jnp.maximum(pool.parent, 0)
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
    parents = jnp.where(pool.parent < 0, 0, 1 + jnp.take_along_axis(first, above, axis=1))
    chosen, parent = rerank(jnp.where(own, best, 0.0), parents, nodes)
    score = jnp.take_along_axis(jnp.where(own, best, 0.0), chosen, axis=1)
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
