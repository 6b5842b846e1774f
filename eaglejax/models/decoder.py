"""The one decoder: its table of weights and its pure forward.

Parameters are a nested dict::

    embed [V, H]                     norm [H]                head [H, V] (absent when tied)
    post_rotation [H, H] f32         of a rotated target with sandwich norms
    layers[i]: attn_norm [H]; q [H, Hq*d], k, v [H, Hkv*d], o [Hq*d, H]; q_bias, k_bias, v_bias, o_bias;
               q_norm, k_norm [d]; post_attn_norm [H] (sandwich); mlp_norm [H]; post_mlp_norm [H] (sandwich);
               dense: gate, up [H, F], down [F, H]; gate_bias, up_bias, down_bias
               mixture: router [H, E]; experts {gate, up [E, H, Fe], down [E, Fe, H]}

Every matrix is [in, out]. Layers are unrolled in Python: on CPU a scan over stacked weights copies them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import devices, pytree
from eaglejax.errors import ConfigError
from eaglejax.models.config import FINAL, Boundary, ModelConfig
from eaglejax.nn import cache as caches
from eaglejax.nn.cache import Cache, CacheScales, Placement
from eaglejax.nn.kv import KV, fill
from eaglejax.nn.kv_format import KVFormat, kv_format
from eaglejax.nn.linear import embedding, linear
from eaglejax.nn.mlp import gated_mlp
from eaglejax.nn.moe import moe_mlp
from eaglejax.nn.norm import rms_norm
from eaglejax.nn.rope import rotate, rotation
from eaglejax.nn.visible import Visible
from eaglejax.pytree import ArrayInfo, constant
from eaglejax.tap import scope, tap

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
    hidden, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads

    def matrix(*shape: int, axes: tuple[str | None, ...]) -> ArrayInfo:
        return ArrayInfo(shape, dtype, axes)

    def norm(size: int) -> ArrayInfo:
        return ArrayInfo((size,), dtype, (None,), constant(0.0 if config.norm_offset else 1.0))

    def bias(size: int, axis: str | None) -> ArrayInfo:
        return ArrayInfo((size,), dtype, (axis,), constant(0.0))

    def layer(index: int) -> Params:
        q, k = heads * config.head_dim, kv_heads * config.head_dim
        table: Params = {
            "attn_norm": norm(hidden),
            "q": matrix(hidden, q, axes=("embed", "heads")),
            "k": matrix(hidden, k, axes=("embed", "kv_heads")),
            "v": matrix(hidden, k, axes=("embed", "kv_heads")),
            "o": matrix(q, hidden, axes=("heads", "embed")),
            "mlp_norm": norm(hidden),
        }
        if config.qkv_bias:
            table |= {
                "q_bias": bias(q, "heads"),
                "k_bias": bias(k, "kv_heads"),
                "v_bias": bias(k, "kv_heads"),
            }
        if config.o_bias:
            table["o_bias"] = bias(hidden, None)
        if config.qk_norm:
            table |= {"q_norm": norm(config.head_dim), "k_norm": norm(config.head_dim)}
        if config.sandwich_norms:
            table |= {"post_attn_norm": norm(hidden), "post_mlp_norm": norm(hidden)}
        if config.moe is not None and config.is_sparse(index):
            e, f = config.moe.experts, config.moe.intermediate_size
            table["router"] = matrix(hidden, e, axes=("embed", None))
            table["experts"] = {
                "gate": matrix(e, hidden, f, axes=("experts", "embed", "mlp")),
                "up": matrix(e, hidden, f, axes=("experts", "embed", "mlp")),
                "down": matrix(e, f, hidden, axes=("experts", "mlp", "embed")),
            }
            return table
        f = config.intermediate_size
        table |= {
            "gate": matrix(hidden, f, axes=("embed", "mlp")),
            "up": matrix(hidden, f, axes=("embed", "mlp")),
            "down": matrix(f, hidden, axes=("mlp", "embed")),
        }
        if config.mlp_bias:
            table |= {"gate_bias": bias(f, "mlp"), "up_bias": bias(f, "mlp"), "down_bias": bias(hidden, None)}
        return table

    table: Params = {
        "embed": matrix(config.vocab_size, hidden, axes=("vocab", "embed")),
        "layers": [layer(i) for i in range(config.num_layers)],
        "norm": norm(hidden),
    }
    if not config.tie_embeddings:
        table["head"] = matrix(hidden, config.vocab_size, axes=("embed", "vocab"))
    if config.post_rotation:
        table["post_rotation"] = ArrayInfo((hidden, hidden), jnp.float32, (None, "embed"))
    return table


def init_params(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random weights in the layout of ``param_table``."""
    return pytree.initialize(param_table(config, dtype), key)


