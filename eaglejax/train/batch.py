"""A packed training batch, and the alignment of its rows, stated once.

Tokens x_0 .. of a document; the target's features g_t and distribution y_t (of x_{t+1}) at t; l_t says that
x_t is an answer token. A chain of drafts starts at row t from the true feature g_t. Its step k (k = 0 ..
K-1) reads the token x_{t+1+k} and the feature g_t (k = 0) or its own last state, and predicts y_{t+1+k}, the
distribution of x_{t+2+k}. Its rotary position is t + k, that of the inference side (``drafts.eagle``). The
first draft of an answer that starts at T is row T - 1.
"""

from __future__ import annotations

from typing import Any, get_args

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.errors import ConfigError
from eaglejax.train.objective import Alignment

Array = Any
"""A jax array; a numpy array until the batch is placed on the devices."""


@pytree.dataclass
class Batch:
    """B rows of T packed tokens.

    ``tokens`` [B, T] int32 (0 where padded); ``documents`` [B, T] int32: 0 is padding, equal positive numbers
    belong together; ``positions`` [B, T] int32 within the document; ``supervised`` [B, T] bool: answer
    tokens. ``aux`` [B, T, A, Ht]: the target's boundaries that the draft reads, or None; ``hidden``
    [B, T, Ht]: its state after the final norm. ``top`` [B, T] int32 and ``log_norm`` [B, T] f32: argmax and
    log-sum-exp of the target's logits over its whole vocabulary, or None where they were not computed.

    ``hidden`` stands apart from ``aux``, which ``Observation.features`` joins: the teacher reads it whatever
    the draft reads, so it would be one more boundary in every batch, found by its place, and what feature
    caches hold by these names would have to be made again.
    """

    tokens: Array
    documents: Array
    positions: Array
    supervised: Array
    aux: Array | None = None
    hidden: Array | None = None
    top: Array | None = None
    log_norm: Array | None = None


def shift(x: jax.Array, by: int) -> jax.Array:
    """``x`` [B, T, ...] moved ``by`` places to the left along T; zeros (False) come in from the right."""
    if by == 0:
        return x
    by = min(by, x.shape[1])
    return jnp.concatenate([x[:, by:], jnp.zeros_like(x[:, :by])], axis=1)


def same_document(documents: jax.Array, by: int) -> jax.Array:
    """[B, T] bool: row t + ``by`` exists and belongs to the document of row t."""
    return (documents > 0) & (shift(documents, by) == documents)


def row_mask(batch: Batch, step: int, alignment: Alignment = "tight") -> jax.Array:
    """Which rows [B, T] bool are trained at chain step ``step`` (from 0).

    "tight": x_{t+1+k} and x_{t+2+k} are answer tokens: the first draft of an answer is trained, a guess of
    what a prompt says is not, nor one of what would follow the end token. "inputs" (as in speculators):
    x_{t+1+k} is one, which adds what follows the last token. "unshifted" (as in SpecForge): x_{t+k} is one,
    which moreover loses the first draft of every answer. All stay within the document.
    """
    if alignment == "tight":
        mask = shift(batch.supervised, 1 + step) & shift(batch.supervised, 2 + step)
        return mask & same_document(batch.documents, 2 + step)
    if alignment == "inputs":
        return shift(batch.supervised, 1 + step) & same_document(batch.documents, 1 + step)
    if alignment == "unshifted":
        return shift(batch.supervised, step) & same_document(batch.documents, 1 + step)
    raise ConfigError(f"alignment {alignment!r} is not known; use one of {', '.join(get_args(Alignment))}")


def counts(batch: Batch, steps: int, alignment: Alignment = "tight") -> jax.Array:
    """Trained rows of each step, [steps] f32."""
    masks = [row_mask(batch, k, alignment) for k in range(steps)]
    return jnp.stack([jnp.sum(m, dtype=jnp.float32) for m in masks])
