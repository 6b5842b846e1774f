"""A smaller model with the same tokenizer drafts a chain (Leviathan et al., 2023; Chen et al., 2023).

The small model decodes ``length`` tokens one by one from its own cache inside the round. The last draft is
run through it too, although nothing is drawn from it: so the cache holds the whole chain, and whatever the
target accepts, the cache is right for it by moving its length alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from eaglejax import pytree, sampling
from eaglejax.drafts.base import Draft, Observation, Proposal
from eaglejax.drafts.limits import MOST_DEPTH, check_count
from eaglejax.drafts.static import OnChain, chain_draft
from eaglejax.kv_format import KVFormat, uncalibrated_format
from eaglejax.models import decoder
from eaglejax.models.config import ModelConfig
from eaglejax.nn.cache import Cache, rewind
from eaglejax.nn.visible import Causal
from eaglejax.sampling import RowSampling


@pytree.dataclass
class DraftModelState:
    """The small model's cache. ``ahead``: behind its lengths stands the chain that has just been proposed."""

    cache: Cache
    ahead: bool = pytree.static(default=False)


@dataclasses.dataclass(frozen=True)
class DraftModel(OnChain[decoder.Params, DraftModelState]):
    """A chain of ``length`` drafts by the decoder ``config``; ``params`` are its weights.

    ``vocab_size``: the target's, when it is not the draft's: tables of one tokenizer are padded to different
    sizes. Ids that only one of the two has are never drafted. Sampled rows draw from the draft's
    distribution after the row's own transform and hand that distribution on as q; greedy rows take its
    argmax. A position where the draft's logits are not finite ends its chain. ``cache_dtype``: format of the
    draft's keys and values, by name (see ``KVFormat``; None: the dtype of its weights). Raises ConfigError
    for a length beyond ``limits``.
    """

    keeps_own_drafts: ClassVar[bool] = True

    config: ModelConfig
    length: int = 4
    vocab_size: int | None = None
    cache_dtype: str | KVFormat | None = None

    def __post_init__(self) -> None:
        check_count("DraftModel: length", self.length, MOST_DEPTH)
        if self.vocab_size is not None:
            check_count("DraftModel: vocab_size", self.vocab_size, 2**31 - 1)
        if self.cache_dtype is not None:
            uncalibrated_format(self.cache_dtype)

    def init(self, params: decoder.Params, *, batch: int, capacity: int, inputs: Any = ()) -> DraftModelState:
        """An empty cache."""
        del inputs
        kv_form = self.cache_dtype or params["norm"].dtype
        return DraftModelState(decoder.init_cache(self.config, batch, capacity, kv_form))

    def observe(self, params: decoder.Params, state: DraftModelState, seen: Observation) -> DraftModelState:
        """Run the small model over a prompt chunk, or keep what it has run over of its own chain."""
        if state.ahead:
            return DraftModelState(state.cache.advance(seen.count))
        steps = jnp.arange(seen.tokens.shape[1])
        _, cache = self._forward(params, state.cache, seen.tokens, seen.start[:, None] + steps)
        return DraftModelState(cache.advance(seen.count))

    def propose(
        self,
        params: decoder.Params,
        state: DraftModelState,
        root: jax.Array,
        lengths: jax.Array,
        rows: RowSampling,
        keys: jax.Array,
    ) -> tuple[Draft, DraftModelState]:
        """Decode ``length`` tokens; ``q`` of the last node is zero, it has no children."""
        batch, target_vocab = root.shape[0], self.vocab_size or self.config.vocab_size
        tokens = jnp.zeros((batch, self.nodes), jnp.int32).at[:, 0].set(root)
        q = jnp.zeros((batch, self.nodes, target_vocab), jnp.float32) if rows.sampled else None

        def step(
            i: jax.Array, carry: tuple[Cache, jax.Array, jax.Array, jax.Array | None]
        ) -> tuple[Cache, jax.Array, jax.Array, jax.Array | None]:
            cache, tokens, count, q = carry
            here = jax.lax.dynamic_slice_in_dim(tokens, i, 1, axis=1)
            hidden, cache = self._forward(params, cache, here, lengths[:, None] + i)
            logits = _fit(decoder.unembed(params, self.config, hidden), target_vocab)
            ancestors = jnp.broadcast_to(jnp.arange(self.nodes) <= i, (batch, 1, self.nodes))
            processed = sampling.process(logits, rows, tokens, ancestors)
            sound = (count == i) & jnp.isfinite(processed.max(-1))[:, 0]
            guess = sampling.greedy(processed)[:, 0]
            if q is not None:
                probs = sampling.distribution(processed, rows)[:, 0]
                drawn = sampling.draw(probs, sampling.fold(keys, i))
                guess = jnp.where(rows.temperature > 0, drawn, guess)
                # Behind the chain's end nothing is drawn, and a NaN would outlive its token in p - q.
                probs = jnp.where(sound[:, None], probs, 0.0)
                q = jax.lax.dynamic_update_slice_in_dim(q, probs[:, None], i, axis=1)
            guess = jnp.where(sound, guess, root)
            tokens = jax.lax.dynamic_update_slice_in_dim(tokens, guess[:, None], i + 1, axis=1)
            return cache.advance(jnp.ones_like(lengths)), tokens, count + sound, q

        carry = (state.cache, tokens, jnp.zeros_like(lengths), q)
        cache, tokens, count, q = jax.lax.fori_loop(0, self.length, step, carry)
        last = tokens[:, self.length :]
        _, cache = self._forward(params, cache, last, lengths[:, None] + self.length)
        draft = chain_draft(root, tokens[:, 1:], count, Proposal(q=q))
        return draft, DraftModelState(rewind(cache, state.cache.lengths), ahead=True)

    def _forward(
        self, params: decoder.Params, cache: Cache, tokens: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, Cache]:
        # The target may emit an id that the draft's smaller table lacks; any row of it will do for a guess.
        tokens = jnp.minimum(tokens, self.config.vocab_size - 1)
        out = decoder.forward(params, self.config, tokens, positions, cache, Causal())
        return out.hidden, out.cache


def _fit(logits: jax.Array, vocab_size: int) -> jax.Array:
    """``logits`` [..., Vd] over the target's vocabulary: surplus ids cut off, missing ones impossible."""
    missing = max(vocab_size - logits.shape[-1], 0)
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
    return jnp.pad(logits, padding, constant_values=-jnp.inf)[..., :vocab_size]
