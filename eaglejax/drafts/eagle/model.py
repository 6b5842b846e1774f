"""The EAGLE draft network: its table of weights and its pure forward.

Weights are a nested dict; every matrix is [in, out]::

    fc [F, H], fc_bias [H]              F = 2H ([embedding, feature], EAGLE-1) or A * Ht (joined target
    features, EAGLE-3; none where it reads the last state alone)
    aux_norm [A * Ht] or [A, Ht]        EAGLE-3 with ``aux_norm`` "joined" or "each"
    feature_map [Ht, H]                 a draft of the last state aligned to a rotated target (always f32)
    mask [max(A, 1) * Ht]               with ``mask_id``: what stands for an unknown token's features
    layers[i]: input_norm [H]           not in EAGLE-1's first layer; in EAGLE-3's it is the embedding's norm
               hidden_norm [H]          EAGLE-3's first layer alone: the feature's norm
               q [I, Hq*d], k, v [I, Hkv*d], o [Hq*d, H]    I = 2H in EAGLE-3's first layer, else H; q_bias
               ... q_norm, k_norm [d]; mlp_norm [H]; gate, up [H, Fm], down [Fm, H], or with experts
               router [H, E] (always f32), experts {gate, up [E, H, Fe], down [E, Fe, H]}
    norm [H]                            where a norm stands before the head
    embed [V, H], head [H, Vd]          where the draft ships its own

Two functions make a draft step: ``fuse`` turns what the target computed for a token into the draft's feature,
``step`` runs the layers on (feature, next token) pairs. The state that ``step`` returns is the next step's
feature (without ``fuse``) and what ``logits`` reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.features import FeatureAdapter
from eaglejax.kv_format import kv_format
from eaglejax.nn import cache as caches
from eaglejax.nn.cache import Cache, Placement
from eaglejax.nn.kv import fill
from eaglejax.nn.linear import PackedWeight, embedding, linear
from eaglejax.nn.norm import rms_norm
from eaglejax.nn.rope import Angles
from eaglejax.nn.visible import Causal, Visible
from eaglejax.pytree import ArrayInfo, constant, normal
from eaglejax.tap import scope, tap

Weights = dict[str, Any]


@pytree.dataclass
class EagleParams:
    """A draft's weights and what it borrows.

    ``weights``: see the module's text. ``embed`` [V, H] and ``head`` ([H, V], or [V, H] when ``tied``) are
    the target's arrays, by reference, where the draft has none of its own (else None). ``ids`` [Vd] int32:
    target id of each draft id, strictly increasing; None when they are the same.
    """

    weights: Weights
    embed: Any = None
    head: Any = None
    ids: jax.Array | None = None
    adapter: FeatureAdapter = FeatureAdapter()
    tied: bool = pytree.static(default=False)


def param_table(config: EagleConfig, dtype: Any = jnp.float32) -> Weights:
    """Shape, dtype, logical axes and initialiser of every weight of the draft's own."""
    hidden = config.hidden_size

    def matrix(*shape: int, axes: tuple[str | None, ...]) -> ArrayInfo:
        return ArrayInfo(shape, dtype, axes)

    def norm(*shape: int) -> ArrayInfo:
        return ArrayInfo(shape, dtype, (None,) * len(shape), constant(1.0))

    def layer(index: int) -> Weights:
        table = config.block(index).table(dtype)
        if config.version == 3 or index > 0:
            table["input_norm"] = norm(hidden)
        if config.version == 3 and index == 0:
            table["hidden_norm"] = norm(hidden)
        return table

    table: Weights = {"layers": [layer(i) for i in range(config.num_layers)]}
    if config.fc_in:
        table["fc"] = matrix(config.fc_in, hidden, axes=(None, "embed"))
    if config.fc_bias:
        table["fc_bias"] = ArrayInfo((hidden,), dtype, (None,), constant(0.0))
    if config.aux_norm == "joined":
        table["aux_norm"] = norm(config.fc_in)
    if config.aux_norm == "each":
        table["aux_norm"] = norm(config.num_aux, config.target_hidden_size)
    if config.feature_map:
        table["feature_map"] = ArrayInfo((config.target_hidden_size, hidden), jnp.float32, (None, "embed"))
    if config.parallel:
        table["mask"] = ArrayInfo(
            (max(config.num_aux, 1) * config.target_hidden_size,), dtype, (None,), normal(1.0)
        )
    if config.head_norm:
        table["norm"] = norm(hidden)
    if config.own_embedding:
        table["embed"] = matrix(config.vocab_size, hidden, axes=("vocab", "embed"))
    if config.own_head:
        table["head"] = matrix(hidden, config.draft_vocab_size, axes=("embed", "vocab"))
    return table


