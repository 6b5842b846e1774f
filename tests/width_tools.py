"""Width policies for tests: they go by turns, whatever the drafts are worth."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from eaglejax.speculate.widths import Judged, WidthPolicy


@dataclasses.dataclass(frozen=True)
class Turns(WidthPolicy):
    """Rounds of every width of the menu in turn, the widest first, behind ``rest`` rounds without a draft, or
    of the widest where all draft.

    Memory: rounds so far, [] int32.
    """

    rest: int = 2

    def init(self, menu: tuple[int, ...]) -> jax.Array:
        del menu
        return jnp.int32(0)

    def drafts(self, memory: jax.Array, menu: tuple[int, ...]) -> jax.Array:
        return memory % (len(menu) + self.rest) >= self.rest

    def choose(self, memory: jax.Array, menu: tuple[int, ...], scores: jax.Array) -> jax.Array:
        del scores
        turn = memory % (len(menu) + self.rest) - self.rest
        return len(menu) - 1 - jnp.maximum(turn, 0)

    def update(self, memory: jax.Array, menu: tuple[int, ...], judged: Judged) -> jax.Array:
        del menu, judged
        return memory + 1
