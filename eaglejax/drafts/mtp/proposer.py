"""The MTP proposer: a tree by the modules that a target was trained with.

Module 0 pairs the target's state of token p with token p + 1, as EAGLE-1 does; module m pairs the state that
module m - 1 made of p with token p + m + 1. So when the root sits at position n, module m has taken in the
pairs of p = 0 .. n - m - 1, from committed tokens alone, and has a cache of its own. What a node's token
completes goes on from there: of its parent, module m - 1 has a state, and module m pairs it with the token. A
node's children are drafted by the module of its depth, and beyond the last module by the first ones again,
each handed what the parent's children were drafted from. What trees write is never committed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import pytree
from eaglejax.drafts.base import Needs, Observation
from eaglejax.drafts.levels import Grown, Levels
from eaglejax.drafts.mtp import model
from eaglejax.drafts.mtp.config import MtpConfig
from eaglejax.drafts.mtp.model import MtpParams
from eaglejax.errors import ConfigError
from eaglejax.nn.cache import Cache
from eaglejax.nn.visible import Causal, Tree


@pytree.dataclass
class MtpState:
    """``caches``: one a module, each with lengths of its own; ``states`` [B, D, H]: the newest of each."""

    caches: tuple[Cache, ...]
    states: jax.Array


@dataclasses.dataclass(frozen=True)
class Mtp(Grown[MtpParams, MtpState]):
    """A tree by the modules of ``config``; its settings are those of ``Grown``.

    Raises ConfigError for a tree deeper than the modules reach whose depth is no multiple of their number,
    as vLLM does.
    """

    config: MtpConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        modules = self.config.modules
        if self.depth > modules and self.depth % modules:
            raise ConfigError(
                f"{self.depth} drafts in a row by {modules} MTP modules; beyond their number it must be a "
                "multiple of it"
            )

    @property
    def needs(self) -> Needs:
        """The target's last state."""
        return Needs(self.config.taps)

    def init(self, params: MtpParams, *, batch: int, capacity: int, inputs: Any = ()) -> MtpState:
        """An empty state for rows of up to ``capacity`` tokens."""
        del inputs
        dtype, config = model.dtype_of(params.weights), self.config
        form, slots = self.cache_dtype or dtype, capacity + self.scratch
        return MtpState(
            caches=tuple(model.init_cache(config, batch, slots, form) for _ in range(config.modules)),
            states=jnp.zeros((batch, config.modules, config.hidden_size), dtype),
        )

    def observe(self, params: MtpParams, state: MtpState, seen: Observation) -> MtpState:
        """Append the pairs that the committed tokens complete, of every module.

        Token start + 1 + j completes, of module m, the pair of p = start + j - m; the first ``m`` tokens of a
        text complete none.
        """
        assert seen.features is not None
        steps = jnp.arange(seen.tokens.shape[1], dtype=jnp.int32)
        read = out = model.read_target(params, self.config, seen.features)
        dropped = jnp.zeros_like(seen.count)
        caches, newest = [], []
        for index, cache in enumerate(state.caches):
            if index:
                drop = jnp.clip(index - seen.start, 0, seen.count)
                before = jnp.concatenate([state.states[:, index - 1, None], out], axis=1)
                read = _rows(before, steps + (drop - dropped)[:, None])
                dropped = drop
            count = seen.count - dropped
            real = steps < count[:, None]
            # Padding stands behind the length and is masked, but a NaN there would survive a product with 0.
            read = jnp.where(real[:, :, None], read, 0)
            tokens = _rows(seen.following, steps + dropped[:, None])
            positions = cache.lengths[:, None] + steps
            out, cache = model.step(
                params, self.config, index, read, tokens, positions, cache, Causal(), positions
            )
            last = _rows(out, jnp.maximum(count - 1, 0)[:, None])[:, 0]
            newest.append(jnp.where(count[:, None] > 0, last, state.states[:, index]))
            caches.append(cache.advance(count))
        return MtpState(caches=tuple(caches), states=jnp.stack(newest, axis=1))

    def levels(self, params: MtpParams, state: MtpState) -> Levels:
        """The first module's newest state, and the modules over the pairs of a tree."""
        return _Modules(self, params, state)

    def regrown(self, state: MtpState, memory: tuple[Cache, ...]) -> MtpState:
        """The pairs of the tree stand behind the lengths of the caches."""
        return dataclasses.replace(state, caches=memory)


def _rows(x: jax.Array, at: jax.Array) -> jax.Array:
    """``x`` [B, M, ...] at ``at`` [B, N], cut to the rows there are."""
    at = jnp.clip(at, 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), axis=1)


class _Modules(Levels):
    """A node has a state of every module, side by side [B, n, D * H]; of those that its depth asks for no
    more it hands on its parent's."""

    def __init__(self, proposer: Mtp, params: MtpParams, state: MtpState) -> None:
        config, (batch, *_) = proposer.config, state.states.shape
        root = state.states.reshape(batch, -1)
        super().__init__(root, state.caches, config.draft_vocab_size, proposer.min_confidence)
        self._config, self._params, self._last = config, params, min(config.modules, proposer.depth)
        self._lengths = [cache.lengths for cache in state.caches]
        self._slots: list[list[jax.Array]] = [[] for _ in state.caches]
        self._writers: list[range] = []

    def _split(self, state: jax.Array) -> list[jax.Array]:
        return jnp.split(state, self._config.modules, axis=-1)

    def _asked(self) -> range:
        """The modules that the level's tokens complete pairs of, those that no level is drafted by left
        out."""
        modules = self._config.modules
        if self.level < modules:
            return range(self.level, self._last)
        return range(self.level % modules, self.level % modules + 1)

    def logits(self, state: jax.Array) -> jax.Array:
        """By the module of the level."""
        index = self.level % self._config.modules
        return model.logits(self._params, self._config, index, self._split(state)[index])

    def place(self, tokens: jax.Array, seen: jax.Array) -> Any:
        """Of each module that is asked: behind all that it holds, seeing the nodes that it was asked for."""
        again, asked = self.level // self._config.modules, self._asked()
        self._writers += [asked] * tokens.shape[1]
        places = {}
        for index in asked:
            behind = self.level - 1 if again == 0 else index + again - 1
            positions = jnp.broadcast_to((self._lengths[index] + behind)[:, None], tokens.shape)
            self._slots[index].append(positions)
            held = np.asarray([i for i, writers in enumerate(self._writers) if index in writers])
            places[index] = positions, Tree(seen[:, :, held]), jnp.concatenate(self._slots[index], axis=1)
        return places

    def forward(
        self, at: Any, feature: jax.Array, tokens: jax.Array, memory: tuple[Cache, ...]
    ) -> tuple[jax.Array, jax.Array, tuple[Cache, ...]]:
        """One step of every module that is asked."""
        above = self._split(feature)
        states, caches = list(above), list(memory)
        for index, (positions, visible, slots) in at.items():
            read = self._params.adapter.from_draft(above[index - 1])  # before the first comes the last one
            states[index], caches[index] = model.step(
                self._params, self._config, index, read, tokens, positions, caches[index], visible, slots
            )
        out = jnp.concatenate(states, axis=-1)
        return out, self.logits(out), tuple(caches)
