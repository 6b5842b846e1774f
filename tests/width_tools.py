"""Width policies for tests: they go by turns, whatever the drafts are worth."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from eaglejax.speculate.widths import Judged, WidthPolicy


@dataclasses.dataclass(frozen=True)
class Turns(WidthPolicy[jax.Array]):
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

    def choose(
        self, memory: jax.Array, menu: tuple[int, ...], scores: jax.Array, depths: jax.Array
    ) -> jax.Array:
        del scores, depths
        turn = memory % (len(menu) + self.rest) - self.rest
        return len(menu) - 1 - jnp.maximum(turn, 0)

    def update(self, memory: jax.Array, menu: tuple[int, ...], judged: Judged) -> jax.Array:
        del menu, judged
        return memory + 1


@dataclasses.dataclass(frozen=True)
class Likely(WidthPolicy[tuple[()]]):
    """The widths one after the other, as far as the next node's score is ``least`` in some row; ``ahead``:
    the last width where the last of these nodes has that score, else the first."""

    least: float = 0.4
    ahead: bool = False

    def init(self, menu: tuple[int, ...]) -> tuple[()]:
        del menu
        return ()

    def choose(
        self, memory: tuple[()], menu: tuple[int, ...], scores: jax.Array, depths: jax.Array
    ) -> jax.Array:
        del memory, depths
        good = scores.max(0)[jnp.asarray(menu[:-1])] >= self.least
        return jnp.where(good[-1], len(menu) - 1, 0) if self.ahead else jnp.cumprod(good).sum()
