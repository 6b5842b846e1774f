"""EAGLE-2's dynamic draft tree (Li et al. 2024b), as fixed-shape array operations.

A tree grows level by level: the K best nodes of a level are expanded to K children each, and the K best of
those K * K are expanded next. A node's score is its cumulative log-probability. Every node ever scored stays
in a pool of K + (D - 1) K^2; the N - 1 best of the whole pool become the tree. Scores are f32 and ties go to
the lower pool index, which is the shallower node and its parent before it: a node never outranks its own
parent, so the tree is connected whatever rounding does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.drafts.tree import DynamicTree


def with_normaliser(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cleaned logits [..., Vd] f32, log-normaliser [...]): a token's log-probability is their difference.

    NaN and +inf become -inf, so that a broken draft proposes little instead of spoiling what is sorted or
    drawn from.
    """
    logits = logits.astype(jnp.float32)
    clean = jnp.where(logits < jnp.inf, logits, -jnp.inf)
    return clean, jax.nn.logsumexp(clean, axis=-1)


def log_prob(logit: jax.Array, normaliser: jax.Array) -> jax.Array:
    """Log-probability, at most 0; -inf where it is not a number (every logit -inf)."""
    logp = logit - normaliser
    return jnp.where(jnp.isnan(logp), -jnp.inf, jnp.minimum(logp, 0.0))


def expand(logits: jax.Array, scores: jax.Array, children: int) -> tuple[jax.Array, jax.Array]:
    """The ``children`` best continuations of every node: (cumulative scores, draft ids), each [B, n,
    children].

    ``logits`` [B, n, Vd]; ``scores`` [B, n] f32 cumulative log-probabilities of the nodes. Equal logits go to
    the lower id.
    """
    clean, normaliser = with_normaliser(logits)
    top, tokens = jax.lax.top_k(clean, children)
    return scores[:, :, None] + log_prob(top, normaliser[..., None]), tokens.astype(jnp.int32)


def best(scores: jax.Array, count: int) -> jax.Array:
    """Indices [B, count] of the largest ``scores`` [B, M], best first, ties to the lower index."""
    return jax.lax.top_k(scores, count)[1]


def rerank(scores: jax.Array, parents: jax.Array, nodes: int) -> tuple[jax.Array, jax.Array]:
    """Choose the tree out of the pool: (pool indices [B, N-1] ascending, parent node [B, N-1]).

    ``scores`` [B, P] f32 of the pool in level order. ``parents`` [B, P] int32: 0 for children of the root,
    else 1 + the parent's pool index. The returned parents number the tree's nodes: root 0, then the chosen
    ones in order.
    """
    chosen = jnp.sort(best(scores, nodes - 1), axis=1)
    above = jnp.take_along_axis(parents, chosen, axis=1)
    # Node j of the tree is pool entry chosen[j - 1]; a parent's number is how many chosen entries do not come
    # after it.
    parent = jnp.sum(chosen[:, None, :] + 1 <= above[:, :, None], axis=2, dtype=jnp.int32)
    return chosen, parent


def pool_depths(tree: DynamicTree, levels: int) -> np.ndarray:
    """Depth of each pool entry when ``levels`` levels were grown, [K + (levels - 1) K^2] int32."""
    k = tree.branching
    return np.repeat(np.arange(1, levels + 1), [k] + [k * k] * (levels - 1)).astype(np.int32)
