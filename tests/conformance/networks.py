"""Tiny drafts that are networks: EAGLE, MTP, DFlash and Medusa, with heads fitted to the target's texts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from loop_tools import (
    Layers,
    full_forward,
    greedy_texts,
    prompts,
)

from eaglejax import pytree
from eaglejax.drafts.dflash import model as dflash_model
from eaglejax.drafts.dflash.config import DFlashConfig
from eaglejax.drafts.dflash.files import join as join_dflash
from eaglejax.drafts.dflash.probe import blocks
from eaglejax.drafts.dflash.proposer import DFlash
from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.load import bind
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.eagle.unroll import unroll
from eaglejax.drafts.medusa import model as medusa_model
from eaglejax.drafts.medusa.config import MedusaConfig
from eaglejax.drafts.medusa.files.load import bind as bind_heads
from eaglejax.drafts.medusa.proposer import Medusa
from eaglejax.drafts.mtp import model as mtp_model
from eaglejax.drafts.mtp.config import MtpConfig
from eaglejax.drafts.mtp.files.load import join as join_modules
from eaglejax.drafts.mtp.files.load import layer_kinds
from eaglejax.drafts.mtp.proposer import Mtp
from eaglejax.drafts.tree import DynamicTree, StaticTree
from eaglejax.models.target import Target

Rows = Sequence[Sequence[int]]


def eagle(
    version: int,
    tree: DynamicTree | StaticTree,
    reduced: int = 0,
    mask_id: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """An EAGLE draft: what ``build`` and ``weights`` of its case are. ``reduced``: target tokens that its
    vocabulary lacks; ``mask_id``: it guesses in parallel."""

    def build(target: Target) -> Eagle:
        config = dataclasses.replace(eagle_config(version, target, reduced), mask_id=mask_id)
        return Eagle(config, tree, **options)

    return {"build": build, "weights": eagle_weights}


def eagle_config(version: int, target: Target, reduced: int = 0) -> EagleConfig:
    """EAGLE-1 borrows its target's embedding; EAGLE-3 is wider than its target and has its own."""
    config = target.config
    third: dict[str, Any] = {"num_aux": 2, "aux": (0, config.num_layers)}
    third |= {"head_norm": True, "own_embedding": True}
    return EagleConfig(
        version=version,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size - reduced,
        hidden_size=config.hidden_size if version == 1 else 40,
        target_hidden_size=config.hidden_size,
        intermediate_size=20,
        num_heads=2,
        num_kv_heads=1,
        head_dim=6,
        own_head=True,
        # A draft made for shorter texts than it meets (A26).
        rope=dataclasses.replace(config.rope, max_position=8),
        **(third if version == 3 else {"fc_bias": True}),
    )


def eagle_weights(proposer: Eagle, layers: Layers, small: bool, texts: Rows, turn: int) -> Any:
    """Random weights; for texts, with a head that knows some of the greedy ones (none at turn 1)."""
    del texts
    return _eagle_params(proposer.config, layers, small, turn)


@functools.cache
def _eagle_params(config: EagleConfig, layers: Layers, small: bool, turn: int) -> Any:
    target = layers.small_target() if small else layers.target()
    rng = np.random.default_rng(turn + 3)

    def fill(info: Any) -> jax.Array:
        if len(info.shape) == 1:
            return jnp.asarray(rng.normal(1.0, 0.2, info.shape), jnp.float32)
        return jnp.asarray(rng.normal(0, 1.5 / np.sqrt(info.shape[0]), info.shape), jnp.float32)

    weights = jax.tree.map(fill, eagle_model.param_table(config), is_leaf=pytree.is_info)
    known = np.arange(config.vocab_size)
    if config.reduced:
        known = np.sort(rng.choice(config.vocab_size, config.draft_vocab_size, replace=False))
    params = bind(config, weights, target, known if config.reduced else None)
    if small or turn == 1:
        return params
    texts = np.asarray(greedy_texts(prompts(), layers))
    head = _knowing(_states(config, params, target, texts), texts, known)
    return params.replace(weights={**params.weights, "head": head})


