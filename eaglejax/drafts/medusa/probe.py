"""What a diagnosis tries on Medusa heads: their guesses on a text, and every choice the other way round."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.drafts.borrow import target_head
from eaglejax.drafts.medusa import model
from eaglejax.drafts.medusa.config import MedusaConfig
from eaglejax.drafts.medusa.model import MedusaParams
from eaglejax.models.target import Target

Setup = tuple[MedusaConfig, MedusaParams]
dtype_of = model.dtype_of


@functools.partial(jax.jit, static_argnums=(0, 3))
def _guesses(config: MedusaConfig, params: MedusaParams, features: jax.Array, steps: int) -> jax.Array:
    def one(seen: jax.Array) -> jax.Array:
        read = model.read_target(params, config, seen[None, :-1])
        heads = [model.logits(params, config, k, model.state(params, k, read))[0] for k in range(steps)]
        return jnp.stack([jnp.argmax(head, -1) for head in heads])

    return jax.lax.map(one, features).swapaxes(0, 1)


def guesses(
    config: MedusaConfig, params: MedusaParams, features: jax.Array, tokens: jax.Array, steps: int
) -> np.ndarray:
    """Draft ids [steps, B, T - 1] with ``features`` [B, T, 1, H]: head k of row t guesses token t + 2 + k.
    Beyond the last head there is no guess: id -1."""
    del tokens
    asked = min(steps, config.heads)
    found = np.asarray(_guesses(dataclasses.replace(config, basis=None), params, features, asked))
    return np.concatenate([found, np.full((steps - asked, *found.shape[1:]), -1, found.dtype)])


def boundaries(config: MedusaConfig, layers: int) -> list[tuple[int, ...]]:
    """None: the heads read the last state."""
    del config, layers
    return []


def ropes(setup: Setup, target: Target) -> Iterator[tuple[str, Setup]]:
    """None: heads know no positions."""
    del setup, target
    return iter(())


def norm_choices(setup: Setup, file: Any) -> Iterator[tuple[str, Setup]]:
    """None: there is no norm."""
    del setup, file
    return iter(())


def part_choices(setup: Setup, file: Any, target: Target) -> Iterator[tuple[str, Setup]]:
    """The heads in the reverse order, without biases, and with the target's matrix to the vocabulary."""
    config, params = setup
    heads = params.weights["heads"]
    if config.heads > 1:
        turned = {**params.weights, "heads": heads[::-1]}
        yield "heads in the reverse order", (config, dataclasses.replace(params, weights=turned))
    if config.bias and config.layers:
        # Zeros make no other program.
        bare = [
            {**head, "layers": [{**layer, "b": jnp.zeros_like(layer["b"])} for layer in head["layers"]]}
            for head in heads
        ]
        yield "bias=False", (config, dataclasses.replace(params, weights={**params.weights, "heads": bare}))
    if config.output != "target":
        weights = {name: value for name, value in params.weights.items() if name != "out"}
        weights["heads"] = [{"layers": head["layers"]} for head in heads]
        head, tied = target_head(target, None if file.ids is None else np.asarray(file.ids))
        borrowed = dataclasses.replace(params, weights=weights, head=head, tied=tied)
        yield "the target's head", (dataclasses.replace(config, output="target"), borrowed)
