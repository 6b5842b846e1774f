"""The MTP network: its table of weights and its pure forward.

Weights are a nested dict; every matrix is [in, out]::

    modules[m]: embed_norm [H], feature_norm [H]     of the token's embedding and of the state
                fc [2H, H]                           reads [embedding, state], both normalised
                layer                                see ``nn.block``
                norm [H]                             before the head
                head [H, V]                          where the modules have one each
    embed [V, H]                                     where the draft ships one
    feature_map [H, H]                               of one aligned to a rotated target (always f32)

Module m is handed the state of module m - 1 (the target's, for the first) and one token more. The head reads
the state behind ``norm``, whichever state the next step is handed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.drafts.features import FeatureAdapter
from eaglejax.drafts.mtp.config import MtpConfig
from eaglejax.drafts.passes import LatentPasses, Passes, StepAttention, step_attention
from eaglejax.kv_format import KVFormat, kv_format
from eaglejax.nn import cache as caches
from eaglejax.nn.cache import Cache, Placement
from eaglejax.nn.kv import fill
from eaglejax.nn.latent import LatentAttention
from eaglejax.nn.linear import PackedWeight, embedding, linear
from eaglejax.nn.rope import Angles
from eaglejax.nn.visible import Causal, Visible
from eaglejax.pytree import ArrayInfo
from eaglejax.tap import scope, tap

Weights = dict[str, Any]


@pytree.dataclass
class MtpParams:
    """A draft's weights and what it borrows.

    ``weights``: see the module's text. ``embed`` [V, H] and ``head`` ([H, V], or [V, H] when ``tied``) are
    the target's arrays, by reference, where the draft has none of its own (else None).
    """

    weights: Weights
    embed: Any = None
    head: Any = None
    adapter: FeatureAdapter = FeatureAdapter()
    tied: bool = pytree.static(default=False)

    @property
    def ids(self) -> None:
        """Its ids are the target's."""


def param_table(config: MtpConfig, dtype: Any = jnp.float32) -> Weights:
    """Shape, dtype, logical axes and initialiser of every weight of the draft's own."""
    hidden, norm = config.hidden_size, config.block.norm

    def module() -> Weights:
        table: Weights = {
            "embed_norm": norm.table(hidden, dtype),
            "feature_norm": norm.table(hidden, dtype),
            "fc": ArrayInfo((2 * hidden, hidden), dtype, (None, "embed")),
            "layer": config.block.table(dtype),
            "norm": norm.table(hidden, dtype),
        }
        if config.own_head:
            table["head"] = ArrayInfo((hidden, config.vocab_size), dtype, ("embed", "vocab"))
        return table

    table: Weights = {"modules": [module() for _ in range(config.modules)]}
    if config.own_embedding:
        table["embed"] = ArrayInfo((config.vocab_size, hidden), dtype, ("vocab", "embed"))
    if config.feature_map:
        table["feature_map"] = ArrayInfo((hidden, hidden), jnp.float32, (None, "embed"))
    return table


def cast(weights: Weights, config: MtpConfig, dtype: Any) -> Weights:
    """The weights, or some of them, each in what ``param_table`` of ``dtype`` holds it in."""
    infos, _ = jax.tree_util.tree_flatten_with_path(param_table(config, dtype), is_leaf=pytree.is_info)
    held_in = {path: info.dtype for path, info in infos}
    return jax.tree_util.tree_map_with_path(lambda path, w: w.astype(held_in[path]), weights)


def dtype_of(weights: Weights) -> Any:
    """The dtype that a draft computes in."""
    return weights["modules"][0]["fc"].dtype


def init_cache(config: MtpConfig, batch: int, capacity: int, kv_form: Any) -> Cache:
    """An empty cache of one module's layer, in a format that needs no calibration."""
    form: KVFormat = kv_format(kv_form)
    return fill(caches.table((config.block.mixer.cache_table(batch, capacity, form),), batch), form)


def read_target(params: MtpParams, config: MtpConfig, features: jax.Array) -> jax.Array:
    """What the first module reads of committed tokens [B, M, H], of the target's last states [B, M, 1, H]."""
    state = params.adapter.from_target(features)[:, :, 0]
    if config.feature_map:
        state = linear(state.astype(jnp.float32), params.weights["feature_map"])
    return state.astype(dtype_of(params.weights))


