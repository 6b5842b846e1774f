"""What a diagnosis tries on an EAGLE draft: its guesses on a text, and every choice the other way round."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.drafts.borrow import target_head
from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.config import EagleConfig, default_boundaries
from eaglejax.drafts.eagle.files.read import DraftFile
from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.drafts.eagle.unroll import unroll
from eaglejax.models.target import Target

Setup = tuple[EagleConfig, EagleParams]
dtype_of = eagle_model.dtype_of


@functools.partial(jax.jit, static_argnums=(0, 4))
def _guesses(
    config: EagleConfig, params: EagleParams, features: jax.Array, tokens: jax.Array, steps: int
) -> jax.Array:
    """Draft ids [steps, B, T - 1] of the likeliest token of each pass; one text at a time, for the logits'
    sake."""

    def one(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        seen, text = row
        states = unroll(params, config, seen[None, :-1], text[None, 1:], steps)
        return jnp.stack([jnp.argmax(eagle_model.logits(params, config, s)[0], -1) for s in states])

    return jax.lax.map(one, (features, tokens)).swapaxes(0, 1)


def guesses(
    config: EagleConfig, params: EagleParams, features: jax.Array, tokens: jax.Array, steps: int
) -> np.ndarray:
    """Draft ids [steps, B, T - 1] on ``tokens`` [B, T] with ``features`` [B, T, A, Ht]: pass k of row t
    guesses token t + 2 + k."""
    # Which boundaries were read and in which basis makes no other program.
    config = dataclasses.replace(config, aux=(), basis=None)
    return np.asarray(_guesses(config, params, features, tokens, steps))


def boundaries(config: EagleConfig, layers: int) -> list[tuple[int, ...]]:
    """Other boundaries that the draft may have been trained on: another order, one layer up or down, the
    usual ones."""
    if config.reads_final:
        return []
    wanted = [config.aux[::-1]]
    if config.num_aux <= 4:
        wanted += itertools.permutations(config.aux)
    wanted += [tuple(i + shift for i in config.aux) for shift in (-1, 1)]
    if config.num_aux == 3 and layers >= 6:
        wanted.append(default_boundaries(layers))
    fits = [aux for aux in dict.fromkeys(wanted) if min(aux) >= 0 and max(aux) <= layers]
    return [aux for aux in fits if aux != config.aux]


def ropes(setup: Setup, target: Target) -> Iterator[tuple[str, Setup]]:
    """Other rotary settings, by name."""
    config, params = setup
    named = {"the target's rotary settings": target.config.rope}
    named |= {f"rotary base {x:g}": dataclasses.replace(config.rope, theta=x) for x in (1e4, 5e5, 1e6)}
    for name, rope in named.items():
        if rope != config.rope:
            yield name, (dataclasses.replace(config, rope=rope), params)


def norm_choices(setup: Setup, file: DraftFile) -> Iterator[tuple[str, Setup]]:
    """Every place of a norm the other way round. A norm whose weight lies unused in the file is tried with
    that weight, one that the file has none for with weights of 1."""
    config, params = setup
    weights = params.weights

    def changed(extra: Mapping[str, Any] | None = None, **flags: Any) -> tuple[str, Setup]:
        name = ", ".join(f"{key}={value}" for key, value in flags.items())
        new = dataclasses.replace(params, weights=dict(weights) | dict(extra or {}))
        return name, (dataclasses.replace(config, **flags), new)

    if config.version == 3:
        dtype = eagle_model.dtype_of(weights)
        yield changed(norm_before_residual=not config.norm_before_residual)
        norm = weights.get("norm")
        if norm is None:
            stored = file.store.array("norm.weight") if "norm.weight" in file.store.names() else None
            norm = jnp.ones(config.hidden_size, dtype) if stored is None else jnp.asarray(stored, dtype)
        for head, fed in ((True, False), (True, True), (False, False)):
            if (head, fed) != (config.head_norm, config.feed_normed):
                yield changed({"norm": norm} if head else None, head_norm=head, feed_normed=fed)
        if not config.reads_final:
            each = (config.num_aux, config.target_hidden_size)
            for kind, shape in (("none", None), ("joined", (config.fc_in,)), ("each", each)):
                if kind != config.aux_norm:
                    extra = None if shape is None else {"aux_norm": jnp.ones(shape, dtype)}
                    yield changed(extra, aux_norm=kind)
    if config.qk_norm:
        yield changed(qk_norm=False)


def part_choices(setup: Setup, file: DraftFile, target: Target) -> Iterator[tuple[str, Setup]]:
    """Every other choice the other way round: parts of its own against the target's, biases, windows, the
    activation, the embedding's scale."""
    config, params = setup
    for name in ("fc_bias", "qkv_bias", "o_bias"):
        if getattr(config, name):
            yield f"{name}=False", _without(setup, name)
    if any(config.windows):
        yield "no windows", (dataclasses.replace(config, windows=()), params)
    elif window := _unused_window(file):
        every = (window,) * config.num_layers
        yield f"a window of {window} in every layer", (dataclasses.replace(config, windows=every), params)
    if config.activation != target.config.activation:
        # Configs that say nothing mean silu, whatever the target has.
        other = dataclasses.replace(config, activation=target.config.activation)
        yield f"activation={target.config.activation}", (other, params)
    scale = target.config.embed_scale
    if config.embed_scale is not None:
        yield "embed_scale=None", (dataclasses.replace(config, embed_scale=None), params)
    elif scale is not None:
        yield f"embed_scale={scale:g}", (dataclasses.replace(config, embed_scale=scale), params)
    same_width = config.hidden_size == config.target_hidden_size
    if config.own_embedding and same_width:
        borrowed = dataclasses.replace(params, embed=target.params["embed"])
        yield "the target's embedding", (config, borrowed)
    if config.own_head and same_width:
        head, tied = target_head(target, file.ids)
        yield "the target's head", (config, dataclasses.replace(params, head=head, tied=tied))
    if config.feature_map:
        yield "feature_map=False", (dataclasses.replace(config, feature_map=False), params)


def _unused_window(file: DraftFile) -> int | None:
    """The window that a config names without a word of which layers slide."""
    layer = file.raw.get("transformer_layer_config") or file.raw
    window = layer.get("sliding_window")
    return window if isinstance(window, int) and not isinstance(window, bool) and window > 0 else None


def _without(setup: Setup, name: str) -> Setup:
    """The draft with a kind of bias switched off (its arrays become zeros, which makes no other program)."""
    config, params = setup
    ends = {"fc_bias": ("fc_bias",), "qkv_bias": ("q_bias", "k_bias", "v_bias"), "o_bias": ("o_bias",)}[name]

    def off(path: Any, leaf: jax.Array) -> jax.Array:
        return jnp.zeros_like(leaf) if getattr(path[-1], "key", None) in ends else leaf

    weights = jax.tree_util.tree_map_with_path(off, params.weights)
    return config, dataclasses.replace(params, weights=weights)
