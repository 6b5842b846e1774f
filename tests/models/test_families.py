"""Every family against transformers: logits, boundaries, ragged batches, decoding by chunk and by token."""

from __future__ import annotations

import functools

import hf_export
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax.models import decoder
from eaglejax.nn.visible import Causal

LENGTHS = (12, 7, 10)
ROWS, WIDTH, CAPACITY = len(LENGTHS), max(LENGTHS), 16


def relative(got, want) -> float:
    return float(np.max(np.abs(np.asarray(got) - want)) / np.max(np.abs(want)))


@functools.partial(jax.jit, static_argnames=("config", "aux"))
def step(params, config, tokens, cache, aux=()):
    """Causal forward of new tokens: (logits, aux, cache with the tokens written)."""
    n = tokens.shape[1]
    positions = cache.lengths[:, None] + jnp.arange(n)
    with jax.default_matmul_precision("highest"):
        out = decoder.forward(params, config, tokens, positions, cache, Causal(), aux=aux)
        return decoder.unembed(params, config, out.hidden), out.aux, out.cache


@functools.cache
def case(name: str):
    """(config, params, tokens [B, T], transformers' logits and boundaries of each row run alone)."""
    model, config, params = hf_export.build(name)
    tokens = np.random.default_rng(3).integers(1, config.vocab_size, (ROWS, WIDTH))
    reference = [hf_export.run(model, tokens[b, :t]) for b, t in enumerate(LENGTHS)]
    return config, params, tokens.astype(np.int32), reference


@pytest.mark.parametrize("name", hf_export.FAMILIES)
def test_logits_and_every_boundary_of_a_ragged_batch(name):
    config, params, tokens, reference = case(name)
    tokens = tokens.copy()
    for b, t in enumerate(LENGTHS):
        tokens[b, t:] = 0
    cache = decoder.init_cache(config, ROWS, CAPACITY)
    logits, aux, _ = step(params, config, tokens, cache, aux=tuple(range(config.num_layers + 1)))
    assert logits.dtype == jnp.float32
    for b, t in enumerate(LENGTHS):
        want_logits, want_boundaries = reference[b]
        assert relative(logits[b, :t], want_logits) < 1e-5
        for i in range(config.num_layers + 1):
            assert relative(aux[b, :t, i], want_boundaries[:, i]) < 1e-5, f"boundary {i}"


@pytest.mark.parametrize("name", hf_export.FAMILIES)
def test_cached_decoding_by_chunk_then_token_by_token(name):
    config, params, tokens, reference = case(name)
    cache = decoder.init_cache(config, ROWS, CAPACITY)
    got = [[] for _ in LENGTHS]

    def feed(cache, width, count):
        """Each row feeds its next ``width`` tokens (rows that are done repeat) and keeps ``count``."""
        at = np.minimum(np.asarray(cache.lengths)[:, None] + np.arange(width), WIDTH - 1)
        logits, _, cache = step(params, config, np.take_along_axis(tokens, at, 1), cache)
        for b, c in enumerate(count):
            got[b].extend(np.asarray(logits[b, :c]))
        return cache.advance(jnp.asarray(count, jnp.int32))

    cache = feed(cache, 4, (4, 2, 3))
    cache = feed(cache, 4, (4, 1, 0))
    while any(len(g) < t for g, t in zip(got, LENGTHS, strict=True)):
        cache = feed(cache, 1, [int(len(g) < t) for g, t in zip(got, LENGTHS, strict=True)])
    assert cache.lengths.tolist() == list(LENGTHS)
    for b in range(ROWS):
        assert relative(np.stack(got[b]), reference[b][0]) < 1e-5


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma3"])
def test_a_window_ends_where_transformers_ends_it(name):
    """Positions W-1, W and W+1, the ones that an off-by-one would change, one by one."""
    config, params, tokens, reference = case(name)
    assert 5 in {layer.window for layer in config.layers}
    logits, _, _ = step(params, config, tokens, decoder.init_cache(config, ROWS, CAPACITY))
    for i in (4, 5, 6):
        assert relative(logits[0, i], reference[0][0][i]) < 1e-5
