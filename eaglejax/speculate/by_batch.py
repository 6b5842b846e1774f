"""Widths by how many rows are being decoded: few drafts where many rows share a forward."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from eaglejax.engine_keys import Ranges
from eaglejax.speculate.widths import Judged, WidthPolicy


@dataclasses.dataclass(frozen=True)
class ByBatch(WidthPolicy[jax.Array]):
    """As many drafts as ``ranges`` say: triples (first, last, drafts) of numbers of rows that are not done,
    sorted; between two ranges and behind the last, as in the one before (vLLM's
    ``num_speculative_tokens_per_batch_size``).

    A menu for it has the widths of :attr:`widths`. Memory: rows of the last round, [] int32, -1 before the
    first; a round of no drafts follows them, since it is decided before anything is drafted. A row's guesses
    depend on its batch then, so that drafts must be a function of the text for a seed to give one text.
    """

    ranges: Ranges

    @property
    def widths(self) -> tuple[int, ...]:
        """What a round may judge, root included."""
        return tuple(sorted({drafts + 1 for *_, drafts in self.ranges}))

    def init(self, menu: tuple[int, ...]) -> jax.Array:
        """Nothing is known of the batch."""
        del menu
        return jnp.int32(-1)

    def drafts(self, memory: jax.Array, menu: tuple[int, ...]) -> jax.Array:
        """Unless the rows of the last round were so many that none are to be drafted."""
        return (memory < 0) | (self._level(memory, menu) > 0)

    def choose(
        self, memory: jax.Array, menu: tuple[int, ...], scores: jax.Array, depths: jax.Array
    ) -> jax.Array:
        """By the rows whose root has a score."""
        del memory, depths
        return self._level((scores[:, 0] > 0).sum(), menu)

    def update(self, memory: jax.Array, menu: tuple[int, ...], judged: Judged) -> jax.Array:
        """Count the rows."""
        del memory, menu
        return (judged.scores[:, 0] > 0).sum(dtype=jnp.int32)

    def _level(self, rows: jax.Array, menu: tuple[int, ...]) -> jax.Array:
        """[] int32: place in ``menu``, whose last width is the whole draft and may be less than is asked."""
        level = jnp.int32(0)
        for first, _, drafts in self.ranges:
            width = min(drafts + 1, menu[-1])
            level = jnp.where(rows >= first, menu.index(width), level)
        return level.astype(jnp.int32)
