"""The draft run several steps ahead from every position at once, as training does (EAGLE-3's training-time
test).

At run time step k of a draft that starts behind token t reads its own state of step k - 1, the token t + 1 +
k, the true features of positions <= t and its own earlier steps, at position t + k. ``unroll`` does that for
all t of a text in k passes over [B, T]: row t of pass k attends to the rows s <= t of pass 0 and, of each
later pass, to row t alone. Pass k of row t equals the k-th step of cached drafting on the same tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.nn.cache import Placement
from eaglejax.nn.visible import Causal

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
class _Passes:
    """A layer's memory in training: keys and values of every pass so far, attended as ``attention`` does."""

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
    ) -> tuple[jax.Array, _Passes]:
        """As ``nn.kv.KV.attend``; drafts cap no scores."""
        del at
        assert softcap is None
        now = dataclasses.replace(self, keys=(*self.keys, k), values=(*self.values, v))
        out = self.attention(q, list(now.keys), list(now.values), self.base, scale=scale, window=window)
        return out, now


def unroll(
    params: EagleParams,
    config: EagleConfig,
    features: jax.Array,
    tokens: jax.Array,
    steps: int,
    *,
    positions: jax.Array | None = None,
    documents: jax.Array | None = None,
    attention: StepAttention = step_attention,
    through_time: bool = True,
    routing: list[list[jax.Array]] | None = None,
) -> list[jax.Array]:
    """States of passes 0 .. ``steps`` - 1, each [B, T, H]; ``eagle_model.logits`` reads them.

    ``features`` [B, T, A, Ht]: the target's, of tokens x_0 .. x_{T-1} (A = 1 for EAGLE-1). ``tokens`` [B, T]:
    x_1 .. x_T, the token after each. Pass k of row t reads token x_{t+1+k} and predicts x_{t+2+k}; rows t >=
    T - k have no such token: they run on token 0 and the caller masks them. ``positions`` [B, T] of x_0 ..
    (default 0, 1, ...); ``documents`` [B, T] int: rows of different documents do not see each other (a row
    whose shifted token belongs to the next document is the caller's to mask). ``through_time`` False cuts the
    gradient between passes (HASS). ``routing``: an empty list that gets, for each pass, each layer's router
    logits [B, T, E] f32 (drafts with experts).
    """
    batch, length = tokens.shape
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    lengths = jnp.zeros((batch,), jnp.int32)
    visible = Causal(documents)
    base = visible.new(length, lengths)
    memories: tuple[_Passes, ...] = tuple(_Passes(attention, base) for _ in range(config.num_layers))
    state = eagle_model.fuse(params, config, features)
    states = []
    for step in range(steps):
        if step > 0:
            state = params.adapter.from_draft(state if through_time else jax.lax.stop_gradient(state))
            tokens = jnp.concatenate([tokens[:, 1:], jnp.zeros_like(tokens[:, :1])], axis=1)
        routed: list[jax.Array] = []
        at = Placement(lengths, positions + step, visible)
        state, memories = eagle_model.backbone(params, config, state, tokens, memories, at, routed)
        if routing is not None:
            routing.append(routed)
        states.append(state)
    return states