def _knowing(states: np.ndarray, texts: np.ndarray, known: np.ndarray) -> jax.Array:
    """A head [H, Vd] that knows some of what ``texts`` [B, T] say behind the ``states`` [K, B, T-1, H] of K
    steps; ``known`` [Vd]: its tokens."""
    wanted = np.stack([np.roll(texts, -2 - k, axis=1)[:, :-1] for k in range(len(states))])
    real = np.arange(texts.shape[1] - 1) < texts.shape[1] - 2 - np.arange(len(states))[:, None, None]
    real = np.broadcast_to(real, wanted.shape)
    answer = (wanted[real][:, None] == known).astype(np.float64)
    head = np.linalg.lstsq(np.asarray(states, np.float64)[real], answer - answer.mean(), rcond=1e-3)[0]
    return jnp.asarray(8.0 * head, jnp.float32)


@functools.partial(jax.jit, static_argnums=(0,))
def _normed_states(config: EagleConfig, params: Any, features: jax.Array, tokens: jax.Array) -> jax.Array:
    eye = {**params.weights, "head": jnp.eye(config.hidden_size)}
    steps = unroll(params, config, features, tokens, 3)
    return jnp.stack([eagle_model.logits(params.replace(weights=eye), config, s) for s in steps])


def _states(config: EagleConfig, params: Any, target: Target, texts: np.ndarray) -> np.ndarray:
    """What the head reads of the draft's first three steps behind each token but the last: [3, B, T-1, H]."""
    features = full_forward(
        target.params, target.config, texts, target.cache_format, target.cache_scales, config.taps
    )[2]
    assert features is not None
    return np.asarray(_normed_states(config, params, features[:, :-1], jnp.asarray(texts[:, 1:])))


def mtp(modules: int, tree: DynamicTree | StaticTree, **options: Any) -> dict[str, Any]:
    """MTP modules with a head each, whose layer is the target's last one that keeps keys and values."""

    def build(target: Target) -> Mtp:
        return Mtp(mtp_config(target, modules), tree, **options)

    return {"build": build, "weights": mtp_weights}


def mtp_config(target: Target, modules: int) -> MtpConfig:
    """The state before the norm is handed on where there are several modules."""
    config = target.config
    return MtpConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        block=next(iter(layer_kinds(config))),
        modules=modules,
        recycle="post_norm" if modules == 1 else "pre_norm",
        own_head=True,
    )


def mtp_weights(proposer: Mtp, layers: Layers, small: bool, texts: Rows, turn: int) -> Any:
    """Random weights; for texts, with heads that know some of the greedy ones (none at turn 1)."""
    del texts
    return _mtp_params(proposer.config, layers, small, turn)


@functools.cache
def _mtp_params(config: MtpConfig, layers: Layers, small: bool, turn: int) -> Any:
    target = layers.small_target() if small else layers.target()
    rng = np.random.default_rng(turn + 5)

    def fill(info: Any) -> jax.Array:
        if len(info.shape) == 1:
            return jnp.asarray(rng.normal(1.0, 0.2, info.shape), jnp.float32)
        return jnp.asarray(rng.normal(0, 1.5 / np.sqrt(info.shape[0]), info.shape), jnp.float32)

    weights = jax.tree.map(fill, mtp_model.param_table(config), is_leaf=pytree.is_info)
    params = join_modules(config, weights, target)
    # Training, which gives the states, knows no sinks.
    if small or turn == 1 or getattr(config.block.mixer, "sinks", False):
        return params
    texts = np.asarray(greedy_texts(prompts(), layers))
    features = full_forward(
        target.params, target.config, texts, target.cache_format, target.cache_scales, config.taps
    )[2]
    assert features is not None
    states = _module_states(config, params, features[:, :-1], jnp.asarray(texts[:, 1:]))
    head = _knowing(np.asarray(states), texts, np.arange(config.vocab_size))
    modules = [{**module, "head": head} for module in weights["modules"]]
    return params.replace(weights={**weights, "modules": modules})


@functools.partial(jax.jit, static_argnums=(0,))
def _module_states(config: MtpConfig, params: Any, features: jax.Array, tokens: jax.Array) -> jax.Array:
    eye = [{**module, "head": jnp.eye(config.hidden_size)} for module in params.weights["modules"]]
    bare = params.replace(weights={**params.weights, "modules": eye})
    steps = mtp_model.unroll(params, config, features, tokens, 3)
    found = [mtp_model.logits(bare, config, k % config.modules, s) for k, s in enumerate(steps)]
    return jnp.stack(found)


def dflash(tree: DynamicTree | StaticTree, **options: Any) -> dict[str, Any]:
    """A DFlash draft of one layer that does not look ahead and one that does, with a head of its own."""

    def build(target: Target) -> DFlash:
        return DFlash(dflash_config(target), tree, **options)

    return {"build": build, "weights": dflash_weights}


