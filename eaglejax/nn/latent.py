"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): one small vector a token, for all heads.

The vector is the compressed latent, from which every head's key and value would be expanded, and one rotary
key that all heads share. It is attended in the absorbed form: the expansion of keys is taken into the queries
and that of values behind the sum, so that all heads read the same vector and nothing is ever expanded.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.errors import ConfigError
from eaglejax.kv_format import KVFormat
from eaglejax.nn import kv_codec
from eaglejax.nn.attention import attend
from eaglejax.nn.cache import SLOTS, Placement
from eaglejax.nn.indexer import Indexed, Indexer
from eaglejax.nn.kv import join, move, spoil, store
from eaglejax.nn.kv_codec import Stored
from eaglejax.nn.linear import linear
from eaglejax.nn.rope import Angles, RopeConfig, rotate
from eaglejax.pytree import ArrayInfo, constant

if TYPE_CHECKING:
    from eaglejax.nn.block import Norm, Weights


@pytree.dataclass
class Latent:
    """``vectors`` [B, 1, S, r + dr]: the latent of each token and its rotary key, in any ``KVFormat``."""

    vectors: Stored

    @property
    def capacity(self) -> int:
        """Slots a row (S)."""
        return self.vectors.shape[2]

    def attend(
        self,
        q: jax.Array,
        new: jax.Array,
        at: Placement,
        *,
        values: int,
        spoiled_by: Placement | None = None,
        **options: Any,
    ) -> tuple[jax.Array, Latent]:
        """Write N new vectors, then attend: ([B, N, Hq, values], the cache with them, uncommitted).

        ``q`` [B, N, Hq, r + dr]; ``new`` [B, N, r + dr]. The sum is of the vectors' first ``values`` numbers.
        Otherwise as ``KV.attend``: what is not finite reaches those alone that see it, by ``spoiled_by``
        where ``at`` has them see some slots only.
        """
        (vectors,), sound = store((self.vectors,), (new[:, :, None],), at)
        out = attend(
            q,
            vectors,
            vectors,
            at.lengths,
            at.visible,
            at.positions,
            slot_positions=at.slot_positions,
            **options,
        )
        return spoil(out[..., :values], sound, spoiled_by or at), Latent(vectors)

    def commit(self, lengths: jax.Array, path: jax.Array | None, kept: jax.Array) -> Latent:
        """See ``LayerCache``."""
        del kept  # what lies behind the new length is never read
        return self if path is None else Latent(move(self.vectors, lengths, path))

    def insert(self, slot: jax.Array, other: Latent, row: jax.Array) -> Latent:
        """See ``LayerCache``."""
        return Latent(join(self.vectors, slot, other.vectors, row))

    def release(self, slot: jax.Array) -> Latent:
        """See ``LayerCache``: what stands behind a length of 0 is never read."""
        del slot
        return self


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """``heads`` queries of ``plain_dim`` numbers without and ``rope_dim`` with rotation, values of
    ``value_dim``, over a latent of ``latent_dim``.

    ``query_rank``: width that queries pass through, normalised (None: they are projected at once). ``scale``
    multiplies scores. ``norm_eps``: of the two norms inside (None: the layer's). ``bias``: the
    projections from and to the residual stream have one, but for queries that are projected at once.
    ``indexer``: chooses the slots that are attended to, by the narrow queries. Rotary pairs are
    (i, i + rope_dim / 2), as everywhere here.
    """

    heads: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    latent_dim: int
    scale: float
    rope: RopeConfig
    query_rank: int | None = None
    norm_eps: float | None = None
    bias: bool = False
    indexer: Indexer | None = None

    def __post_init__(self) -> None:
        if self.indexer is not None and self.query_rank is None:
            raise ConfigError("an indexer reads narrow queries; this attention projects its queries at once")

    def table(self, wide: int, hidden: int, norm: Norm, dtype: Any) -> Weights:
        """q [I, Hq*(dp+dr)], or q_a [I, rq], q_a_norm [rq], q_b [rq, Hq*(dp+dr)]; kv_a [I, r+dr], kv_a_norm
        [r]; k_b [r, Hq*dp], v_b [r, Hq*dv]; o [Hq*dv, H]; q_a_bias, kv_a_bias, o_bias; the indexer's."""
        queries = self.heads * (self.plain_dim + self.rope_dim)
        r = self.latent_dim
        table: Weights = {
            "kv_a": ArrayInfo((wide, r + self.rope_dim), dtype, ("embed", None)),
            "kv_a_norm": norm.table(r, dtype),
            "k_b": ArrayInfo((r, self.heads * self.plain_dim), dtype, (None, "heads")),
            "v_b": ArrayInfo((r, self.heads * self.value_dim), dtype, (None, "heads")),
            "o": ArrayInfo((self.heads * self.value_dim, hidden), dtype, ("heads", "embed")),
        }
        if self.bias:
            table["kv_a_bias"] = ArrayInfo((r + self.rope_dim,), dtype, (None,), constant(0.0))
            table["o_bias"] = ArrayInfo((hidden,), dtype, (None,), constant(0.0))
        if self.query_rank is None:
            return table | {"q": ArrayInfo((wide, queries), dtype, ("embed", "heads"))}
        if self.bias:
            table["q_a_bias"] = ArrayInfo((self.query_rank,), dtype, (None,), constant(0.0))
        if self.indexer is not None:
            table |= self.indexer.table(wide, self.query_rank, dtype)
        return table | {
            "q_a": ArrayInfo((wide, self.query_rank), dtype, ("embed", None)),
            "q_a_norm": norm.table(self.query_rank, dtype),
            "q_b": ArrayInfo((self.query_rank, queries), dtype, (None, "heads")),
        }

    def cache_table(self, batch: int, capacity: int, kv_form: KVFormat) -> Latent | Indexed:
        """One vector a token, and the indexer's key. The vector serves as key and as value, so it is never
        kept as a difference."""
        shape = (batch, 1, capacity, self.latent_dim + self.rope_dim)
        latent = Latent(kv_codec.table(kv_form, shape, SLOTS, heads=None))
        if self.indexer is None:
            return latent
        return Indexed(latent, self.indexer.keys_table(batch, capacity, kv_form))  # type: ignore[arg-type]

    def __call__(
        self, weights: Weights, y: jax.Array, angles: Angles, norm: Norm, memory: Any, at: Placement
    ) -> tuple[jax.Array, Any]:
        """See ``nn.block.Mixer``; ``memory`` is what ``cache_table`` describes."""
        b, n, _ = y.shape
        options: dict[str, Any] = {"values": self.latent_dim, "scale": self.scale}
        r, heads = self.latent_dim, self.heads
        if self.norm_eps is not None:
            norm = dataclasses.replace(norm, eps=self.norm_eps)
        turn = angles.of(self.rope, self.rope_dim)
        if self.query_rank is None:
            q = linear(y, weights["q"])
        else:
            narrow = norm(linear(y, weights["q_a"], weights.get("q_a_bias")), weights["q_a_norm"])
            q = linear(narrow, weights["q_b"])
            if self.indexer is not None:
                options["asked"] = self.indexer(weights, y, narrow, turn)
        q = q.reshape(b, n, heads, self.plain_dim + self.rope_dim)
        compressed = linear(y, weights["kv_a"], weights.get("kv_a_bias"))
        latent = norm(compressed[..., :r], weights["kv_a_norm"])
        rotary = rotate(compressed[:, :, None, r:], *turn)[:, :, 0]
        # <q, K c> = <K^T q, c>: keys are never expanded.
        k_b = weights["k_b"].reshape(r, heads, self.plain_dim)
        absorbed = jnp.einsum(
            "bnhd,rhd->bnhr", q[..., : self.plain_dim], k_b, preferred_element_type=jnp.float32
        ).astype(y.dtype)
        queries = jnp.concatenate([absorbed, rotate(q[..., self.plain_dim :], *turn)], axis=-1)
        out, memory = memory.attend(queries, jnp.concatenate([latent, rotary], axis=-1), at, **options)
        v_b = weights["v_b"].reshape(r, heads, self.value_dim)
        values = jnp.einsum("bnhr,rhd->bnhd", out, v_b, preferred_element_type=jnp.float32)
        out = values.astype(y.dtype).reshape(b, n, -1)
        return linear(out, weights["o"], weights.get("o_bias")), memory
