"""Families of targets against transformers: a tiny random model, saved in its published layout and read, runs
a prompt, single tokens and a chunk to the same logits and hidden states."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import targets_page
from published import LENGTH, TARGETS, case

from eaglejax.models import decoder
from eaglejax.nn.visible import Causal

CAPACITY = 24


def relative(got: Any, want: np.ndarray) -> float:
    return float(np.abs(np.asarray(got) - want).max() / np.abs(want).max())


@functools.partial(jax.jit, static_argnames="config")
def step(params: Any, config: Any, tokens: Any, cache: Any) -> Any:
    positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
    aux = tuple(range(config.num_layers + 1))
    out = decoder.forward(params, config, tokens, positions, cache, Causal(), aux=aux)
    return decoder.unembed(params, config, out.hidden), out.aux, out.cache


@pytest.mark.parametrize("name", TARGETS)
def test_a_published_layout_runs_as_in_transformers(name: str) -> None:
    config, params, tokens, logits, boundaries = case(name)
    cache, at = decoder.init_cache(config, 1, CAPACITY), 0
    for width in (9, *[1] * 3, 9):
        got, states, cache = step(params, config, tokens[None, at : at + width], cache)
        cache = cache.advance(jnp.full((1,), width, jnp.int32))
        for i in range(config.num_layers + 1):
            assert relative(states[0, :, i], boundaries[at : at + width, i]) < 2e-5, f"boundary {i} from {at}"
        assert relative(got[0], logits[at : at + width]) < 2e-5
        at += width
    assert at == LENGTH


def test_the_page_of_targets_is_what_stands() -> None:
    assert targets_page.PAGE.read_text(encoding="utf-8") == targets_page.page()
