"""Gated delta rule (Yang et al. 2024, arXiv:2412.06464): a state instead of keys and values.

A head keeps a matrix S [dk, dv]; a token decays it by exp(g), replaces what it holds for key k by a mix with
value v, and reads it with its query:

    S <- exp(g) S;  S <- S + k (beta (v - k^T S))^T;  o = S^T q

Here a whole forward is one set of matrix products. Let G_i be the sum of g along the path from a tree's root
to its node i. Unrolled, S_i = exp(G_i) S_0 + sum_j exp(G_i - G_j) k_j u_j^T over the nodes j of that path,
where u solves

    u_i + beta_i sum_{j above i} exp(G_i - G_j) <k_i, k_j> u_j = beta_i (v_i - exp(G_i) S_0^T k_i)

a triangular system, because parents have smaller numbers than their children. A chain is the tree whose paths
are prefixes, so prompts, single tokens and trees are one formula, and no node has a state of its own. What is
kept of a forward is what went into that formula; ``commit`` evaluates it again along the path that was kept.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.errors import ConfigError, EaglejaxError
from eaglejax.kv_format import KVFormat
from eaglejax.nn.cache import Placement, put_row
from eaglejax.nn.linear import linear
from eaglejax.nn.rope import Angles
from eaglejax.nn.visible import Causal, Tree
from eaglejax.pytree import ArrayInfo, constant

if TYPE_CHECKING:
    from eaglejax.nn.block import Norm, Weights

_sum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST)
"""States outlive many tokens, so that what goes into them is never rounded to bfloat16."""

_UNIT = 1e-6
"""Added to a squared length before queries and keys are divided by it."""


@pytree.dataclass
class Step:
    """What N tokens do to a state, f32: ``k`` [B, N, H, dk], ``v`` [B, N, H, dv], ``beta``, ``g`` [B, N, H];
    ``raw`` [B, N, C]: their inputs to the convolution."""

    k: jax.Array
    v: jax.Array
    beta: jax.Array
    g: jax.Array
    raw: jax.Array


@pytree.dataclass
class Recurrent:
    """``state`` [B, H, dk, dv] f32 behind the committed tokens; ``recent`` [B, K - 1, C]: the last inputs to
    the convolution, the newest last; ``written``: the tokens written last, until they are committed."""

    state: jax.Array
    recent: jax.Array
    written: Step | None = None

    @property
    def capacity(self) -> None:
        """None: it does not grow."""

    def commit(self, lengths: jax.Array, path: jax.Array | None, kept: jax.Array) -> Recurrent:
        """See ``LayerCache``: the kept tokens are replayed. Raises EaglejaxError where none were written."""
        del lengths
        if self.written is None:
            raise EaglejaxError("a recurrent layer was asked to commit tokens that were not written")
        step = self.written
        if path is not None:
            step = jax.tree.map(
                lambda x: jnp.take_along_axis(x, path.reshape(*path.shape, *[1] * (x.ndim - 2)), axis=1), step
            )
        count = step.g.shape[1]
        real = (jnp.arange(count) < kept[:, None])[:, :, None]
        # A token of g = 0 and beta = 0 leaves the state as it is.
        g, beta = jnp.where(real, step.g, 0), jnp.where(real, step.beta, 0)
        chain = jnp.broadcast_to(jnp.tril(jnp.ones((count, count), bool)), (kept.shape[0], count, count))
        sums, decay = _decays(g, chain)
        u = _updates(self.state, step.k, step.v, beta, sums, decay)
        left = jnp.exp(sums[:, -1:] - sums)[..., None]
        grown = _sum("bnhk,bnhv->bhkv", step.k * left, u)
        state = jnp.exp(sums[:, -1])[:, :, None, None] * self.state + grown
        at = kept[:, None] + jnp.arange(self.recent.shape[1])
        joined = jnp.concatenate([self.recent, step.raw.astype(self.recent.dtype)], axis=1)
        return Recurrent(state, jnp.take_along_axis(joined, at[:, :, None], axis=1))

    def insert(self, slot: jax.Array, other: Recurrent, row: jax.Array) -> Recurrent:
        """See ``LayerCache``."""
        return Recurrent(
            put_row(self.state, slot, other.state, row), put_row(self.recent, slot, other.recent, row)
        )

    def release(self, slot: jax.Array) -> Recurrent:
        """See ``LayerCache``."""
        return Recurrent(self.state.at[slot].set(0), self.recent.at[slot].set(0))


@dataclasses.dataclass(frozen=True)
class GatedDelta:
    """``heads`` heads of state [key_dim, value_dim], whose queries and keys come from ``key_heads``.

    A causal depthwise convolution over ``kernel`` tokens and silu stand before queries, keys and values;
    queries and keys have unit length; the result is normalised a head and gated by silu of another projection
    (as in Qwen3-Next).
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4

    def __post_init__(self) -> None:
        if self.heads % self.key_heads:
            raise ConfigError(f"{self.heads} heads are not a multiple of {self.key_heads} key heads")
        if self.kernel < 2:
            raise ConfigError(f"a convolution over {self.kernel} tokens mixes nothing; give 2 or more")

    @property
    def channels(self) -> int:
        """C: queries, keys and values, which the convolution reads."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    def table(self, wide: int, hidden: int, norm: Norm, dtype: Any) -> Weights:
        """qkv [I, C]; z [I, H*dv]; b, a [I, H]; conv [K, C]; a_log, dt_bias [H] f32; out_norm [dv]; o [H*dv,
        hidden]."""
        out = self.heads * self.value_dim
        return {
            "qkv": ArrayInfo((wide, self.channels), dtype, ("embed", "heads")),
            "z": ArrayInfo((wide, out), dtype, ("embed", "heads")),
            "b": ArrayInfo((wide, self.heads), dtype, ("embed", "heads")),
            "a": ArrayInfo((wide, self.heads), dtype, ("embed", "heads")),
            "conv": ArrayInfo((self.kernel, self.channels), dtype, (None, "heads")),
            "a_log": ArrayInfo((self.heads,), jnp.float32, ("heads",), constant(0.0)),
            "dt_bias": ArrayInfo((self.heads,), jnp.float32, ("heads",), constant(1.0)),
            "out_norm": ArrayInfo((self.value_dim,), dtype, (None,), constant(1.0)),
            "o": ArrayInfo((out, hidden), dtype, ("heads", "embed")),
        }

    def cache_table(self, batch: int, capacity: int, kv_form: KVFormat) -> Recurrent:
        """A state a head and the convolution's last inputs, in f32 whatever ``kv_form`` and ``capacity``."""
        del capacity, kv_form
        state = (batch, self.heads, self.key_dim, self.value_dim)
        recent = (batch, self.kernel - 1, self.channels)
        return Recurrent(
            ArrayInfo(state, jnp.float32, ("batch", "heads", None, None), constant(0.0)),  # type: ignore[arg-type]
            ArrayInfo(recent, jnp.float32, ("batch", None, "heads"), constant(0.0)),  # type: ignore[arg-type]
        )

    def __call__(
        self, weights: Weights, y: jax.Array, angles: Angles, norm: Norm, memory: Recurrent, at: Placement
    ) -> tuple[jax.Array, Recurrent]:
        """See ``nn.block.Mixer``. Raises ConfigError where what a token sees is not one path."""
        del angles
        b, n, _ = y.shape
        if not isinstance(at.visible, Causal | Tree) or at.visible.slots(n) != n:
            raise ConfigError(
                f"a recurrent layer reads tokens along one path, Causal or a Tree of its own {n} tokens; it "
                f"was given {type(at.visible).__name__} over {at.visible.slots(n)}"
            )
        seen = at.visible.new(n, at.lengths)
        raw = linear(y, weights["qkv"]).astype(jnp.float32)
        sound = jnp.isfinite(raw).all(-1)
        depth = at.positions - at.lengths[:, None]
        mixed = jax.nn.silu(
            _convolve(jnp.where(sound[:, :, None], raw, 0), weights["conv"], memory, seen, depth)
        )
        keys = self.key_heads * self.key_dim
        q, k, v = jnp.split(mixed, (keys, 2 * keys), axis=-1)

        def spread(x: jax.Array) -> jax.Array:
            x = x.reshape(b, n, self.key_heads, self.key_dim)
            x = x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _UNIT)
            return jnp.repeat(x, self.heads // self.key_heads, axis=2)

        q, k = spread(q) * self.key_dim**-0.5, spread(k)
        beta = jax.nn.sigmoid(linear(y, weights["b"], dtype=jnp.float32))
        rate = jax.nn.softplus(linear(y, weights["a"], dtype=jnp.float32) + weights["dt_bias"])
        g = -jnp.exp(weights["a_log"]) * rate
        sound &= jnp.isfinite(beta).all(-1) & jnp.isfinite(g).all(-1)
        step = Step(k, v.reshape(b, n, self.heads, self.value_dim), beta, g, raw)
        step = jax.tree.map(lambda x: jnp.where(sound.reshape(b, n, *[1] * (x.ndim - 2)), x, 0), step)
        out = _read(memory.state, q, step, seen)
        # What is not finite is kept as a token that does nothing, and reaches those alone that see it.
        lost = (seen & ~sound[:, None]).any(2)
        z = linear(y, weights["z"], dtype=jnp.float32).reshape(out.shape)
        scaled = out * jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + norm.eps)
        gated = scaled * weights["out_norm"].astype(jnp.float32) * jax.nn.silu(z)
        gated = jnp.where(lost[:, :, None, None], jnp.nan, gated)
        result = linear(gated.reshape(b, n, -1).astype(y.dtype), weights["o"])
        return result, dataclasses.replace(memory, written=step)


