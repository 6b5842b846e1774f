"""Decoding with quantised weights is lossless too: the distribution is the quantised target's, whoever
guesses."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from loop_tools import CONTEXT, SEED, VOCAB, decode, lively, prompts, tiny_config

import eaglejax as ej
from eaglejax.models import decoder
from eaglejax.models.config import LayerSpec
from eaglejax.models.target import Target
from eaglejax.nn.moe import MoeConfig
from eaglejax.nn.visible import Causal
from eaglejax.quant.calibrate import calibrate
from eaglejax.quant.quantize import quantize_target
from eaglejax.quant.schemes import Plan, get_scheme

SCHEMES = {
    "w8a8": get_scheme("w8a8"),
    "w8a8-static": get_scheme("w8a8-static", asymmetric=True),
    "w4a8": get_scheme("w4a8"),
    "w4a8-g8": get_scheme("w4a8-g8"),
    "w4a16-g8": get_scheme("w4a16-g8"),
    "w8a16": get_scheme("w8a16"),
}
PROPOSERS = ("ngram", "prediction", "chain_3", "mixed")
WIDTHS = (2, 3, 4, 8, 9, 17)
"""Nodes of a verification, against single tokens."""
MOE = MoeConfig(4, 2, 16, scores="softmax", normalize=True, shared=16, shared_gate=True)
RANDOM = np.random.default_rng(4).integers(0, VOCAB, 36).astype(np.int32)


@functools.cache
def float_target(layers: int) -> Target:
    """Experts and a tied head, and of two layers a dense one: every way in which a weight is used."""
    config = tiny_config(
        num_layers=layers,
        layers=(LayerSpec(window=11), LayerSpec(moe=MOE)) if layers == 2 else (LayerSpec(11, moe=MOE),),
        tie_embeddings=True,
    )
    params = lively(config, SEED)
    return Target(config=config, params=params, dtype=np.dtype("float32"), context=CONTEXT)


@functools.cache
def quantised(name: str, layers: int) -> Target:
    """Everything is quantised: router, embedding and tied head as well."""
    target = float_target(layers)
    statistics = calibrate(target, prompts(), width=8) if "static" in name else None
    return quantize_target(target, Plan(SCHEMES[name], exclude=()), statistics=statistics)


@functools.cache
def plain_texts(name: str, layers: int) -> tuple[tuple[int, ...], ...]:
    results = decode(CASES["ar"].proposer, None, prompts(), target=quantised(name, layers))
    return tuple((*p, *r.token_ids) for p, r in zip(prompts(), results, strict=True))


def check(name: str, proposer: str, layers: int) -> None:
    case, texts, target = CASES[proposer], plain_texts(name, layers), quantised(name, layers)
    accepted = 0
    for turn in range(3):
        results = decode(case.proposer, case.params(texts, turn=turn), prompts(), target=target)
        for prompt, text, result in zip(prompts(), texts, results, strict=True):
            assert result.token_ids == list(text[len(prompt) :])
            accepted += result.stats.num_accepted_tokens
    assert accepted > 0, "no guess was ever right, so that nothing was compared"


def test_speculative_tokens_are_those_of_plain_decoding() -> None:
    check("w8a8", "mixed", layers=1)


@pytest.mark.slow
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_with_every_kind_of_proposer(name: str, proposer: str) -> None:
    check(name, proposer, layers=2)


@functools.partial(jax.jit, static_argnums=1)
def step(params: Any, config: Any, cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
    """Logits [1, N, V] of N more tokens, and the cache that holds them."""
    n = tokens.shape[1]
    out = decoder.forward(params, config, tokens, cache.lengths[:, None] + jnp.arange(n), cache, Causal())
    grown = dataclasses.replace(out.cache, lengths=cache.lengths + n)
    return decoder.unembed(params, config, out.hidden), grown


def logits_by(target: Target, tokens: np.ndarray, width: int) -> np.ndarray:
    """Logits [T, V] of ``tokens``, ``width`` of them a forward."""
    cache = decoder.init_cache(target.config, 1, len(tokens), np.dtype("float32"))
    found = []
    for start in range(0, len(tokens) - width + 1, width):
        logits, cache = step(target.params, target.config, cache, tokens[None, start : start + width])
        found.append(np.asarray(logits[0]))
    return np.concatenate(found)


def check_widths(target: Target, tokens: np.ndarray, widths: tuple[int, ...]) -> None:
    """The logits of ``tokens`` [T], scored so many at a time, are those of one at a time."""
    alone = logits_by(target, tokens, 1)
    for width in widths:
        together = logits_by(target, tokens, width)
        assert np.abs(together - alone[: len(together)]).max() <= 1e-5 * np.abs(alone).max(), width


def test_a_wide_verification_scores_what_single_tokens_would() -> None:
    check_widths(quantised("w8a8", 1), RANDOM, WIDTHS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
def test_every_width_scores_what_single_tokens_would(name: str) -> None:
    check_widths(quantised(name, 2), RANDOM, WIDTHS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_model_in_int8_scores_every_width_as_single_tokens(dtype: str) -> None:
    target = ej.load_target("demo", dtype=dtype, quant="w8a8")
    tokens = target.need_tokenizer().encode(
        "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot = items[0]\n"
        "    left = [x for x in items[1:] if x < pivot]\n"
    )
    assert len(tokens) > 2 * WIDTHS[-1]
    text = np.asarray(tokens, np.int32)
    check_widths(target, text, WIDTHS)
