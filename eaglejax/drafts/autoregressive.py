"""The proposer that guesses nothing: plain autoregressive decoding through the same loop as everything
else."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax.drafts.base import Draft, Observation, Proposal
from eaglejax.drafts.static import OnChain, chain_draft
from eaglejax.sampling import RowSampling


@dataclasses.dataclass(frozen=True)
class Autoregressive(OnChain[None, tuple[()]]):
    """A lone root (N = 1, D = 0), so a round is one token. No weights and no state."""

    length = 0

    def init(self, params: None, *, batch: int, capacity: int, inputs: Any = ()) -> tuple[()]:
        """No state."""
        del params, batch, capacity, inputs
        return ()

    def observe(self, params: None, state: tuple[()], seen: Observation) -> tuple[()]:
        """Nothing to remember."""
        del params, seen
        return state

    def propose(
        self,
        params: None,
        state: tuple[()],
        root: jax.Array,
        lengths: jax.Array,
        rows: RowSampling,
        keys: jax.Array,
    ) -> tuple[Draft, tuple[()]]:
        """The root alone."""
        del params, rows, keys
        nothing = jnp.zeros((root.shape[0], 0), jnp.int32)
        return chain_draft(root, nothing, jnp.zeros_like(lengths), Proposal()), state
