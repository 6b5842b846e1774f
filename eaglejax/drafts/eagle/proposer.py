"""The EAGLE proposer: drafts a tree with a small network that reads the target's features.

Draft position p holds the pair (feature of token p, token p + 1); its state predicts token p + 2. When the
root sits at position n, pairs 0 .. n-1 are in the draft's cache, computed from the target's true features:
``observe`` recomputes what a round accepted instead of keeping what the tree guessed. The state of pair n-1
gives the tree's first level (the root's children); a node at depth d is expanded as the pair (its parent's
state, its token) at position n + d - 1. A draft with masks (P-EAGLE) has one pass for all levels but the
first: pairs of the mask's feature and the mask token at positions n, n + 1, ..., each of which sees those
before it. Keys and values of a tree are written behind the cache's length and never committed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.drafts.base import Needs, Observation
from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.drafts.levels import Grown, Levels, OnePass
from eaglejax.errors import ConfigError
from eaglejax.nn.cache import Cache
from eaglejax.nn.visible import Causal, Tree


@pytree.dataclass
class EagleState:
    """``cache``: keys and values of the observed pairs; ``feature`` [B, H]: the state of each row's last
    pair."""

    cache: Cache
    feature: jax.Array


@dataclasses.dataclass(frozen=True)
class Eagle(Grown[EagleParams, EagleState]):
    """EAGLE-1, -2, -3 or P-EAGLE, as ``config`` says, on a tree; its settings are those of ``Grown``."""

    config: EagleConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.config.taps:
            raise ConfigError("the draft's boundaries are not known yet; use config.fit(target) or name them")

    @property
    def needs(self) -> Needs:
        """The boundaries that the draft was made for."""
        return Needs(self.config.taps)

    @property
    def scratch(self) -> int:
        """Pairs that a tree writes."""
        return self.depth - 1 if self.config.parallel else super().scratch

    def init(self, params: EagleParams, *, batch: int, capacity: int, inputs: Any = ()) -> EagleState:
        """An empty state for rows of up to ``capacity`` tokens."""
        del inputs
        dtype = eagle_model.dtype_of(params.weights)
        return EagleState(
            cache=eagle_model.init_cache(
                self.config, batch, capacity + self.scratch, self.cache_dtype or dtype
            ),
            feature=jnp.zeros((batch, self.config.hidden_size), dtype),
        )

    def observe(self, params: EagleParams, state: EagleState, seen: Observation) -> EagleState:
        """Append the pairs (true feature of a committed token, the token after it)."""
        assert seen.features is not None
        m = seen.tokens.shape[1]
        steps = jnp.arange(m, dtype=jnp.int32)
        real = steps < seen.count[:, None]
        feature = eagle_model.fuse(params, self.config, seen.features)
        # Padding stands behind the length and is masked, but a NaN there would survive a product with zero.
        feature = jnp.where(real[:, :, None], feature, 0)
        positions = state.cache.lengths[:, None] + steps
        out, cache = eagle_model.step(
            params, self.config, feature, seen.following, positions, state.cache, Causal(), positions
        )
        last = jnp.maximum(seen.count - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(out, last, axis=1)[:, 0]
        return EagleState(
            cache=cache.advance(seen.count),
            feature=jnp.where(seen.count[:, None] > 0, newest, state.feature),
        )

    def levels(self, params: EagleParams, state: EagleState) -> Levels:
        """The state of each row's last pair, and the layers over the pairs of a tree, or over masks."""
        if not self.config.parallel:
            return _Pairs(self, params, state)
        states, cache = state.feature[:, None], state.cache
        if self.depth > 1:
            further, cache = eagle_model.guess_masks(params, self.config, cache, self.depth - 1)
            states = jnp.concatenate([states, further], axis=1)
        return OnePass(eagle_model.logits(params, self.config, states), cache, self.min_confidence)

    def regrown(self, state: EagleState, memory: Cache) -> EagleState:
        """The pairs of the tree stand behind the cache's lengths."""
        return dataclasses.replace(state, cache=memory)


class _Pairs(Levels):
    """A node is the pair of its parent's state and its token."""

    def __init__(self, proposer: Eagle, params: EagleParams, state: EagleState) -> None:
        config = proposer.config
        super().__init__(state.feature, state.cache, config.draft_vocab_size, proposer.min_confidence)
        self._config, self._params = config, params
        self._start = state.cache.lengths
        self._slots: list[jax.Array] = []

    def logits(self, state: jax.Array) -> jax.Array:
        """By its head."""
        return eagle_model.logits(self._params, self._config, state)

    def place(self, tokens: jax.Array, seen: jax.Array) -> Any:
        """At the position of the pair, behind all slots of the levels before."""
        positions = jnp.broadcast_to((self._start + self.level - 1)[:, None], tokens.shape)
        self._slots.append(positions)
        return positions, Tree(seen), jnp.concatenate(self._slots, axis=1)

    def forward(
        self, at: Any, feature: jax.Array, tokens: jax.Array, memory: Cache
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """One draft step."""
        positions, visible, slot_positions = at
        feature = self._params.adapter.from_draft(feature)
        out, memory = eagle_model.step(
            self._params, self._config, feature, tokens, positions, memory, visible, slot_positions
        )
        return out, self.logits(out), memory
