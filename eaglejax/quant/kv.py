"""Scales of an int8-static key/value cache, from prompts of the kind that will be asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.errors import ConfigError
from eaglejax.models import decoder
from eaglejax.models.target import Target
from eaglejax.nn.cache import Cache, CacheScales
from eaglejax.nn.kv_codec import INT8_MAX, Stored, decode
from eaglejax.quant.calibrate import check_prompt, chunk


def calibrate_cache(target: Target, prompts: Sequence[Sequence[int]], *, width: int = 128) -> CacheScales:
    """Scales that cut no key or value of token-id ``prompts``: each channel's largest magnitude / 127.

    ``target``: the very weights that will be decoded with, rotations included, in any scheme; its cache is
    kept in the target's dtype while it is looked at. ``width``: tokens a forward. A channel that stays zero
    throughout gets the largest scale of its head. Raises RequestError for a prompt that the target cannot
    take, ConfigError for none at all, a width below 1, and keys or values that are not finite.
    """
    if width < 1:
        raise ConfigError(f"width is {width}; a forward takes at least 1 token")
    texts = [np.asarray(list(prompt), np.int32) for prompt in prompts]
    if not texts:
        raise ConfigError("there are no prompts to calibrate with; give some, of the kind that will be asked")
    for n, text in enumerate(texts):
        check_prompt(n, text, target)
    longest = max(map(len, texts))
    width = min(width, longest)
    empty = decoder.init_cache(target.config, 1, -(-longest // width) * width, target.dtype)

    @jax.jit
    def run(params, cache, tokens, positions, visible):
        out = decoder.forward(params, target.config, tokens, positions, cache, visible)
        sound = jnp.isfinite(out.hidden).all()
        return dataclasses.replace(out.cache, lengths=positions[:, -1] + 1), sound

    top: CacheScales | None = None
    for n, text in enumerate(texts):
        cache = empty
        for start in range(0, len(text), width):
            cache, sound = run(target.params, cache, *chunk(text[start : start + width], start, width))
            if not sound:
                raise ConfigError(f"the target computes no finite numbers for calibration prompt {n}")
        found = _largest(cache)
        top = found if top is None else jax.tree.map(jnp.maximum, top, found)
    assert top is not None
    return jax.tree.map(_scale, top)


@jax.jit
def _largest(cache: Cache) -> CacheScales:
    """Largest magnitudes [Hkv, d] f32 over the committed slots, of a cache of one row."""
    real = (jnp.arange(cache.capacity) < cache.lengths[0])[:, None]

    def top(stored: Stored) -> jax.Array:
        return jnp.max(jnp.where(real, jnp.abs(decode(stored)[0]), 0), axis=1)

    return CacheScales(
        k=tuple(top(layer.k) for layer in cache.layers), v=tuple(top(layer.v) for layer in cache.layers)
    )


def _scale(top: jax.Array) -> jax.Array:
    head = jnp.max(top, axis=1, keepdims=True)
    return jnp.where(top > 0, top, jnp.where(head > 0, head, 1)) / INT8_MAX
