"""The one decoder: its table of weights and its pure forward.

Parameters are a nested dict::

    embed [V, H]                     norm [H]                head [H, V] (absent when tied)
    post_rotation [H, H] f32         of a rotated target with sandwich norms
    layers[i]                        see ``nn.block``

Every matrix is [in, out]. Layers are unrolled in Python: on CPU a scan over stacked weights copies them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.errors import ConfigError
from eaglejax.kv_format import KVFormat, kv_format
from eaglejax.models.config import FINAL, Boundary, ModelConfig
from eaglejax.nn import cache as caches
from eaglejax.nn.block import Block, Norm
from eaglejax.nn.cache import Cache, CacheScales, Placement
from eaglejax.nn.kv import fill
from eaglejax.nn.linear import embedding, linear
from eaglejax.nn.rope import Angles
from eaglejax.nn.visible import Visible
from eaglejax.pytree import ArrayInfo
from eaglejax.tap import scope, tap, watched

Params = dict[str, Any]


@pytree.dataclass
class Forward:
    """What a forward over N new tokens yields.

    ``hidden`` [B, N, H] after the final norm; ``aux`` [B, N, A, H], the boundaries asked for, or None;
    ``cache`` holds the new keys and values at slots [length, length + N), its lengths unmoved.
    """

    hidden: jax.Array
    aux: jax.Array | None
    cache: Cache


def param_table(config: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """Shape, dtype, logical axes and initialiser of every weight, in the layout of the module's text."""
    hidden, vocab = config.hidden_size, config.vocab_size
    table: Params = {
        "embed": ArrayInfo((vocab, hidden), dtype, ("vocab", "embed")),
        "layers": [config.block(i).table(dtype) for i in range(config.num_layers)],
        "norm": _final_norm(config).table(hidden, dtype),
    }
    if not config.tie_embeddings:
        table["head"] = ArrayInfo((hidden, vocab), dtype, ("embed", "vocab"))
    if config.post_rotation:
        table["post_rotation"] = ArrayInfo((hidden, hidden), jnp.float32, (None, "embed"))
    return table


def _final_norm(config: ModelConfig) -> Norm:
    return Norm(config.norm_eps, config.norm_offset)


