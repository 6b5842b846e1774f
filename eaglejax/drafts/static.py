"""Proposers of a fixed shape: what they say about themselves, and the drafts that they hand to the round."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eaglejax.drafts.base import Draft, ParamsT, Proposal, Proposer, StateT
from eaglejax.drafts.tree import StaticTree, chain


class OnTree(Proposer[ParamsT, StateT]):
    """Base of a proposer whose drafts all have the shape ``tree`` and which reads no target features."""

    tree: StaticTree

    @property
    def nodes(self) -> int:
        """N, root included."""
        return self.tree.nodes

    @property
    def depth(self) -> int:
        """D."""
        return self.tree.depth

    @property
    def chain(self) -> bool:
        """Whether the tree is one."""
        return self.tree.is_chain


class OnChain(Proposer[ParamsT, StateT]):
    """Base of a proposer that drafts a chain of up to ``length`` tokens and reads no target features."""

    length: int

    @property
    def nodes(self) -> int:
        """N = length + 1."""
        return self.length + 1

    @property
    def depth(self) -> int:
        """D = length."""
        return self.length

    @property
    def chain(self) -> bool:
        """Always: nothing has to move in the cache."""
        return True


def static_draft(
    tree: StaticTree,
    tokens: jax.Array,
    valid: jax.Array,
    proposal: Proposal,
    cut_score: jax.Array | None = None,
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
        cut_score=cut_score,
        max_depth=tree.depth,
        chain=tree.is_chain,
    )


def chain_draft(root: jax.Array, guesses: jax.Array, count: jax.Array, proposal: Proposal) -> Draft:
    """A chain whose first ``count[b]`` of ``guesses`` [B, k] int32 are real; ``root`` [B] int32 goes before
    them.

    What stands in the other places is replaced by the root's token: never read, but always a legal id.
    """
    real = jnp.arange(guesses.shape[1]) < count[:, None]
    tokens = jnp.concatenate([root[:, None], jnp.where(real, guesses, root[:, None])], axis=1)
    valid = jnp.concatenate([jnp.ones_like(real, shape=(root.shape[0], 1)), real], axis=1)
    return static_draft(chain(guesses.shape[1]), tokens.astype(jnp.int32), valid, proposal)
