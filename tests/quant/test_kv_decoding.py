"""Decoding with narrow caches: sequential tokens, state recomputed, safe from broken keys."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from loop_tools import (
    SEED,
    Layers,
    decode,
    full_forward,
    greedy_texts,
    lively,
    pad,
    prompts,
    tiny_config,
    tiny_target,
)

from eaglejax.devices import Attention
from eaglejax.drafts.draft_model.proposer import DraftModel
from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.tree import chain
from eaglejax.errors import ConfigError
from eaglejax.kv_format import KVFormat
from eaglejax.models import decoder
from eaglejax.nn.attention import attention_by
from eaglejax.nn.cache import CacheScales
from eaglejax.nn.visible import Causal, Tree
from eaglejax.quant.kv import calibrate_cache


def target_of(form: str) -> Any:
    """The tiny target with its cache in ``form``."""
    return Layers(form, cache=form).target()


def texts_of(form: str) -> tuple[tuple[int, ...], ...]:
    """Prompts continued to the context's end, one argmax at a time, over a cache in ``form``."""
    return greedy_texts(prompts(), Layers(form, cache=form))


KERNEL = Attention("tpu", interpret=True)


def test_the_formats_texts_are_not_all_the_same() -> None:
    """Or else the conformance suite would show nothing about what is read from the cache."""
    assert texts_of("turbo3") != texts_of("int8")


@pytest.mark.slow
def test_whole_answers_with_narrow_caches_on_both_sides() -> None:
    """Through the public decoder: formats of target and draft chosen apart, the target's by the target."""
    texts = texts_of("int8")
    want = [list(t[len(p) :]) for t, p in zip(texts, prompts(), strict=True)]
    for cache in (None, "fp8"):
        proposer = DraftModel(tiny_config(), length=2, cache_dtype=cache)
        weights = lively(tiny_config(), SEED + 1)
        results = decode(proposer, weights, prompts(), target=target_of("int8"))
        assert [r.token_ids for r in results] == want
    plain = decode(CASES["ar"].proposer, None, prompts(), target=tiny_target(), cache_dtype="int8")
    assert [r.token_ids for r in plain] == want


def test_an_eagle_draft_keeps_its_own_cache_in_any_format() -> None:
    config = EagleConfig(
        version=1,
        vocab_size=32,
        draft_vocab_size=32,
        hidden_size=16,
        target_hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
    )
    params = eagle_model.EagleParams(
        eagle_model.init_eagle(config, jax.random.key(0)), embed=jnp.ones((32, 16)), head=jnp.ones((16, 32))
    )
    state = Eagle(config, chain(2), cache_dtype="iso3").init(params, batch=2, capacity=16)
    assert state.cache.layers[0].k.format == KVFormat("iso3")
    assert state.cache.layers[0].k.codes.shape == (2, 1, 17, 3)
    with pytest.raises(ConfigError, match="draft's cache cannot be 'int8-static'"):
        Eagle(config, chain(2), cache_dtype="int8-static")
    with pytest.raises(ConfigError, match="draft's cache cannot be 'int8-static'"):
        DraftModel(tiny_config(), cache_dtype="int8-static")


def test_calibrated_scales_cut_nothing_of_their_prompts_and_outlive_a_donated_cache() -> None:
    target = tiny_target()
    scales = calibrate_cache(target, prompts(), width=5)
    exact = full_forward(target.params, target.config, pad(prompts()), "float32", None)[1]
    for side in ("k", "v"):
        for found, layer in zip(getattr(scales, side), exact.layers, strict=True):
            stored = getattr(layer, side)
            top = np.max([np.abs(stored[r, :, : len(p)]).max(1) for r, p in enumerate(prompts())], axis=0)
            np.testing.assert_allclose(found, top / 127, rtol=1e-4)
    make = jax.jit(lambda s: decoder.init_cache(target.config, 1, 16, "int8-static", s))
    cache = make(scales)
    jax.jit(lambda c: c, donate_argnums=0)(cache)
    assert all(x.is_deleted() for x in jax.tree.leaves(cache))
    assert not any(x.is_deleted() for x in jax.tree.leaves(scales))


