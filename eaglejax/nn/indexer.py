"""Sparse attention over latents (DSA, DeepSeek-V3.2; Liu et al. 2025, arXiv:2512.02556): a small attention of
its own, the lightning indexer, scores every slot that a query may see, and the query attends to the best.

Every query chooses for itself, a tree's nodes too: among the prefix and their own ancestors. A cache that has
no more slots than are chosen is attended to as a whole, which is the same.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.errors import ConfigError
from eaglejax.kv_format import KVFormat
from eaglejax.nn.cache import SLOTS, Placement
from eaglejax.nn.kv import join, move, write
from eaglejax.nn.linear import linear
from eaglejax.nn.rope import rotate
from eaglejax.nn.visible import Selected
from eaglejax.pytree import ArrayInfo, constant

if TYPE_CHECKING:
    from eaglejax.nn.block import Weights

_NORM_EPS = 1e-6
"""Of the layer norm of index keys."""


@dataclasses.dataclass(frozen=True)
class Indexer:
    """``heads`` queries over one key of ``head_dim`` a token; each token attends to the ``top_k`` slots of
    the highest sum of their rectified, weighted scores. The first ``rope_dim`` numbers of a head are rotated.
    """

    heads: int
    head_dim: int
    top_k: int
    rope_dim: int

    def __post_init__(self) -> None:
        if self.rope_dim > self.head_dim:
            raise ConfigError(f"an indexer rotates {self.rope_dim} numbers of heads of {self.head_dim}")

    def table(self, wide: int, rank: int, dtype: Any) -> Weights:
        """index_q [rq, Hi*di], index_k [I, di]; index_k_norm, index_k_bias [di]; index_weights [I, Hi], in
        f32."""
        size = self.head_dim
        return {
            "index_q": ArrayInfo((rank, self.heads * size), dtype, (None, "heads")),
            "index_k": ArrayInfo((wide, size), dtype, ("embed", None)),
            "index_k_norm": ArrayInfo((size,), dtype, (None,), constant(1.0)),
            "index_k_bias": ArrayInfo((size,), dtype, (None,), constant(0.0)),
            "index_weights": ArrayInfo((wide, self.heads), jnp.float32, ("embed", "heads")),
        }

    def keys_table(self, batch: int, capacity: int, kv_form: KVFormat) -> ArrayInfo:
        """Keys in the cache's dtype, in bfloat16 where the cache is narrower."""
        dtype = kv_form.dtype if kv_form.plain else "bfloat16"
        axes = ("batch", None, SLOTS, None)
        return ArrayInfo((batch, 1, capacity, self.head_dim), jnp.dtype(dtype), axes, constant(0.0))

    def __call__(
        self, weights: Weights, y: jax.Array, narrow: jax.Array, turn: tuple[jax.Array, jax.Array]
    ) -> Asked:
        """What the new tokens' ``y`` [B, N, I] and their normalised queries ``narrow`` [B, N, rq] ask and are
        asked by; ``turn``: cos and sin of their positions."""
        b, n, _ = y.shape
        q = linear(narrow, weights["index_q"]).reshape(b, n, self.heads, self.head_dim)
        k = linear(y, weights["index_k"], dtype=jnp.float32)
        k -= k.mean(-1, keepdims=True)
        k *= jax.lax.rsqrt(jnp.square(k).mean(-1, keepdims=True) + _NORM_EPS)
        k = (k * weights["index_k_norm"] + weights["index_k_bias"]).astype(y.dtype)
        shares = linear(y.astype(jnp.float32), weights["index_weights"], dtype=jnp.float32)
        return Asked(
            rotate(q, *turn),
            rotate(k[:, :, None], *turn),
            shares * (self.heads * self.head_dim) ** -0.5,
            self.top_k,
        )


@pytree.dataclass
class Asked:
    """An indexer's part of N new tokens: ``queries`` [B, N, Hi, di], ``keys`` [B, N, 1, di], ``shares``
    [B, N, Hi] f32, what each head's score counts. ``top_k``: see :class:`Indexer`."""

    queries: jax.Array
    keys: jax.Array
    shares: jax.Array
    top_k: int = pytree.static()

    def choose(self, keys: jax.Array, at: Placement) -> Placement:
        """``at`` with the slots chosen from ``keys`` [B, 1, S, di], those of the new tokens among them; as it
        is where all are."""
        b, n, _, _ = self.queries.shape
        size = keys.shape[2]
        if size <= self.top_k:
            return at
        scores = jnp.einsum(
            "bnhd,bsd->bnhs",
            self.queries.astype(jnp.float32),
            keys[:, 0].astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        total = jnp.einsum("bnh,bnhs->bns", self.shares, jax.nn.relu(scores), precision="highest")
        slots = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (b, size))
        seen = at.visible.sees(n, slots, at.lengths)
        best, chosen = jax.lax.top_k(jnp.where(seen, total, -jnp.inf), self.top_k)
        chosen = jnp.where(jnp.isneginf(best), -1, chosen)
        return dataclasses.replace(at, visible=Selected(chosen, at.visible.slots(n)))


@pytree.dataclass
class Indexed:
    """``latent``: a layer's own memory; ``keys`` [B, 1, S, di]: the indexer's, of the same tokens."""

    latent: Any
    keys: Any

    @property
    def capacity(self) -> int:
        """Slots a row (S)."""
        return self.keys.shape[2]

    def attend(
        self, q: jax.Array, new: jax.Array, at: Placement, *, asked: Asked, **options: Any
    ) -> tuple[jax.Array, Indexed]:
        """As ``nn.latent.Latent.attend``, to the slots that the indexer chooses.

        A token whose key is not finite reaches those alone that see it: its key is stored as zeros, and its
        latent, which comes of the same numbers, is not finite either.
        """
        fresh = asked.keys.astype(self.keys.dtype).transpose(0, 2, 1, 3)
        fresh = jnp.where(jnp.isfinite(fresh).all(-1, keepdims=True), fresh, 0)
        n = q.shape[1]
        keys = write(self.keys, fresh, at.lengths + (at.visible.slots(n) - n))
        assert isinstance(keys, jax.Array)
        out, latent = self.latent.attend(q, new, asked.choose(keys, at), spoiled_by=at, **options)
        return out, Indexed(latent, keys)

    def commit(self, lengths: jax.Array, path: jax.Array | None, kept: jax.Array) -> Indexed:
        """See ``LayerCache``."""
        keys = self.keys if path is None else move(self.keys, lengths, path)
        return Indexed(self.latent.commit(lengths, path, kept), keys)

    def insert(self, slot: jax.Array, other: Indexed, row: jax.Array) -> Indexed:
        """See ``LayerCache``."""
        return Indexed(self.latent.insert(slot, other.latent, row), join(self.keys, slot, other.keys, row))

    def release(self, slot: jax.Array) -> Indexed:
        """See ``LayerCache``: what stands behind a length of 0 is never read."""
        return Indexed(self.latent.release(slot), self.keys)
