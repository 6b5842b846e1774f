"""DFlash drafts at every position of a text at once: what training scores and a diagnosis measures."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.drafts.dflash import model
from eaglejax.drafts.dflash.config import DFlashConfig
from eaglejax.drafts.dflash.files import DFlashFile, join
from eaglejax.drafts.dflash.model import DFlashParams
from eaglejax.models.target import Target
from eaglejax.nn.cache import Placement
from eaglejax.nn.rope import Angles
from eaglejax.nn.visible import Full

Setup = tuple[DFlashConfig, DFlashParams]
dtype_of = model.dtype_of


@dataclasses.dataclass(frozen=True)
class _Around:
    """A layer's memory for blocks at many places: the context's ``k``, ``v`` [B, T, Hkv, d] and what each
    block sees of it, ``seen`` [B, N, L, T] bool; within a block ``ahead`` says who sees whom [L, L]."""

    k: jax.Array
    v: jax.Array
    seen: jax.Array
    ahead: jax.Array

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, at: Placement, *, scale: float, **_: Any
    ) -> tuple[jax.Array, _Around]:
        """As ``nn.kv.KV.attend``, of queries [B, N * L, Hq, d] block by block; softmax in f32."""
        del at
        batch, heads, d = q.shape[0], k.shape[2], q.shape[3]
        size = self.seen.shape[1:3]
        asked = q.reshape(batch, *size, heads, -1, d)
        keys, values = k.reshape(batch, *size, heads, d), v.reshape(batch, *size, heads, d)
        far = jnp.einsum("bnlhgd,bshd->bnlhgs", asked, self.k, preferred_element_type=jnp.float32)
        near = jnp.einsum("bnlhgd,bnmhd->bnlhgm", asked, keys, preferred_element_type=jnp.float32)
        far = jnp.where(self.seen[:, :, :, None, None], far * scale, -jnp.inf)
        near = jnp.where(self.ahead[:, None, None], near * scale, -jnp.inf)
        weights = jax.nn.softmax(jnp.concatenate([far, near], axis=-1), axis=-1)
        split = self.k.shape[1]
        out = jnp.einsum("bnlhgs,bshd->bnlhgd", weights[..., :split], self.v.astype(jnp.float32))
        out += jnp.einsum("bnlhgm,bnmhd->bnlhgd", weights[..., split:], values.astype(jnp.float32))
        return out.reshape(q.shape).astype(q.dtype), self


def blocks(
    params: DFlashParams,
    config: DFlashConfig,
    features: jax.Array,
    tokens: jax.Array,
    steps: int,
    *,
    positions: jax.Array | None = None,
    documents: jax.Array | None = None,
    chunk: int = 64,
) -> list[jax.Array]:
    """States of ``steps`` guesses from every position, each [B, T, H].

    ``features`` [B, T, A, Ht]: the target's, of x_0 .. x_{T-1}; ``tokens`` [B, T]: x_1 .. x_T. The block of
    row t begins with x_{t+1} and sees the context of rows s <= t; guess k is of x_{t+2+k}. ``positions``
    [B, T] of x_0 .. (default 0, 1, ...); ``documents`` [B, T] int: rows of different ones do not see each
    other.
    Blocks are run ``chunk`` at a time and again in a backward pass, so that memory is linear in T.
    """
    batch, length = tokens.shape
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    size = steps + (not config.from_anchor)
    rows = jnp.arange(length)
    seen = rows[:, None] >= rows
    seen = jnp.broadcast_to(seen, (batch, length, length))
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None])
    read = model.context(params, config, features)
    context_angles = Angles(positions)
    layers = params.weights["layers"]
    sides = [model.context_sides(layer, config, i, read, context_angles) for i, layer in enumerate(layers)]

    @jax.checkpoint
    def run(
        params: DFlashParams, sides: Any, tokens: jax.Array, first: jax.Array, seen: jax.Array
    ) -> jax.Array:
        count = tokens.shape[1]
        x = model.block_input(params, config, tokens, size).reshape(batch, count * size, -1)
        places = first[:, :, None] + 1 + jnp.arange(size, dtype=jnp.int32)
        flat = places.reshape(batch, -1)
        angles, at = Angles(flat), Placement(jnp.zeros((batch,), jnp.int32), flat, Full())
        for index, (layer, (k, v)) in enumerate(zip(params.weights["layers"], sides, strict=True)):
            window = config.windows[index] if config.windows else None
            ahead = jnp.ones((size, size), bool)
            if not config.looks_ahead(index):
                ahead = jnp.tril(ahead)
            visible = jnp.broadcast_to(seen[:, :, None], (*seen.shape[:2], size, seen.shape[2]))
            if window is not None:
                visible &= places[..., None] - positions[:, None, None] < window
                order = jnp.arange(size)
                ahead &= order[:, None] - order < window
            memory = _Around(k, v, visible, ahead)
            x, _ = config.layer(index).run(layer, x, angles, memory, at)
        return x.reshape(batch, count, size, -1)

    parts = [
        run(params, sides, tokens[:, a : a + chunk], positions[:, a : a + chunk], seen[:, a : a + chunk])
        for a in range(0, length, chunk)
    ]
    states = jnp.concatenate(parts, axis=1)
    skip = 0 if config.from_anchor else 1
    return [states[:, :, k + skip] for k in range(steps)]


@functools.partial(jax.jit, static_argnums=(0, 4))
def _guesses(
    config: DFlashConfig, params: DFlashParams, features: jax.Array, tokens: jax.Array, steps: int
) -> jax.Array:
    def one(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        seen, text = row
        states = blocks(params, config, seen[None, :-1], text[None, 1:], steps)
        return jnp.stack([jnp.argmax(model.logits(params, config, s)[0], -1) for s in states])

    return jax.lax.map(one, (features, tokens)).swapaxes(0, 1)


def guesses(
    config: DFlashConfig, params: DFlashParams, features: jax.Array, tokens: jax.Array, steps: int
) -> np.ndarray:
    """Draft ids [steps, B, T - 1] on ``tokens`` [B, T] with ``features`` [B, T, A, Ht]: guess k of row t is
    of token t + 2 + k."""
    return np.asarray(_guesses(dataclasses.replace(config, basis=None), params, features, tokens, steps))


def boundaries(config: DFlashConfig, layers: int) -> list[tuple[int, ...]]:
    """One layer up or down, which is the other way of counting, and the other way round."""
    wanted = [tuple(i + shift for i in config.aux) for shift in (-1, 1)] + [config.aux[::-1]]
    fits = [aux for aux in dict.fromkeys(wanted) if min(aux) >= 0 and max(aux) <= layers]
    return [aux for aux in fits if aux != config.aux]


def ropes(setup: Setup, target: Target) -> Iterator[tuple[str, Setup]]:
    """Other rotary settings, by name."""
    config, params = setup
    named = {"the target's rotary settings": target.config.rope}
    named |= {f"rotary base {x:g}": dataclasses.replace(config.rope, theta=x) for x in (1e4, 1e6)}
    for name, rope in named.items():
        if rope != config.rope:
            yield name, (dataclasses.replace(config, rope=rope), params)


def norm_choices(setup: Setup, file: DFlashFile) -> Iterator[tuple[str, Setup]]:
    """None: every norm stands in one place."""
    del setup, file
    return iter(())


def part_choices(setup: Setup, file: DFlashFile, target: Target) -> Iterator[tuple[str, Setup]]:
    """Who looks ahead in a block, windows, and the target's embedding and head instead of its own."""
    del file
    config, params = setup
    every = tuple(not config.looks_ahead(i) for i in range(config.num_layers))
    yield (
        "looking ahead the other way",
        (dataclasses.replace(config, causal=tuple(not c for c in every)), params),
    )
    if any(config.windows):
        yield "no windows", (dataclasses.replace(config, windows=(), causal=every), params)
    if config.hidden_size != config.target_hidden_size:
        return
    theirs = join(dataclasses.replace(config, own_embedding=False, own_head=False), params.weights, target)
    if config.own_embedding:
        yield "the target's embedding", (config, dataclasses.replace(params, embed=theirs.embed))
    if config.own_head:
        yield "the target's head", (config, dataclasses.replace(params, head=theirs.head, tied=theirs.tied))
