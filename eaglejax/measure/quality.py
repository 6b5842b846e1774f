"""What a draft would have got right on texts that the target wrote: acceptance without decoding.

A chain drafted behind token t is accepted as far as it says what the target wrote. A family's probe runs
the draft k steps ahead of every position of a text at once, so one pass over the text gives the acceptance of
every round that could have begun there, and any change of the pair (other boundaries, another rotary base,
another basis) can be tried on the same text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.errors import RequestError
from eaglejax.models import decoder
from eaglejax.models.config import FINAL, Boundary, ModelConfig
from eaglejax.models.target import Target
from eaglejax.nn.visible import Causal


@dataclasses.dataclass(frozen=True, eq=False)
class Texts:
    """Prompts with the target's own answers.

    ``tokens`` [B, T] int32, zeros behind each text; ``lengths`` [B]: of prompt and answer together;
    ``prompts`` [B]: of the prompt.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[tuple[Sequence[int], Sequence[int]]], *, longest: int = 512) -> Texts:
        """From (prompt, answer) pairs of token ids, each cut to its last ``longest`` tokens."""
        whole = [([*p, *a][-longest:], min(len(a), longest)) for p, a in rows]
        width = max(len(text) for text, _ in whole)
        tokens = np.zeros((len(whole), width), np.int32)
        for row, (text, _) in enumerate(whole):
            tokens[row, : len(text)] = text
        lengths = np.asarray([len(text) for text, _ in whole])
        return cls(tokens, lengths, lengths - np.asarray([answer for _, answer in whole]))

    def starts(self, steps: int) -> np.ndarray:
        """[B, T] bool: rows t behind which ``steps`` drafts can be judged, all of them answer tokens."""
        t = np.arange(self.tokens.shape[1])
        return (t + 2 >= self.prompts[:, None]) & (t + 1 + steps < self.lengths[:, None])


@functools.partial(jax.jit, static_argnums=0)
def _boundaries(config: ModelConfig, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    def one(row: jax.Array) -> tuple[jax.Array, jax.Array]:
        size = row.shape[0]
        cache = decoder.init_cache(config, 1, size, params["norm"].dtype)
        place = jnp.arange(size)[None]
        every = tuple(range(config.num_layers + 1))
        out = decoder.forward(params, config, row[None], place, cache, Causal(), aux=every)
        assert out.aux is not None
        return out.aux[0], out.hidden[0]

    return jax.lax.map(one, tokens)


@dataclasses.dataclass(frozen=True, eq=False)
class Features:
    """What a target says of texts: every ``boundary`` [B, T, L + 1, H], post-norm ``hidden`` [B, T, H]."""

    boundary: jax.Array
    hidden: jax.Array

    @classmethod
    def of(cls, target: Target, texts: Texts) -> Features:
        """One causal forward a text."""
        return cls(*_boundaries(target.config, target.params, jnp.asarray(texts.tokens)))

    def read(self, taps: Sequence[Boundary]) -> jax.Array:
        """[B, T, A, H] of what a draft reads, in the order of ``taps``."""
        return jnp.stack([self.hidden if t == FINAL else self.boundary[:, :, int(t)] for t in taps], axis=2)


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """``rates[i]``: share of the ``count`` places whose drafts 0 .. i are all what the target wrote."""

    rates: tuple[float, ...]
    count: int

    @property
    def length(self) -> float:
        """Drafts accepted a round."""
        return sum(self.rates)

    def beats(self, other: Acceptance) -> bool:
        """Whether it is better than ``other`` beyond chance: three standard errors of the first draft's rate,
        at least a tenth, and a fifth more drafts."""
        margin = max(0.1, 3 * (0.5 / max(self.count, 1)) ** 0.5)
        return self.rates[0] - other.rates[0] > margin and self.length > 1.2 * other.length

    def __str__(self) -> str:
        return " ".join(f"{rate:.0%}" for rate in self.rates)


def acceptance(drafted: np.ndarray, texts: Texts, ids: np.ndarray | None) -> Acceptance:
    """Of draft ids [steps, B, T - 1], whose target ids are ``ids`` (None: the same); -1 is no guess."""
    steps = drafted.shape[0]
    target_ids = drafted if ids is None else np.where(drafted < 0, -1, np.asarray(ids)[drafted])
    where = texts.starts(steps)[:, :-1]
    if not where.any():
        raise RequestError(f"no answer is longer than {steps + 1} tokens; nothing can be measured on them")
    right = np.ones(where.shape, bool)
    rates = []
    for k in range(steps):
        truth = np.roll(texts.tokens, -(k + 2), axis=1)[:, :-1]
        right = right & (target_ids[k] == truth)
        rates.append(float(right[where].mean()))
    return Acceptance(tuple(rates), int(where.sum()))
