"""What losses say, and the head that asks the target. How a family computes its loss stands in the family's
folder, what a run asks of it in ``train.objective``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.nn.linear import linear


@pytree.dataclass
class Metrics:
    """Sums over trained rows, one entry a step [K] f32, so that batches and devices add up.

    ``loss``: the unweighted loss sum, ``rows`` its trained rows. ``hits``: rows whose likeliest token is the
    target's, a token that the draft does not know being a miss; ``judged``: rows it is counted over (those of
    "tight" alignment whatever the loss leaves out). ``chain``: hits at this and every earlier step of the
    chain. ``chains``: rows that start a chain, [] f32. ``accept``: sum of the chance that a sampled draft is
    kept.
    """

    loss: jax.Array
    rows: jax.Array
    hits: jax.Array
    judged: jax.Array
    chain: jax.Array
    chains: jax.Array
    accept: jax.Array


@pytree.dataclass
class Head:
    """How target logits over the draft's tokens come about: ``weight`` [Ht, Vd] ([Vd, Ht] when ``tied``), the
    id map [Vd] (None: all ids), a softcap."""

    weight: jax.Array
    ids: jax.Array | None = None
    softcap: float | None = pytree.static(default=None)
    tied: bool = pytree.static(default=False)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., Vd] f32 of ``hidden`` [..., Ht], which is after the target's final norm."""
        hidden = hidden.astype(self.weight.dtype)
        out = linear(hidden, self.weight, transposed=self.tied, dtype=jnp.float32)
        return out if self.softcap is None else self.softcap * jnp.tanh(out / self.softcap)
