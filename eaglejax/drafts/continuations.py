"""What followed the text's end where it stood before, several such places at once, merged into one tree.

Places that go on alike share a path, places that part make siblings. A place that agrees with the text's end
in n tokens weighs half of one that agrees in n + 1, and the chance of a node is a share of weights: that of
the places that go through it, of those that go through its parent and of an escape (what no place says),
which counts for less the longer the agreement is, as in prediction by partial matching (Cleary and Witten
1984). A function of the text, so the distribution is one-hot.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.drafts.base import Draft, Proposal
from eaglejax.drafts.grow import rerank


def best_places(
    overlap: jax.Array, left: jax.Array, *, count: int, length: int, least: int = 1
) -> tuple[jax.Array, jax.Array]:
    """The ``count`` places that say most about what follows: (places [B, R], tokens of agreement [B, R]; 0
    where there is none).

    ``overlap`` [B, S] int32: how many tokens that end at each place agree with the text's end; ``left``
    [B, S]: tokens that follow there. Longest agreement first, then what can offer most of ``length`` tokens,
    then the latest. Agreement of fewer than ``least`` tokens is none.
    """
    usable = (overlap >= least) & (left > 0)
    score = jnp.where(usable, overlap * (length + 1) + jnp.minimum(left, length), 0)
    # A text of fewer places than are asked for has some that are none.
    score = jnp.pad(score[:, ::-1], ((0, 0), (0, max(count - score.shape[1], 0))))
    found, at = jax.lax.top_k(score, count)
    return jnp.maximum(overlap.shape[1] - 1 - at, 0), found // (length + 1)


def after(text: jax.Array, place: jax.Array, length: int) -> jax.Array:
    """[B, R, D]: the ``length`` tokens of ``text`` [B, S] behind each ``place`` [B, R]; past the text's end
    its last token again."""
    at = jnp.minimum(place[:, :, None] + 1 + jnp.arange(length), text.shape[1] - 1)
    return jnp.take_along_axis(text[:, None], at, axis=2)


def merged(
    root: jax.Array,
    tokens: jax.Array,
    offered: jax.Array,
    agreed: jax.Array,
    *,
    nodes: int,
    min_probability: float = 0.0,
) -> Draft:
    """The ``nodes`` - 1 likeliest nodes of the tree of R continuations, below ``root`` [B] int32.

    ``tokens`` [B, R, D] int32; the first ``offered`` [B, R] of each count; ``agreed`` [B, R] int32 tokens of
    agreement, 0 for no continuation. Nodes through which less than ``min_probability`` of the weights goes
    are left out. ``cut_score`` is the chance that the module's text describes.
    """
    batch, many, length = tokens.shape
    real = jnp.arange(length) < jnp.where(agreed > 0, offered, 0)[:, :, None]
    longest = agreed.max(1, keepdims=True)
    weight = jnp.where(agreed > 0, 2.0 ** -(longest - agreed).astype(jnp.float32), 0.0)
    # together[b, r, s, d]: r and s say the same up to their token d, and that far both are real.
    together = (tokens[:, :, None] == tokens[:, None]) & real[:, :, None] & real[:, None]
    together = jnp.cumprod(together, axis=3).astype(bool)
    through = jnp.sum(jnp.where(together, weight[:, None, :, None], 0.0), axis=2)
    total = weight.sum(1)[:, None, None]
    above = jnp.concatenate([jnp.broadcast_to(total, (batch, many, 1)), through[:, :, :-1]], axis=2)
    escape = 1.0 / (1.0 + longest[:, :, None])
    chance = jnp.cumprod(through / (above + escape), axis=2)
    first = jnp.argmax(together, axis=2)
    own = real & (first == jnp.arange(many)[:, None]) & (through >= min_probability * total)

    def by_level(x: jax.Array) -> jax.Array:
        return x.swapaxes(1, 2).reshape(batch, length * many)

    higher = jnp.concatenate([jnp.full_like(first[:, :, :1], -1), first[:, :, :-1]], axis=2)
    parents = jnp.where(higher < 0, 0, 1 + many * (jnp.arange(length) - 1) + higher)
    scores = by_level(jnp.where(own, chance, 0.0))
    chosen, parent = rerank(scores, by_level(parents), nodes)
    score = jnp.take_along_axis(scores, chosen, axis=1)
    # What is left over hangs below the root, so that an invalid node is well placed too.
    valid = score > 0
    level = 1 + chosen // many
    drafted = jnp.take_along_axis(by_level(tokens), chosen, axis=1)

    def with_root(x: jax.Array, at_root: jax.Array | float) -> jax.Array:
        return jnp.concatenate([jnp.broadcast_to(at_root, (batch,)).astype(x.dtype)[:, None], x], axis=1)

    return Draft(
        tokens=with_root(jnp.where(valid, drafted, root[:, None]).astype(jnp.int32), root),
        parent=with_root(jnp.where(valid, parent, 0), 0),
        depth=with_root(jnp.where(valid, level, 1).astype(jnp.int32), 0),
        valid=with_root(valid, True),
        proposal=Proposal(),
        cut_score=with_root(score, 1.0),
        max_depth=min(length, nodes - 1),
    )


def pool(count: int, length: int) -> int:
    """Most nodes, root included, of a tree of ``count`` continuations of ``length`` tokens."""
    return 1 + count * length


def offers(memory: int, factor: float) -> np.ndarray:
    """[memory + 1] int32: most tokens to draft behind n tokens of agreement: ``factor`` times as many, of a
    shorter agreement where that and its drafts would together exceed ``memory`` tokens."""
    most = [min(int(factor * n), memory - n) for n in range(memory + 1)]
    return np.maximum.accumulate(np.asarray(most, np.int32))
