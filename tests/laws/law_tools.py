"""Batches for the tests of the laws: trees from plain numbers, settings tiled over many rows."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from eaglejax import sampling
from eaglejax.drafts.base import Draft, Proposal
from eaglejax.sampling import RowSampling, Sampling


def depths(parent: Sequence[int]) -> list[int]:
    """Depth of every node."""
    out = [0]
    for p in parent[1:]:
        out.append(out[p] + 1)
    return out


def tree(tokens, parent: Sequence[int], *, q=None, ids=None, replacement=False, valid=None) -> Draft:
    """A draft of one shape for every row of ``tokens`` [B, N]; ``q`` [B, N, Vd]."""
    tokens = jnp.asarray(tokens, jnp.int32)
    deep = depths(parent)
    return Draft(
        tokens=tokens,
        parent=jnp.broadcast_to(jnp.asarray(parent, jnp.int32), tokens.shape),
        depth=jnp.broadcast_to(jnp.asarray(deep, jnp.int32), tokens.shape),
        valid=jnp.ones(tokens.shape, bool) if valid is None else jnp.asarray(valid),
        proposal=Proposal(q=q, ids=ids, replacement=replacement),
        max_depth=max(deep),
        chain=list(parent[1:]) == list(range(len(parent) - 1)),
    )


def tile(settings: Sequence[Sampling], times: int, vocab: int, seed: int) -> RowSampling:
    """Each of ``settings`` in ``times`` rows, one after the other, every row with a key of its own."""
    rows = sampling.rows(settings, vocab)
    index = jnp.repeat(jnp.arange(len(settings)), times)
    rows = jax.tree.map(lambda x: x[index], rows)
    return rows.replace(keys=jax.random.split(jax.random.key(seed), index.shape[0]))


def begin(rows: RowSampling) -> jax.Array:
    """Roots at position 0, [B] int32."""
    return jnp.zeros(rows.keys.shape, jnp.int32)


def logits_of(probs) -> jax.Array:
    """Logits of probabilities; -inf where they are zero."""
    return jnp.log(jnp.asarray(probs, jnp.float32))
