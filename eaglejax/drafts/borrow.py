"""What drafts borrow of their targets."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.models.target import Target
from eaglejax.quant.array import QuantArray
from eaglejax.quant.blocks import BlockArray
from eaglejax.quant.online import plain


def target_head(target: Target, ids: np.ndarray | None = None) -> tuple[Any, bool]:
    """(the target's head at ``ids``, whether it is [Vd, H], as a tied head is, instead of [H, Vd])."""
    tied = "head" not in target.params
    head = target.params["embed" if tied else "head"]
    if ids is None:
        return head, tied
    if isinstance(head, QuantArray | BlockArray):
        return head.columns(jnp.asarray(ids, jnp.int32)), tied
    return jnp.take(head, jnp.asarray(ids, jnp.int32), axis=0 if tied else 1), tied


def head_matrix(target: Target, ids: np.ndarray | None = None, dtype: Any = None) -> jax.Array:
    """The target's head at ``ids`` (None: all), tied, quantised or neither, as an array [H, Vd] in ``dtype``
    (None: its own)."""
    head, tied = target_head(target, ids)
    head = plain(head, dtype)
    return head.T if tied else head