def dflash_config(target: Target) -> DFlashConfig:
    """It reads the embedding and the last block, and has a window that texts outgrow."""
    config = target.config
    return DFlashConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        intermediate_size=20,
        num_heads=2,
        num_kv_heads=1,
        head_dim=6,
        num_layers=2,
        aux=(0, config.num_layers),
        block=4,
        mask_vector=True,
        windows=(9, None),
        causal=(True, False),
        own_head=True,
    )


def dflash_weights(proposer: DFlash, layers: Layers, small: bool, texts: Rows, turn: int) -> Any:
    """Random weights; for texts, with a head that knows some of the greedy ones (none at turn 1)."""
    del texts
    return _dflash_params(proposer.config, layers, small, turn)


@functools.cache
def _dflash_params(config: DFlashConfig, layers: Layers, small: bool, turn: int) -> Any:
    target = layers.small_target() if small else layers.target()
    rng = np.random.default_rng(turn + 7)

    def fill(info: Any) -> jax.Array:
        if len(info.shape) == 1:
            return jnp.asarray(rng.normal(1.0, 0.2, info.shape), jnp.float32)
        return jnp.asarray(rng.normal(0, 1.5 / np.sqrt(info.shape[0]), info.shape), jnp.float32)

    weights = jax.tree.map(fill, dflash_model.param_table(config), is_leaf=pytree.is_info)
    params = join_dflash(config, weights, target)
    if small or turn == 1:
        return params
    texts = np.asarray(greedy_texts(prompts(), layers))
    features = full_forward(
        target.params, target.config, texts, target.cache_format, target.cache_scales, config.taps
    )[2]
    assert features is not None
    states = _block_states(config, params, features[:, :-1], jnp.asarray(texts[:, 1:]))
    head = _knowing(np.asarray(states), texts, np.arange(config.vocab_size))
    return params.replace(weights={**weights, "head": head})


@functools.partial(jax.jit, static_argnums=(0,))
def _block_states(config: DFlashConfig, params: Any, features: jax.Array, tokens: jax.Array) -> jax.Array:
    bare = params.replace(weights={**params.weights, "head": jnp.eye(config.hidden_size)})
    steps = blocks(params, config, features, tokens, 3)
    return jnp.stack([dflash_model.logits(bare, config, s) for s in steps])


def medusa(tree: StaticTree, **options: Any) -> dict[str, Any]:
    """Medusa heads that lack one of the target's tokens, one head for each level of ``tree``."""

    def build(target: Target) -> Medusa:
        vocab, hidden = target.config.vocab_size, target.config.hidden_size
        return Medusa(MedusaConfig(vocab, vocab - 1, hidden, tree.depth), tree, **options)

    return {"build": build, "weights": medusa_weights}


def medusa_weights(proposer: Medusa, layers: Layers, small: bool, texts: Rows, turn: int) -> Any:
    """Random blocks; for texts, with matrices that know some of the greedy ones (none at turn 1)."""
    del texts
    return _medusa_params(proposer.config, layers, small, turn)


@functools.cache
def _medusa_params(config: MedusaConfig, layers: Layers, small: bool, turn: int) -> Any:
    target = layers.small_target() if small else layers.target()
    rng = np.random.default_rng(turn + 3)
    known = np.sort(rng.choice(config.vocab_size, config.draft_vocab_size, replace=False))

    def fill(info: Any) -> jax.Array:
        return jnp.asarray(rng.normal(0, 1 / np.sqrt(info.shape[0]), info.shape), jnp.float32)

    weights = jax.tree.map(fill, medusa_model.param_table(config), is_leaf=pytree.is_info)
    if not small and turn != 1:
        texts = np.asarray(greedy_texts(prompts(), layers))
        features = full_forward(
            target.params, target.config, texts, target.cache_format, target.cache_scales, config.taps
        )[2]
        assert features is not None
        params = bind_heads(config, weights, target, known)
        for k, head in enumerate(weights["heads"]):
            states = np.asarray(medusa_model.state(params, k, features[:, :, 0]))[:, : -2 - k]
            answer = (np.roll(texts, -2 - k, axis=1)[:, : -2 - k, None] == known).astype(np.float64)
            width = states.shape[-1]
            found = np.linalg.lstsq(states.reshape(-1, width), answer.reshape(-1, len(known)), rcond=1e-3)[0]
            head["out"] = jnp.asarray(8.0 * found, jnp.float32)
    return bind_heads(config, weights, target, known)
