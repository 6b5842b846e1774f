"""Drafts of a fixed shape: what every proposer with a :class:`StaticTree` hands to the round."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eaglejax.drafts.base import Draft, Proposal
from eaglejax.drafts.tree import StaticTree


def static_draft(
    tree: StaticTree,
    tokens: jax.Array,
    valid: jax.Array,
    proposal: Proposal,
    confidence: jax.Array | None = None,
) -> Draft:
    """The same ``tree`` for every row, filled with ``tokens`` [B, N] int32 (column 0 the root).

    ``valid`` [B, N] bool must be True for the root and closed under parents; it is taken as it is.
    """
    batch = tokens.shape[0]
    shape = (batch, tree.nodes)
    return Draft(
        tokens=tokens,
        parent=jnp.broadcast_to(jnp.asarray(tree.parent, jnp.int32), shape),
        depth=jnp.broadcast_to(jnp.asarray(tree.depths, jnp.int32), shape),
        valid=valid,
        proposal=proposal,
        confidence=confidence,
        max_depth=tree.depth,
        branching=tree.branching,
        chain=tree.is_chain,
    )


def chain_draft(
    tree: StaticTree, root: jax.Array, guesses: jax.Array, count: jax.Array, proposal: Proposal
) -> Draft:
    """A chain whose first ``count[b]`` of ``guesses`` [B, k] int32 are real; ``root`` [B] int32 goes before
    them.

    What stands in the other places is replaced by the root's token: never read, but always a legal id.
    """
    real = jnp.arange(guesses.shape[1]) < count[:, None]
    tokens = jnp.concatenate([root[:, None], jnp.where(real, guesses, root[:, None])], axis=1)
    valid = jnp.concatenate([jnp.ones_like(real, shape=(root.shape[0], 1)), real], axis=1)
    return static_draft(tree, tokens.astype(jnp.int32), valid, proposal)