def init_eagle(config: EagleConfig, key: jax.Array, dtype: Any = jnp.float32) -> Weights:
    """Random weights of a new draft in the layout of ``param_table``."""
    return pytree.initialize(param_table(config, dtype), key)


def cast(weights: Weights, config: EagleConfig, dtype: Any) -> Weights:
    """The weights, or some of them, each in what ``param_table`` of ``dtype`` holds it in."""
    infos, _ = jax.tree_util.tree_flatten_with_path(param_table(config, dtype), is_leaf=pytree.is_info)
    held_in = {path: info.dtype for path, info in infos}
    return jax.tree_util.tree_map_with_path(lambda path, w: w.astype(held_in[path]), weights)


def dtype_of(weights: Weights) -> Any:
    """The dtype that a draft computes in: that of its matrices."""
    return weights["layers"][0]["o"].dtype


def init_cache(config: EagleConfig, batch: int, capacity: int, kv_form: Any) -> Cache:
    """An empty key/value cache of the draft's own layers, in a format that needs no calibration."""
    form = kv_format(kv_form)
    layers = (config.block(i).mixer.cache_table(batch, capacity, form) for i in range(config.num_layers))
    return fill(caches.table(tuple(layers), batch), form)


def fuse(params: EagleParams, config: EagleConfig, features: jax.Array) -> jax.Array:
    """The draft's feature [B, M, H] of committed tokens from the target's ``features`` [B, M, A, Ht].

    EAGLE-1, and EAGLE-3 without ``fc``: A = 1, the post-final-norm hidden state, as it is or through
    ``feature_map``. EAGLE-3 else: the A boundaries, normalised as the configuration says and mixed by ``fc``.
    """
    weights = params.weights
    x = params.adapter.from_target(features)
    if config.feature_map:
        x = linear(x.astype(jnp.float32), weights["feature_map"])
    return _mix(weights, config, x)


def mask_feature(params: EagleParams, config: EagleConfig) -> jax.Array:
    """The draft's feature [H] of a token that is not known yet (``mask_id``), made as those of known ones are
    but that nothing of it comes from the target, so that no rotation concerns it."""
    mask = params.weights["mask"].reshape(1, 1, max(config.num_aux, 1), config.target_hidden_size)
    return _mix(params.weights, config, mask)[0, 0]


def _mix(weights: Weights, config: EagleConfig, x: jax.Array) -> jax.Array:
    """Features [B, M, A, Ht] in the draft's basis, normalised and fused: [B, M, H]."""
    x = x.astype(dtype_of(weights))
    if config.reads_final:
        return x[:, :, 0]
    if config.aux_norm == "each":
        x = jnp.stack(
            [rms_norm(x[:, :, i], weights["aux_norm"][i], config.norm_eps) for i in range(config.num_aux)],
            axis=2,
        )
    x = x.reshape(*x.shape[:2], config.fc_in)
    if config.aux_norm == "joined":
        x = rms_norm(x, weights["aux_norm"], config.norm_eps)
    return linear(x, weights["fc"], weights.get("fc_bias"))