def init_params(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random weights in the layout of ``param_table``."""
    return pytree.initialize(param_table(config, dtype), key)


def cache_table(config: ModelConfig, batch: int, capacity: int, kv_form: KVFormat) -> Cache:
    """Shape, dtype and logical axes of every array of a cache of ``capacity`` slots a row."""
    layers = (config.block(i).mixer.cache_table(batch, capacity, kv_form) for i in range(config.num_layers))
    return caches.table(tuple(layers), batch)


def init_cache(
    config: ModelConfig,
    batch: int,
    capacity: int,
    kv_form: Any = "float32",
    scales: CacheScales | None = None,
) -> Cache:
    """An empty cache of ``capacity`` slots a row for this model.

    ``kv_form``: see ``kv_format``; int8-static needs ``scales``, and no other takes them. Raises ConfigError.
    """
    return fill(cache_table(config, batch, capacity, kv_format(kv_form)), kv_form, scales)


def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Cache,
    visible: Visible,
    *,
    aux: tuple[Boundary, ...] = (),
) -> Forward:
    """Run N new tokens on top of the committed prefix.

    ``tokens``, ``positions`` [B, N] int32; ``visible``: which of the new tokens each new token sees, itself
    included; the prefix [0, cache.lengths) is always seen, sliding windows permitting. ``aux``: the
    hidden-state boundaries to return, in this order (num_layers: before the final norm, FINAL: behind it).
    The caller guarantees ``cache.lengths + N <= capacity``. Raises ConfigError for shapes or boundaries that
    cannot be.
    """
    _check(config, tokens, positions, cache, visible, aux)
    tap("tokens", tokens)
    tap("positions", positions)
    tap("visible", lambda: visible.new(tokens.shape[1], cache.lengths))
    with jax.named_scope("embed"):
        x = embedding(params["embed"], tokens)
        if config.embed_scale is not None:
            x = x * jnp.asarray(config.embed_scale, x.dtype)
    tap("embedding", x)
    run = _layer_runner(x, positions, params["layers"])
    at = Placement(cache.lengths, positions, visible)
    taps: dict[Boundary, jax.Array] = {0: x}
    layers = []
    for i, (layer, memory) in enumerate(zip(params["layers"], cache.layers, strict=True)):
        with jax.named_scope(f"layer_{i}"), scope(f"layers/{i}"):
            x, memory = run(config.block(i), layer, x, memory, at, params.get("post_rotation"))
        layers.append(memory)
        if i + 1 in aux:
            taps[i + 1] = x
    with jax.named_scope("final_norm"):
        hidden = _final_norm(config)(x, params["norm"])
    tap("final_norm", hidden)
    taps[FINAL] = hidden
    boundaries = jnp.stack([taps[i] for i in aux], axis=2) if aux else None
    if boundaries is not None and set(aux) != {FINAL}:
        tap("aux", boundaries)
    return Forward(
        hidden=hidden,
        aux=boundaries,
        cache=dataclasses.replace(cache, layers=tuple(layers)),
    )


def _layer_runner(x: jax.Array, positions: jax.Array, layers: Any) -> Callable[..., tuple[jax.Array, Any]]:
    """How the layers of one forward are run: (block, weights, x, memory, placement, post_rotation) -> (x,
    memory).

    While a program is traced, layers of the same block and shapes are traced once and their operations
    copied: the program is the one that tracing each would give, and comes in a fraction of the time. Nothing
    outlives the forward, so that what is in force around it (attention, kernels) is what its layers see.
    Whoever watches sees each layer by its own name, and weights that watch are no arrays to be traced.
    """

    def run(
        block: Block, weights: Any, x: jax.Array, memory: Any, at: Placement, turn: Any
    ) -> tuple[jax.Array, Any]:
        # Values of the surrounding trace must not be kept within another.
        inside = Angles(at.positions) if traced else angles
        return block.run(weights, x, inside, memory, at, post_rotation=turn)

    angles, arrays = Angles(positions), all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(layers))
    traced = isinstance(x, jax.core.Tracer) and arrays and not watched()
    return jax.jit(run, static_argnums=0, inline=True) if traced else run


def _check(
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Cache,
    visible: Visible,
    aux: tuple[Boundary, ...],
) -> None:
    b, n = tokens.shape
    if positions.shape != (b, n) or cache.lengths.shape != (b,):
        raise ConfigError(
            f"tokens {tokens.shape} need positions {(b, n)} and {b} cache rows; got {positions.shape} and "
            f"{cache.lengths.shape[0]}"
        )
    refusal = visible.refusal(b, n)
    if refusal or visible.slots(n) != n:
        raise ConfigError(
            f"visible does not fit tokens {tokens.shape}: {refusal or f'it has {visible.slots(n)} new slots'}"
        )
    if cache.capacity is not None and n > cache.capacity:
        raise ConfigError(f"{n} new tokens do not fit a cache of {cache.capacity} slots")
    wrong = [i for i in aux if i != FINAL and i not in range(config.num_layers + 1)]
    if wrong:
        raise ConfigError(
            f"hidden-state boundaries {wrong} do not exist; this model has 0 to {config.num_layers}"
        )


def unembed(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Logits [..., V] f32 of ``hidden`` [..., H] (after the final norm), softcap included."""
    with jax.named_scope("unembed"):
        if config.tie_embeddings:
            logits = linear(hidden, params["embed"], transposed=True, dtype=jnp.float32)
        else:
            logits = linear(hidden, params["head"], dtype=jnp.float32)
        if config.logits_scaling is not None:
            logits = logits / config.logits_scaling
        if config.final_softcap is not None:
            logits = config.final_softcap * jnp.tanh(logits / config.final_softcap)
    tap("logits", logits)
    return logits
