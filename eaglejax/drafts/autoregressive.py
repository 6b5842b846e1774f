"""The proposer that guesses nothing: plain autoregressive decoding through the same loop as everything
else."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax.drafts.base import Draft, Needs, Observation, Proposal
from eaglejax.drafts.static import chain_draft
from eaglejax.drafts.tree import StaticTree, chain
from eaglejax.sampling import RowSampling

_ROOT = chain(0)


@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """A lone root (N = 1, D = 0), so a round is one token. No weights and no state."""

    @property
    def tree(self) -> StaticTree:
        """The root alone."""
        return _ROOT

    @property
    def nodes(self) -> int:
        """N = 1."""
        return 1

    @property
    def depth(self) -> int:
        """D = 0."""
        return 0

    @property
    def chain(self) -> bool:
        """True: nothing has to move in the cache."""
        return True

    @property
    def needs(self) -> Needs:
        """Nothing."""
        return Needs()

    def init(self, params: Any, *, batch: int, capacity: int) -> tuple[()]:
        """No state."""
        del params, batch, capacity
        return ()

    def observe(self, params: Any, state: tuple[()], seen: Observation) -> tuple[()]:
        """Nothing to remember."""
        del params, seen
        return state

    def propose(
        self,
        params: Any,
        state: tuple[()],
        root: jax.Array,
        lengths: jax.Array,
        rows: RowSampling,
        keys: jax.Array,
    ) -> tuple[Draft, tuple[()]]:
        """The root alone."""
        del params, rows, keys
        nothing = jnp.zeros((root.shape[0], 0), jnp.int32)
        return chain_draft(self.tree, root, nothing, jnp.zeros_like(lengths), Proposal()), state
