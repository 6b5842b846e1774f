"""The Medusa proposer: a tree whose levels are guessed by one head each, from the target's last state alone.

When the root sits at position n, every head reads the target's state of token n - 1: head k guesses token
n + 1 + k. So all nodes of one depth have the same law for their children, there is no cache, and a tree costs
what its heads cost. Sampled drafts hand that law on as q, with which the acceptance is lossless on trees too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.drafts.base import Needs, Observation
from eaglejax.drafts.levels import Grown, Levels
from eaglejax.drafts.medusa import model
from eaglejax.drafts.medusa.config import MedusaConfig
from eaglejax.drafts.medusa.model import MedusaParams
from eaglejax.errors import ConfigError


@pytree.dataclass
class MedusaState:
    """``feature`` [B, H]: what the heads read, of each row's last committed token."""

    feature: jax.Array


@dataclasses.dataclass(frozen=True)
class Medusa(Grown[MedusaParams, MedusaState]):
    """A tree by the heads of ``config``; its settings are those of ``Grown``, but that the heads keep no
    cache.

    Raises ConfigError for a tree deeper than there are heads.
    """

    config: MedusaConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth > self.config.heads:
            raise ConfigError(
                f"the tree is {self.depth} deep and the draft has {self.config.heads} Medusa heads, each of "
                "which guesses one level; give a shallower tree"
            )
        if self.cache_dtype is not None:
            raise ConfigError("Medusa heads keep no cache that could have a format")

    @property
    def needs(self) -> Needs:
        """The target's last state."""
        return Needs(self.config.taps)

    def init(self, params: MedusaParams, *, batch: int, capacity: int, inputs: Any = ()) -> MedusaState:
        """No state read yet."""
        del capacity, inputs
        return MedusaState(jnp.zeros((batch, self.config.hidden_size), model.dtype_of(params.weights)))

    def observe(self, params: MedusaParams, state: MedusaState, seen: Observation) -> MedusaState:
        """Keep the state of the newest token."""
        assert seen.features is not None
        last = jnp.maximum(seen.count - 1, 0)[:, None, None, None]
        newest = jnp.take_along_axis(seen.features, last, axis=1)
        newest = model.read_target(params, self.config, newest)[:, 0]
        return MedusaState(jnp.where(seen.count[:, None] > 0, newest, state.feature))

    def levels(self, params: MedusaParams, state: MedusaState) -> Levels:
        """The heads, from the first on."""
        return _Heads(self, params, state)

    def regrown(self, state: MedusaState, memory: Any) -> MedusaState:
        """Nothing was written."""
        del memory
        return state


class _Heads(Levels):
    """Level k asks head k; every node hands on the target's state."""

    def __init__(self, proposer: Medusa, params: MedusaParams, state: MedusaState) -> None:
        config = proposer.config
        super().__init__(state.feature, (), config.draft_vocab_size, proposer.min_confidence)
        self._config, self._params = config, params

    def logits(self, state: jax.Array) -> jax.Array:
        """By the head of the level."""
        hidden = model.state(self._params, self.level, state)
        return model.logits(self._params, self._config, self.level, hidden)

    def place(self, tokens: jax.Array, seen: jax.Array) -> None:
        """Nowhere: a head sees no token."""

    def forward(
        self, at: None, feature: jax.Array, tokens: jax.Array, memory: tuple[()]
    ) -> tuple[jax.Array, jax.Array, tuple[()]]:
        """One law for all nodes of the level."""
        del at, tokens
        law = self.logits(feature[:, :1])
        return feature, jnp.broadcast_to(law, (*feature.shape[:2], law.shape[-1])), memory