def backbone(
    params: EagleParams,
    config: EagleConfig,
    feature: jax.Array,
    tokens: jax.Array,
    memories: Sequence[Any],
    at: Placement,
    routing: list[jax.Array] | None = None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """States [B, N, H] of the pairs (``feature`` [B, N, H], ``tokens`` [B, N]) at ``at.positions`` [B, N],
    and the layers' memories with them.

    A pair holds the feature of a token and the id of the token after it; its state predicts the one after
    that. ``memories``: one a layer, ``KV`` or whatever attends as it does. ``routing`` gets the router logits
    [B, N, E] f32 of every layer with experts appended.
    """
    weights = params.weights
    embed = params.embed if params.embed is not None else weights["embed"]
    e = embedding(embed, tokens).astype(feature.dtype)
    if config.embed_scale is not None:
        e = e * jnp.asarray(config.embed_scale, e.dtype)
    tap("embedding", e)
    angles = Angles(at.positions)
    if config.version == 1:
        x = linear(jnp.concatenate([e, feature], -1), weights["fc"], weights.get("fc_bias"))
        tap("fc", x)
    else:
        x = feature
    left = []
    for index, (layer, memory) in enumerate(zip(weights["layers"], memories, strict=True)):
        with jax.named_scope(f"draft_layer_{index}"), scope(f"layers/{index}"):
            y, residual = _read(layer, config, index, x, e)
            x, memory = config.block(index).run(
                layer, x, angles, memory, at, y=y, residual=residual, routing=routing
            )
        left.append(memory)
    state = rms_norm(x, weights["norm"], config.norm_eps) if config.feed_normed else x
    return state, tuple(left)


def _read(
    layer: Weights, config: EagleConfig, index: int, x: jax.Array, e: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What a layer's attention reads, and what its result is added to."""
    eps = config.norm_eps
    if index > 0:
        return rms_norm(x, layer["input_norm"], eps), x
    if config.version == 1:
        return x, x
    normed = rms_norm(x, layer["hidden_norm"], eps)
    y = jnp.concatenate([rms_norm(e, layer["input_norm"], eps), normed], -1)
    return y, normed if config.norm_before_residual else x


def logits(params: EagleParams, config: EagleConfig, state: jax.Array) -> jax.Array:
    """Logits [..., Vd] f32 over the draft's vocabulary of ``state`` [..., H]."""
    if config.head_norm and not config.feed_normed:
        state = rms_norm(state, params.weights["norm"], config.norm_eps)
    head = params.head if params.head is not None else params.weights["head"]
    if not isinstance(head, PackedWeight):
        state = state.astype(head.dtype)
    out = linear(state, head, transposed=params.tied and params.head is not None, dtype=jnp.float32)
    if config.softcap is not None:
        out = config.softcap * jnp.tanh(out / config.softcap)
    tap("logits", out)
    return out


def step(
    params: EagleParams,
    config: EagleConfig,
    feature: jax.Array,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Cache,
    visible: Visible,
    slot_positions: jax.Array,
) -> tuple[jax.Array, Cache]:
    """``backbone`` over a cache: (states [B, N, H], cache with the N pairs' keys and values; lengths
    unmoved).

    ``visible`` and ``slot_positions`` [B, M] cover the M slots behind the committed prefix: M - N
    that earlier steps of this round wrote, then these N. The caller guarantees ``cache.lengths + M <=
    capacity``.
    """
    tap("feature", feature)
    at = Placement(cache.lengths, positions, visible, slot_positions)
    state, layers = backbone(params, config, feature, tokens, cache.layers, at)
    tap("state", state)
    return state, dataclasses.replace(cache, layers=layers)


def guess_masks(
    params: EagleParams, config: EagleConfig, cache: Cache, count: int
) -> tuple[jax.Array, Cache]:
    """States [B, count, H] of ``count`` masks in a row behind the committed pairs, in one pass, and the cache
    with them (lengths unmoved). The caller guarantees ``cache.lengths + count <= capacity``."""
    assert config.mask_id is not None
    batch = cache.lengths.shape[0]
    feature = jnp.broadcast_to(mask_feature(params, config), (batch, count, config.hidden_size))
    tokens = jnp.full((batch, count), config.mask_id, jnp.int32)
    positions = cache.lengths[:, None] + jnp.arange(count, dtype=jnp.int32)
    return step(params, config, feature, tokens, positions, cache, Causal(), positions)