def module(
    params: MtpParams,
    config: MtpConfig,
    index: int,
    state: jax.Array,
    tokens: jax.Array,
    memory: Any,
    at: Placement,
    routing: list[jax.Array] | None = None,
) -> tuple[jax.Array, Any]:
    """States [B, N, H] of the pairs (``state`` [B, N, H], ``tokens`` [B, N]) at ``at.positions``, as the next
    step reads them, and the memory of module ``index`` with them. ``routing``: as in ``Block.run``."""
    weights, norm = params.weights["modules"][index], config.block.norm
    embed = params.embed if params.embed is not None else params.weights["embed"]
    e = embedding(embed, tokens).astype(state.dtype)
    if config.embed_scale is not None:
        e = e * jnp.asarray(config.embed_scale, e.dtype)
    tap("embedding", e)
    tap("feature", state)
    pair = [norm(e, weights["embed_norm"]), norm(state, weights["feature_norm"])]
    x = linear(jnp.concatenate(pair, -1), weights["fc"])
    tap("fc", x)
    with jax.named_scope(f"mtp_{index}"), scope("layers/0"):
        x, memory = config.block.run(weights["layer"], x, Angles(at.positions), memory, at, routing=routing)
    x = norm(x, weights["norm"]) if config.recycle == "post_norm" else x
    tap("state", x)
    return x, memory


def logits(params: MtpParams, config: MtpConfig, index: int, state: jax.Array) -> jax.Array:
    """Logits [..., V] f32 of what module ``index`` yielded, ``state`` [..., H]."""
    weights = params.weights["modules"][index]
    if config.recycle == "pre_norm":
        state = config.block.norm(state, weights["norm"])
    head = params.head if params.head is not None else weights["head"]
    if not isinstance(head, PackedWeight):
        state = state.astype(head.dtype)
    out = linear(state, head, transposed=params.tied and params.head is not None, dtype=jnp.float32)
    if config.softcap is not None:
        out = config.softcap * jnp.tanh(out / config.softcap)
    tap("logits", out)
    return out


def step(
    params: MtpParams,
    config: MtpConfig,
    index: int,
    state: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Cache,
    visible: Visible,
    slot_positions: jax.Array,
) -> tuple[jax.Array, Cache]:
    """``module`` over its cache: (states [B, N, H], the cache with the N pairs; lengths unmoved).

    ``visible`` and ``slot_positions`` [B, M] cover the M slots behind the committed ones, the N last.
    """
    at = Placement(cache.lengths, positions, visible, slot_positions)
    state, layer = module(params, config, index, state, tokens, cache.layers[0], at)
    return state, dataclasses.replace(cache, layers=(layer,))


def unroll(
    params: MtpParams,
    config: MtpConfig,
    features: jax.Array,
    tokens: jax.Array,
    steps: int,
    *,
    positions: jax.Array | None = None,
    documents: jax.Array | None = None,
    attention: StepAttention = step_attention,
    routing: list[list[jax.Array]] | None = None,
) -> list[jax.Array]:
    """States of steps 0 .. ``steps`` - 1 from every position at once, each [B, T, H].

    ``features`` [B, T, 1, H]: the target's last states of x_0 .. x_{T-1}; ``tokens`` [B, T]: x_1 .. x_T. Step
    k of row t reads token x_{t+1+k} and predicts x_{t+2+k}; rows t >= T - k have no such token: they run on
    token 0 and the caller masks them. A module that is asked for the first time sees the rows s <= t of that
    step; asked again it moreover sees its own later passes of row t. ``positions`` [B, T] of x_0 .. (default
    0, 1, ...); ``documents`` [B, T] int: rows of different documents do not see each other. ``routing``: an
    empty list that gets each step's router logits (modules with experts).
    """
    batch, length = tokens.shape
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    lengths, visible = jnp.zeros((batch,), jnp.int32), Causal(documents)
    kind = LatentPasses if isinstance(config.block.mixer, LatentAttention) else Passes
    memories: list[Any] = [kind(attention, visible.new(length, lengths))] * config.modules
    state = read_target(params, config, features)
    states = []
    for k in range(steps):
        if k > 0:
            state = params.adapter.from_draft(state)
            tokens = jnp.concatenate([tokens[:, 1:], jnp.zeros_like(tokens[:, :1])], axis=1)
        asked, index = divmod(k, config.modules)
        at = Placement(lengths, positions + asked, visible)
        routed: list[jax.Array] = []
        state, memories[index] = module(params, config, index, state, tokens, memories[index], at, routed)
        if routing is not None:
            routing.append(routed)
        states.append(state)
    return states
