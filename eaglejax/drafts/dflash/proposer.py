"""The DFlash proposer: one pass over a block of masks gives what every level of a tree is drafted from.

When the root sits at position n, the context of tokens 0 .. n - 1 is in the draft's cache. The levels of a
tree do not depend on each other's tokens: a level's distribution is the same below every node of it, and is
handed on as q where drafts are drawn from it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.drafts.base import Draft, Needs, Observation
from eaglejax.drafts.dflash import model
from eaglejax.drafts.dflash.config import DFlashConfig
from eaglejax.drafts.dflash.model import DFlashParams
from eaglejax.drafts.levels import Grown, Levels, OnePass
from eaglejax.errors import ConfigError
from eaglejax.nn.cache import Cache
from eaglejax.sampling import RowSampling


@pytree.dataclass
class DFlashState:
    """``cache``: the context's keys and values; ``root`` [B] int32: of the round that is being proposed."""

    cache: Cache
    root: jax.Array


@dataclasses.dataclass(frozen=True)
class DFlash(Grown[DFlashParams, DFlashState]):
    """A tree of as many levels as a block guesses, or fewer; its settings are those of ``Grown``. Raises
    ConfigError for a deeper one."""

    config: DFlashConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth >= self.config.block:
            raise ConfigError(
                f"{self.depth} drafts in a row; a block of {self.config.block} tokens guesses "
                f"{self.config.block - 1}"
            )

    @property
    def length(self) -> int:
        """Tokens of a block that is as deep as the tree."""
        return self.depth + (not self.config.from_anchor)

    @property
    def needs(self) -> Needs:
        """The boundaries that the draft fuses."""
        return Needs(self.config.taps)

    def init(self, params: DFlashParams, *, batch: int, capacity: int, inputs: Any = ()) -> DFlashState:
        """An empty state for rows of up to ``capacity`` tokens."""
        del inputs
        form = self.cache_dtype or model.dtype_of(params.weights)
        return DFlashState(
            cache=model.init_cache(self.config, batch, capacity + self.length, form),
            root=jnp.zeros((batch,), jnp.int32),
        )

    def observe(self, params: DFlashParams, state: DFlashState, seen: Observation) -> DFlashState:
        """Append the context of the committed tokens."""
        assert seen.features is not None
        cache = model.write_context(params, self.config, seen.features, state.cache, seen.count)
        return dataclasses.replace(state, cache=cache)

    def propose(
        self,
        params: DFlashParams,
        state: DFlashState,
        root: jax.Array,
        lengths: jax.Array,
        rows: RowSampling,
        keys: jax.Array,
    ) -> tuple[Draft, DFlashState]:
        """A tree below ``root`` [B]; the state's committed part does not change."""
        begun = dataclasses.replace(state, root=root)
        draft, after = super().propose(params, begun, root, lengths, rows, keys)
        return draft, dataclasses.replace(after, root=state.root)

    def levels(self, params: DFlashParams, state: DFlashState) -> Levels:
        """The block, guessed."""
        config = self.config
        states, cache = model.guess_block(params, config, state.root, state.cache, self.length)
        logits = model.logits(params, config, states if config.from_anchor else states[:, 1:])
        return OnePass(logits, cache, self.min_confidence)

    def regrown(self, state: DFlashState, memory: Cache) -> DFlashState:
        """The block stands behind the cache's lengths."""
        return dataclasses.replace(state, cache=memory)
