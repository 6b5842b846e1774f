"""What a diagnosis tries on an MTP draft: its guesses on a text, and every choice the other way round."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.drafts.mtp import model
from eaglejax.drafts.mtp.config import MtpConfig
from eaglejax.drafts.mtp.files.load import join
from eaglejax.drafts.mtp.files.read import MtpFile
from eaglejax.drafts.mtp.model import MtpParams
from eaglejax.models.target import Target

Setup = tuple[MtpConfig, MtpParams]
dtype_of = model.dtype_of


@functools.partial(jax.jit, static_argnums=(0, 4))
def _guesses(
    config: MtpConfig, params: MtpParams, features: jax.Array, tokens: jax.Array, steps: int
) -> jax.Array:
    def one(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        seen, text = row
        states = model.unroll(params, config, seen[None, :-1], text[None, 1:], steps)
        best = [
            jnp.argmax(model.logits(params, config, k % config.modules, s)[0], -1)
            for k, s in enumerate(states)
        ]
        return jnp.stack(best)

    return jax.lax.map(one, (features, tokens)).swapaxes(0, 1)


def guesses(
    config: MtpConfig, params: MtpParams, features: jax.Array, tokens: jax.Array, steps: int
) -> np.ndarray:
    """Draft ids [steps, B, T - 1] on ``tokens`` [B, T] with ``features`` [B, T, 1, H]: step k of row t
    guesses token t + 2 + k."""
    return np.asarray(_guesses(dataclasses.replace(config, basis=None), params, features, tokens, steps))


def boundaries(config: MtpConfig, layers: int) -> list[tuple[int, ...]]:
    """None: the modules read the last state."""
    del config, layers
    return []


def ropes(setup: Setup, target: Target) -> Iterator[tuple[str, Setup]]:
    """None: the layers are the target's own."""
    del setup, target
    return iter(())


def norm_choices(setup: Setup, file: MtpFile) -> Iterator[tuple[str, Setup]]:
    """The other state recycled."""
    del file
    config, params = setup
    other = "pre_norm" if config.recycle == "post_norm" else "post_norm"
    yield f"recycle={other}", (dataclasses.replace(config, recycle=other), params)  # type: ignore[arg-type]


def part_choices(setup: Setup, file: MtpFile, target: Target) -> Iterator[tuple[str, Setup]]:
    """The halves of the projection changed round, the target's embedding and head instead of its own."""
    del file
    config, params = setup

    def turned(weights: dict[str, Any]) -> dict[str, Any]:
        return {**weights, "fc": jnp.roll(weights["fc"], config.hidden_size, axis=0)}

    modules = [turned(module) for module in params.weights["modules"]]
    yield (
        "fc of [state, embedding]",
        (config, dataclasses.replace(params, weights={**params.weights, "modules": modules})),
    )
    theirs = join(dataclasses.replace(config, own_embedding=False, own_head=False), params.weights, target)
    if config.own_embedding:
        yield "the target's embedding", (config, dataclasses.replace(params, embed=theirs.embed))
    if config.own_head:
        yield (
            "the target's head",
            (config, dataclasses.replace(params, head=theirs.head, tied=theirs.tied)),
        )