def _convolve(
    raw: jax.Array, kernel: jax.Array, memory: Recurrent, seen: jax.Array, depth: jax.Array
) -> jax.Array:
    """[B, N, C]: each node's inputs along its path under ``kernel`` [K, C], committed ones included.

    ``seen`` [B, N, N]: ancestor or self; ``depth`` [B, N]: 0 for what follows the last committed token.
    """
    taps = kernel.shape[0]
    joined = jnp.concatenate([memory.recent, raw], axis=1)
    total = jnp.zeros_like(raw)
    for back in range(taps):
        # The ancestor so many tokens above a node is the one of that depth on its path.
        above = jnp.argmax(seen & (depth[:, None, :] == depth[:, :, None] - back), axis=2)
        committed = taps - 1 + depth - back
        at = jnp.where(back <= depth, taps - 1 + above, committed)
        total += jnp.take_along_axis(joined, at[:, :, None], axis=1) * kernel[taps - 1 - back].astype(
            jnp.float32
        )
    return total


def _decays(g: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(G [B, N, H], exp(G_i - G_j) [B, H, N, N] for j on the path to i, else 0)."""
    sums = _sum("bij,bjh->bih", seen.astype(jnp.float32), g)
    apart = (sums[:, :, None] - sums[:, None]).transpose(0, 3, 1, 2)
    return sums, jnp.where(seen[:, None], jnp.exp(jnp.where(seen[:, None], apart, 0)), 0)


def _updates(
    state: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, sums: jax.Array, decay: jax.Array
) -> jax.Array:
    """u [B, N, H, dv] of the module's text."""
    n = k.shape[1]
    held = _sum("bnhk,bhkv->bnhv", k, state)
    wanted = (beta[..., None] * (v - jnp.exp(sums)[..., None] * held)).transpose(0, 2, 1, 3)
    alike = _sum("bihk,bjhk->bhij", k, k)
    above = jnp.where(jnp.eye(n, dtype=bool), 0, decay) * alike * beta.transpose(0, 2, 1)[..., None]
    u = jax.lax.linalg.triangular_solve(
        above + jnp.eye(n), wanted, left_side=True, lower=True, unit_diagonal=True
    )
    return u.transpose(0, 2, 1, 3)


def _read(state: jax.Array, q: jax.Array, step: Step, seen: jax.Array) -> jax.Array:
    """Results [B, N, H, dv] f32."""
    sums, decay = _decays(step.g, seen)
    u = _updates(state, step.k, step.v, step.beta, sums, decay)
    old = _sum("bnhk,bhkv->bnhv", q, state)
    meet = _sum("bihk,bjhk->bhij", q, step.k) * decay
    new = _sum("bhij,bjhv->bihv", meet, u)
    return jnp.exp(sums)[..., None] * old + new
