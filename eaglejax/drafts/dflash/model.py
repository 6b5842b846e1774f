"""The DFlash network: its table of weights and its pure forward.

Weights are a nested dict; every matrix is [in, out]::

    fc [A * Ht, H], context_norm [H]    the context of a token: norm(fc(joined target features))
    layers[i]                           see ``nn.block``
    norm [H]                            before the head
    mask [H]                            where the draft ships the masks' vector
    embed [V, H], head [H, V]           where the draft ships its own

Of the context layers keep keys and values alone, made by their own projections from the same vector; it is
never a query. A block is the only one that asks, and what it writes is never committed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.drafts.dflash.config import DFlashConfig
from eaglejax.drafts.features import FeatureAdapter
from eaglejax.kv_format import kv_format
from eaglejax.nn import cache as caches
from eaglejax.nn.block import GroupedQuery
from eaglejax.nn.cache import Cache, Placement
from eaglejax.nn.kv import KV, fill, store
from eaglejax.nn.linear import PackedWeight, embedding, linear
from eaglejax.nn.norm import rms_norm
from eaglejax.nn.rope import Angles, rotate
from eaglejax.nn.visible import Causal, Full
from eaglejax.pytree import ArrayInfo, constant
from eaglejax.tap import scope, tap

Weights = dict[str, Any]


@pytree.dataclass
class DFlashParams:
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


def param_table(config: DFlashConfig, dtype: Any = jnp.float32) -> Weights:
    """Shape, dtype, logical axes and initialiser of every weight of the draft's own."""
    hidden = config.hidden_size

    def norm() -> ArrayInfo:
        return ArrayInfo((hidden,), dtype, (None,), constant(1.0))

    table: Weights = {
        "fc": ArrayInfo((len(config.aux) * config.target_hidden_size, hidden), dtype, (None, "embed")),
        "context_norm": norm(),
        "layers": [config.layer(i).table(dtype) for i in range(config.num_layers)],
        "norm": norm(),
    }
    if config.mask_vector:
        table["mask"] = ArrayInfo((hidden,), dtype, (None,), constant(0.0))
    if config.own_embedding:
        table["embed"] = ArrayInfo((config.vocab_size, hidden), dtype, ("vocab", "embed"))
    if config.own_head:
        table["head"] = ArrayInfo((hidden, config.vocab_size), dtype, ("embed", "vocab"))
    return table


def dtype_of(weights: Weights) -> Any:
    """The dtype that a draft computes in."""
    return weights["fc"].dtype


def init_cache(config: DFlashConfig, batch: int, capacity: int, kv_form: Any) -> Cache:
    """An empty key/value cache of the draft's layers, in a format that needs no calibration."""
    form = kv_format(kv_form)
    layers = (config.layer(i).mixer.cache_table(batch, capacity, form) for i in range(config.num_layers))
    return fill(caches.table(tuple(layers), batch), form)


def context(params: DFlashParams, config: DFlashConfig, features: jax.Array) -> jax.Array:
    """What layers read of committed tokens [B, M, H], from the target's ``features`` [B, M, A, Ht]."""
    weights = params.weights
    x = params.adapter.from_target(features).astype(dtype_of(weights))
    x = linear(x.reshape(*x.shape[:2], -1), weights["fc"])
    return rms_norm(x, weights["context_norm"], config.norm_eps)


def context_sides(
    layer: Weights, config: DFlashConfig, index: int, read: jax.Array, angles: Angles
) -> tuple[jax.Array, jax.Array]:
    """Keys and values [B, M, Hkv, d] of the context ``read`` [B, M, H] in one layer."""
    mixer = config.layer(index).mixer
    assert isinstance(mixer, GroupedQuery)

    def heads(name: str) -> jax.Array:
        out = linear(read, layer[name], layer.get(f"{name}_bias"))
        return out.reshape(*read.shape[:2], -1, config.head_dim)

    k, v = heads("k"), heads("v")
    if config.qk_norm:
        k = rms_norm(k, layer["k_norm"], config.norm_eps)
    assert mixer.rope is not None
    return rotate(k, *angles.of(mixer.rope, config.head_dim)), v


def write_context(
    params: DFlashParams, config: DFlashConfig, features: jax.Array, cache: Cache, count: jax.Array
) -> Cache:
    """The cache with the first ``count`` [B] of M committed tokens, whose target ``features`` are
    [B, M, A, Ht]."""
    steps = jnp.arange(features.shape[1], dtype=jnp.int32)
    read = context(params, config, features)
    # Padding stands behind the length and is masked, but a NaN there would survive a product with zero.
    read = jnp.where((steps < count[:, None])[:, :, None], read, 0)
    positions = cache.lengths[:, None] + steps
    angles, at = Angles(positions), Placement(cache.lengths, positions, Causal())
    layers = []
    for index, (layer, memory) in enumerate(zip(params.weights["layers"], cache.layers, strict=True)):
        sides, _ = store((memory.k, memory.v), context_sides(layer, config, index, read, angles), at)
        layers.append(KV(*sides))
    return dataclasses.replace(cache, layers=tuple(layers)).advance(count)


def block_input(params: DFlashParams, config: DFlashConfig, tokens: jax.Array, length: int) -> jax.Array:
    """Embeddings [..., length, H] of blocks that begin with ``tokens`` [...] and are masks else."""
    embed = params.embed if params.embed is not None else params.weights["embed"]
    dtype = dtype_of(params.weights)
    masks = jnp.full((*tokens.shape, length - 1), config.mask_id, jnp.int32)
    e = embedding(embed, jnp.concatenate([tokens[..., None], masks], axis=-1)).astype(dtype)
    if config.embed_scale is not None:
        e = e * jnp.asarray(config.embed_scale, dtype)
    if config.mask_vector:
        first = jnp.arange(length)[:, None] == 0
        e = jnp.where(first, e, params.weights["mask"])
    return e


def guess_block(
    params: DFlashParams, config: DFlashConfig, root: jax.Array, cache: Cache, length: int
) -> tuple[jax.Array, Cache]:
    """(states [B, length, H] of the block that begins with ``root`` [B], the cache with it, its lengths
    unmoved). The caller guarantees ``cache.lengths + length <= capacity``."""
    x = block_input(params, config, root, length)
    positions = cache.lengths[:, None] + jnp.arange(length, dtype=jnp.int32)
    angles, layers = Angles(positions), []
    for index, (layer, memory) in enumerate(zip(params.weights["layers"], cache.layers, strict=True)):
        at = Placement(cache.lengths, positions, Full() if config.looks_ahead(index) else Causal())
        with jax.named_scope(f"draft_layer_{index}"), scope(f"layers/{index}"):
            x, memory = config.layer(index).run(layer, x, angles, memory, at)
        layers.append(memory)
    tap("state", x)
    return x, dataclasses.replace(cache, layers=tuple(layers))


def logits(params: DFlashParams, config: DFlashConfig, state: jax.Array) -> jax.Array:
    """Logits [..., V] f32 of ``state`` [..., H]."""
    state = rms_norm(state, params.weights["norm"], config.norm_eps)
    head = params.head if params.head is not None else params.weights["head"]
    if not isinstance(head, PackedWeight):
        state = state.astype(head.dtype)
    out = linear(state, head, transposed=params.tied and params.head is not None, dtype=jnp.float32)
    if config.softcap is not None:
        out = config.softcap * jnp.tanh(out / config.softcap)
    tap("logits", out)
    return out