BROKEN = 31


def broken_target(form: str) -> Any:
    """The tiny target, but one token's embedding is not a number."""
    target = tiny_target()
    params = {**target.params, "embed": target.params["embed"].at[BROKEN].set(jnp.nan)}
    return dataclasses.replace(target, params=params, cache_format=form)


@pytest.mark.parametrize(
    ("form", "attention"),
    [
        ("float32", None),
        ("int8", KERNEL),
        pytest.param("float32", KERNEL, marks=pytest.mark.slow),
        pytest.param("turbo4", None, marks=pytest.mark.slow),
    ],
)
def test_a_broken_draft_reaches_neither_its_siblings_nor_the_rest_of_the_text(
    form: str, attention: Attention | None
) -> None:
    """Tokens 30 and 31 are drafted side by side; 31 cannot be computed. Its own place and what descends from
    it are not finite, all else is untouched, in this forward and from the cache in the next."""
    sound, broken = tiny_target(), broken_target(form)
    sees = np.eye(5, dtype=bool)
    sees[:, 0] = True
    sees[3, 1] = sees[4, 2] = True
    tokens = np.asarray([[5, 30, BROKEN, 7, 8]] * 2, np.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def run(config: Any, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        cache = decoder.init_cache(config, 2, 16, form)
        place = jnp.asarray([[0, 1, 1, 2, 2]] * 2)
        with attention_by(attention):
            out = decoder.forward(params, config, tokens, place, cache, Tree(sees[None]))
            kept = out.cache.commit(jnp.asarray([[0, 1, 3]] * 2), jnp.asarray([3, 3]))
            one = jnp.full((2, 1), 3)
            after = decoder.forward(params, config, one, kept.lengths[:, None], kept, Causal())
        return out.hidden, after.hidden

    mixed, after = run(broken.config, broken.params, tokens)
    assert np.isfinite(mixed[:, [0, 1, 3]]).all()
    assert np.isnan(mixed[:, [2, 4]]).all()
    want, want_after = run(sound.config, sound.params, tokens)
    np.testing.assert_allclose(mixed[:, [0, 1, 3]], want[:, [0, 1, 3]], rtol=0, atol=1e-5)
    np.testing.assert_allclose(after, want_after, rtol=0, atol=1e-5)


def test_a_prompt_that_cannot_be_computed_ends_its_row_whatever_its_last_chunk_is() -> None:
    starts = [prompts()[0], (4, BROKEN, *prompts()[2]), prompts()[1]]
    results = decode(CASES["ar"].proposer, None, starts, target=broken_target("float32"), limits=3)
    assert [r.finish_reason for r in results] == ["length", "error", "length"]
    assert results[1].token_ids == []
    assert "NaN or infinite after 0 tokens" in results[1].error
    whole = decode(CASES["ar"].proposer, None, [starts[0], starts[2]], limits=3)
    assert [results[0].token_ids, results[2].token_ids] == [r.token_ids for r in whole]


@pytest.mark.parametrize(
    ("form", "scales", "match"),
    [
        ("int8-static", None, "needs calibrated scales"),
        ("int8", "good", "not for 'int8'"),
        ("int8-static", "short", r"must be 2 arrays of shape \(2, 8\)"),
    ],
)
def test_scales_that_do_not_fit_are_refused(form: str, scales: str | None, match: str) -> None:
    one = jnp.ones((2, 8))
    given = {
        None: None,
        "good": CacheScales(k=(one,) * 2, v=(one,) * 2),
        "short": CacheScales(k=(one,), v=(one,)),
    }
    with pytest.raises(ConfigError, match=match):
        decoder.init_cache(tiny_config(), 1, 16, form, given[scales])
