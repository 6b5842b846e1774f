"""Attention of a draft that is run several steps ahead from every position at once, as training does.

Pass k of row t is step k of a draft that starts behind token t (EAGLE-3's training-time test): it attends to
the rows s <= t of pass 0 and, of each later pass, to row t alone. A layer is handed a memory of passes where
decoding hands it a cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from eaglejax.errors import ConfigError
from eaglejax.nn.cache import Placement

StepAttention = Callable[..., jax.Array]
"""Signature of :func:`step_attention`, so that a kernel can take its place."""


def step_attention(
    q: jax.Array,
    keys: list[jax.Array],
    values: list[jax.Array],
    base: jax.Array,
    *,
    scale: float,
    window: int | None,
) -> jax.Array:
    """Attention of pass k = len(keys) - 1 over pass 0 and over the row's own later passes; the plain form.

    ``q`` [B, T, Hq, d]; ``keys``, ``values``: one [B, T, Hkv, d] a pass, the current one last. ``base`` [B,
    T, T] bool: which rows of pass 0 a row sees. ``window`` W: nothing W or more positions back is seen.
    Result [B, T, Hq, d] in q's dtype; softmax in f32.
    """
    batch, length, heads, d = q.shape
    kv_heads, steps = keys[0].shape[2], len(keys) - 1
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, d)
    seen = base
    if window is not None:
        rows = jnp.arange(length)
        seen = seen & (rows[:, None] + steps - rows[None, :] < window)
    first = jnp.einsum("bthgd,bshd->bhgts", grouped, keys[0], preferred_element_type=jnp.float32) * scale
    first = jnp.where(seen[:, None, None], first, -jnp.inf)
    near = [i for i in range(1, steps + 1) if window is None or steps - i < window]
    own = [
        jnp.einsum("bthgd,bthd->bhgt", grouped, keys[i], preferred_element_type=jnp.float32)[..., None]
        * scale
        for i in near
    ]
    weights = jax.nn.softmax(jnp.concatenate([first, *own], axis=-1), axis=-1)
    out = jnp.einsum("bhgts,bshd->bthgd", weights[..., :length], values[0].astype(jnp.float32))
    for column, i in enumerate(near):
        share = weights[..., length + column].transpose(0, 3, 1, 2)
        out = out + share[..., None] * values[i].astype(jnp.float32)[:, :, :, None]
    return out.reshape(batch, length, heads, d).astype(q.dtype)


@dataclasses.dataclass(frozen=True)
class Passes:
    """A layer's memory in training: keys and values of every pass so far, attended as ``attention`` does.

    ``base`` [B, T, T] bool: which rows of pass 0 a row sees.
    """

    attention: StepAttention
    base: jax.Array
    keys: tuple[jax.Array, ...] = ()
    values: tuple[jax.Array, ...] = ()

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        at: Placement,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Passes]:
        """As ``nn.kv.KV.attend``. Raises ConfigError for capped scores and sinks, which it does not know."""
        del at
        if softcap is not None or sinks is not None:
            raise ConfigError("attention with a softcap or with sinks cannot be trained as a draft's")
        now = dataclasses.replace(self, keys=(*self.keys, k), values=(*self.values, v))
        out = self.attention(q, list(now.keys), list(now.values), self.base, scale=scale, window=window)
        return out, now


@dataclasses.dataclass(frozen=True)
class LatentPasses:
    """The same of a layer that keeps one vector a token for all heads."""

    attention: StepAttention
    base: jax.Array
    vectors: tuple[jax.Array, ...] = ()

    def attend(
        self, q: jax.Array, new: jax.Array, at: Placement, *, values: int, scale: float
    ) -> tuple[jax.Array, LatentPasses]:
        """As ``nn.latent.Latent.attend``."""
        del at
        now = dataclasses.replace(self, vectors=(*self.vectors, new[:, :, None]))
        every = list(now.vectors)
        out = self.attention(q, every, every, self.base, scale=scale, window=None)
        return out[..., :values], now
