"""The draft run several steps ahead from every position at once, as training does (EAGLE-3's training-time
test).

At run time step k of a draft that starts behind token t reads its own state of step k - 1, the token t + 1 +
k, the true features of positions <= t and its own earlier steps, at position t + k. ``unroll`` does that for
all t of a text in k passes over [B, T]: row t of pass k attends to the rows s <= t of pass 0 and, of each
later pass, to row t alone. Pass k of row t equals the k-th step of cached drafting on the same tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.drafts.passes import Passes, StepAttention, step_attention
from eaglejax.nn.cache import Placement
from eaglejax.nn.visible import Causal


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
    T - k have no such token: they run on token 0 and the caller masks them. A draft with a ``mask_id`` reads
    masks from pass 1 on, whatever the text. ``positions`` [B, T] of x_0 ..
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
    memories: tuple[Passes, ...] = tuple(Passes(attention, base) for _ in range(config.num_layers))
    state = eagle_model.fuse(params, config, features)
    states = []
    for step in range(steps):
        if step > 0 and config.mask_id is not None:
            state = jnp.broadcast_to(eagle_model.mask_feature(params, config), state.shape)
            tokens = jnp.full_like(tokens, config.mask_id)
        elif step > 0:
            state = params.adapter.from_draft(state if through_time else jax.lax.stop_gradient(state))
            tokens = jnp.concatenate([tokens[:, 1:], jnp.zeros_like(tokens[:, :1])], axis=1)
        routed: list[jax.Array] = []
        at = Placement(lengths, positions + step, visible)
        state, memories = eagle_model.backbone(params, config, state, tokens, memories, at, routed)
        if routing is not None:
            routing.append(routed)
        states.append(state)
    return states