def cache_table(config: ModelConfig, batch: int, capacity: int, format: KVFormat) -> Cache:
    """Shape, dtype and logical axes of every array of a cache of ``capacity`` slots a row."""
    layer = KV.table(
        format,
        batch=batch,
        capacity=capacity,
        kv_heads=config.num_kv_heads,
        key_dim=config.head_dim,
        value_dim=config.head_dim,
        centred=config.attention_softcap is None,
    )
    return caches.table((layer,) * config.num_layers, batch)


def init_cache(
    config: ModelConfig,
    batch: int,
    capacity: int,
    format: Any = "float32",
    scales: CacheScales | None = None,
) -> Cache:
    """An empty cache of ``capacity`` slots a row for this model.

    ``format``: see ``kv_format``; int8-static needs ``scales``, and no other takes them. Raises ConfigError.
    """
    return fill(cache_table(config, batch, capacity, kv_format(format)), format, scales)


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
    with jax.named_scope("rope"):
        ropes = {config.layer_rope(i) for i in range(config.num_layers)}
        angles = {rope: rotation(positions, rope, config.head_dim) for rope in ropes}
    at = Placement(cache.lengths, positions, visible, attention=config.attention)
    taps: dict[Boundary, jax.Array] = {0: x}
    layers = []
    for i, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{i}"), scope(f"layers/{i}"):
            rope = config.layer_rope(i)
            x, memory = _block(
                layer, config, i, x, angles[rope], cache.layers[i], at, params.get("post_rotation")
            )
        layers.append(memory)
        if i + 1 in aux:
            taps[i + 1] = x
    with jax.named_scope("final_norm"):
        hidden = rms_norm(x, params["norm"], config.norm_eps, offset=config.norm_offset)
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


def _block(
    layer: Params,
    config: ModelConfig,
    index: int,
    x: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    memory: KV,
    at: Placement,
    post_rotation: jax.Array | None,
) -> tuple[jax.Array, KV]:
    """One layer: (residual stream [B, N, H], its memory with the new tokens)."""

    def norm(y: jax.Array, name: str) -> jax.Array:
        return rms_norm(y, layer[name], config.norm_eps, offset=config.norm_offset)

    def closed(y: jax.Array, name: str) -> jax.Array:
        """What a block adds to the residual stream."""
        if not config.sandwich_norms:
            return y
        y = norm(y, name)
        if post_rotation is None:
            return y
        return linear(y.astype(post_rotation.dtype), post_rotation, dtype=y.dtype)

    with jax.named_scope("attention"):
        y = norm(x, "attn_norm")
        tap("attn_norm", y)
        y, memory = _attention(layer, config, index, y, angles, memory, at)
        y = closed(y, "post_attn_norm")
        tap("attn_out", y)
        x = x + y
        tap("attn_residual", x)
    with jax.named_scope("mlp"):
        y = norm(x, "mlp_norm")
        tap("mlp_norm", y)
        if config.moe is not None and config.is_sparse(index):
            y = moe_mlp(y, layer, config.moe, config.activation)
        else:
            y = gated_mlp(y, layer, config.activation)
        y = closed(y, "post_mlp_norm")
        tap("mlp", y)
        x = x + y
        tap("residual", x)
    return x, memory


def _attention(
    layer: Params,
    config: ModelConfig,
    index: int,
    x: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    memory: KV,
    at: Placement,
) -> tuple[jax.Array, KV]:
    b, n, _ = x.shape

    def heads(name: str) -> jax.Array:
        return linear(x, layer[name], layer.get(f"{name}_bias")).reshape(b, n, -1, config.head_dim)

    q, k, v = heads("q"), heads("k"), heads("v")
    if config.qk_norm:
        q = rms_norm(q, layer["q_norm"], config.norm_eps, offset=config.norm_offset)
        k = rms_norm(k, layer["k_norm"], config.norm_eps, offset=config.norm_offset)
    q, k = rotate(q, *angles), rotate(k, *angles)
    if config.qk_rotation:
        # Importing Pallas takes a third of a second, which other targets are spared.
        from kernels_pallas.hadamard import hadamard

        how = devices.current().operation("hadamard")
        q, k = hadamard(q, implementation=how), hadamard(k, implementation=how)
    out, memory = memory.attend(
        q,
        k,
        v,
        at,
        scale=config.query_scale,
        window=config.layer_window(index),
        softcap=config.attention_softcap,
    )
    return linear(out.reshape(b, n, -1), layer["o"], layer.get("o_bias")), memory


def unembed(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Logits [..., V] f32 of ``hidden`` [..., H] (after the final norm), softcap included."""
    with jax.named_scope("unembed"):
        if config.tie_embeddings:
            logits = linear(hidden, params["embed"], transposed=True, dtype=jnp.float32)
        else:
            logits = linear(hidden, params["head"], dtype=jnp.float32)
        if config.final_softcap is not None:
            logits = config.final_softcap * jnp.tanh(logits / config.final_softcap)
    tap("logits", logits)
    return logits
