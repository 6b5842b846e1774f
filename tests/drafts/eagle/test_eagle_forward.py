"""The draft's forward: cached against uncached, chunks, rows, positions, windows, features."""

from __future__ import annotations

import dataclasses
import functools

import eagle_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_cases import (
    CONFIGS,
    EAGLE1,
    EAGLE3,
    MODERN,
    features_of,
    greedy_rows,
    make,
    numpy_weights,
    observation,
)

from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.eagle.unroll import unroll
from eaglejax.drafts.features import FeatureAdapter
from eaglejax.drafts.tree import chain
from eaglejax.nn.visible import Causal, Tree


def text_of(config, length: int, seed: int = 0):
    """(tokens x_0 .. x_{n-1}, features [n, A, Ht])"""
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, length)
    return tokens, features_of(config, tokens, 0, 0, seed)


@functools.partial(jax.jit, static_argnames=("config", "start", "steps", "capacity"))
def cached_steps(config, params, features, tokens, start: int, steps: int, capacity: int = 48):
    """States of ``steps`` teacher-forced draft steps behind token ``start``, through the cache: [steps,
    H]."""
    cache = eagle_model.init_cache(config, 1, capacity, jnp.float32)
    n = start + 1
    positions = jnp.arange(n)[None]
    feature = eagle_model.fuse(params, config, features[None, :n])
    out, cache = eagle_model.step(
        params,
        config,
        feature,
        tokens[None, 1 : n + 1],
        positions,
        cache,
        Causal(),
        positions,
    )
    cache = cache.replace(lengths=cache.lengths + n)
    states = [out[:, -1]]
    for k in range(1, steps):
        at = start + jnp.arange(1, k + 1)[None]
        out, cache = eagle_model.step(
            params,
            config,
            states[-1][:, None],
            tokens[None, n + k : n + k + 1],
            at[:, -1:],
            cache,
            Tree(jnp.ones((1, 1, k), bool)),
            at,
        )
        states.append(out[:, 0])
    return jnp.concatenate(states)


@pytest.mark.parametrize(("name", "steps"), [("eagle1", 8), ("reduced", 4), ("modern", 3)])
def test_steps_ahead_equal_uncached_recompute(name, steps):
    """Depths 1 to 8 of cached drafting == NumPy from scratch == the training unroll, on the same tokens
    (O4)."""
    config = CONFIGS[name]
    params = make(config, seed=1)
    tokens, features = text_of(config, 16)
    start = 6
    cached = cached_steps(config, params, features, tokens, start=start, steps=steps)
    draft = oracle.Draft(numpy_weights(params), config, params.ids)
    for k in range(steps):
        # From nothing: true features up to start, then the draft's own states, one causal pass over all of
        # them.
        n = start + 1 + k
        own = np.asarray(cached[:k], np.float64)
        feature = np.concatenate([draft.fuse(features[: start + 1].astype(np.float64)), own])
        empty = [([], []) for _ in range(config.num_layers)]
        out, _ = draft.run(feature, tokens[1 : n + 1], np.arange(n), empty, np.tril(np.ones((n, n), bool)))
        np.testing.assert_allclose(cached[k], out[-1], rtol=1e-4, atol=1e-4 * np.abs(out).max())
    states = jax.jit(functools.partial(unroll, config=config, steps=steps))(
        params, features=jnp.asarray(features)[None, :-1], tokens=jnp.asarray(tokens)[None, 1:]
    )
    for k in range(steps):
        np.testing.assert_allclose(
            states[k][0, start], cached[k], rtol=1e-4, atol=1e-4 * np.abs(cached[k]).max()
        )


def test_unroll_keeps_documents_and_windows_apart():
    """Two packed texts give what each gives alone; sliding layers see what cached drafting sees (A74,
    A82)."""
    config = dataclasses.replace(MODERN, windows=(3, None))
    params = make(config, seed=2)
    tokens, features = text_of(config, 15)
    run = jax.jit(functools.partial(unroll, config=config, steps=3))
    features, tokens = jnp.asarray(features)[None], jnp.asarray(tokens)[None]
    cut = 8
    inside = jnp.arange(14)[None]
    packed = run(
        params,
        features=features[:, :-1],
        tokens=tokens[:, 1:],
        positions=jnp.where(inside < cut, inside, inside - cut),
        documents=(inside >= cut).astype(jnp.int32),
    )
    first = run(params, features=features[:, :cut], tokens=tokens[:, 1 : cut + 1])
    second = run(params, features=features[:, cut:-1], tokens=tokens[:, cut + 1 :])
    for k in range(3):
        np.testing.assert_allclose(packed[k][:, : cut - k], first[k][:, : cut - k], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            packed[k][:, cut : -k or None], second[k][:, : 6 - k], rtol=1e-5, atol=1e-5
        )
    cached = cached_steps(config, params, features[0], tokens[0], start=6, steps=3)
    alone = run(params, features=features[:, :-1], tokens=tokens[:, 1:])
    np.testing.assert_allclose(jnp.stack([a[0, 6] for a in alone]), cached, rtol=1e-4, atol=1e-4)
    wide = dataclasses.replace(config, windows=())
    full = cached_steps(wide, params, features[0], tokens[0], start=6, steps=3)
    assert not np.allclose(full, cached, rtol=1e-3), "the window must matter"


@pytest.mark.parametrize("name", ["eagle1", "modern"])
def test_chunked_prefill_equals_one_shot(name):
    """Chunks of 1, 8, 16 and 17 over a prompt of 17 leave the same keys, values and state (A41, A42)."""
    config = CONFIGS[name]
    params = make(config, seed=3)
    proposer = Eagle(config, chain(2))
    tokens, features = text_of(config, 18)
    observe = jax.jit(proposer.observe)
    states = {}
    for chunk in (1, 8, 16, 17):
        state = proposer.init(params, batch=1, capacity=40)
        for begin in range(0, 17, chunk):
            end = min(begin + chunk, 17)
            row = (tokens[begin:end], tokens[begin + 1 : end + 1], features[begin:end])
            state = observe(params, state, observation(config, [row], [begin], chunk))
        states[chunk] = state
    whole = states.pop(17)
    for state in states.values():
        np.testing.assert_array_equal(state.cache.lengths, [17])
        np.testing.assert_allclose(state.feature, whole.feature, rtol=2e-5, atol=2e-5)
        for a, b in zip(
            jax.tree.leaves(state.cache.layers), jax.tree.leaves(whole.cache.layers), strict=True
        ):
            np.testing.assert_allclose(a[:, :, :17], b[:, :, :17], rtol=2e-5, atol=2e-5)


def test_rows_do_not_touch_each_other():
    """A row in a ragged batch, with rubbish and NaN in its padding, is the row alone, bit for bit (O6,
    A32)."""
    config = CONFIGS["reduced"]
    params = make(config, seed=4)
    proposer = Eagle(config, chain(3))
    tokens, features = text_of(config, 7)
    rows = [(tokens[:-1], tokens[1:], features[:-1]), (tokens[:2], tokens[1:3], features[:2])]
    rows.append((tokens[:0], tokens[:0], features[:0]))

    @jax.jit
    def draft(seen):
        state = proposer.observe(params, proposer.init(params, batch=3, capacity=16), seen)
        sampling = greedy_rows(3, config.vocab_size)
        return proposer.propose(
            params, state, jnp.zeros(3, jnp.int32), state.cache.lengths, sampling, sampling.keys
        )

    def run(order):
        tree, state = draft(observation(config, [rows[i] for i in order], [0, 0, 0], 8))
        return tree.tokens, tree.cut_score, state.feature

    base, turned = run((0, 1, 2)), run((1, 2, 0))
    for a, b in zip(base, turned, strict=True):
        np.testing.assert_array_equal(a[0], b[2])
        np.testing.assert_array_equal(a[1], b[0])
    assert np.isfinite(base[1]).all()


def test_positions_far_beyond_the_drafts_own_context():
    """max_position 4 in the draft's config sizes nothing: far positions rotate, prefix and tree have no gap
    (A26)."""
    config = dataclasses.replace(EAGLE3, rope=dataclasses.replace(EAGLE3.rope, max_position=4))
    params = make(config, seed=5)
    tokens, features = text_of(config, 30)
    states = [
        cached_steps(c, params, jnp.asarray(features), jnp.asarray(tokens), start=20, steps=4)
        for c in (config, EAGLE3)
    ]
    np.testing.assert_array_equal(*states)
    # Rotary attention sees differences alone: moving everything by a constant changes nothing but rounding.
    run = jax.jit(functools.partial(unroll, config=config, steps=3))
    batch = {"features": jnp.asarray(features)[None, :-1], "tokens": jnp.asarray(tokens)[None, 1:]}
    here, there = run(params, **batch), run(params, **batch, positions=1000 + jnp.arange(29)[None])
    for a, b in zip(here, there, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("config", [EAGLE1, EAGLE3], ids=["eagle1", "eagle3"])
def test_first_row_reads_the_next_token_and_every_feature(config):
    """Prompts of one token work, the draft changes with the following token, not with the token itself, and
    with each feature; the embedding comes before the feature (A67, A68)."""
    params = make(config, seed=6)
    proposer = Eagle(config, chain(1))
    tokens, features = text_of(config, 1)
    observe = jax.jit(
        lambda seen: proposer.observe(params, proposer.init(params, batch=1, capacity=8), seen).feature
    )

    def state(token=tokens, following=7, x=features):
        return observe(observation(config, [(token, [following], x)], [0], 1))

    base = state()
    np.testing.assert_array_equal(base, state(token=(tokens + 1) % config.vocab_size))
    assert not np.allclose(base, state(following=8))
    for i in range(features.shape[1]):
        other = features.copy()
        other[:, i] *= 2.0
        assert not np.allclose(base, state(x=other))


def test_adapter_maps_each_source_by_its_own_matrix():
    """Rotated features with their rotation undone by the adapter draft as before; a map for the draft's own
    states touches steps beyond the first alone."""
    config = EAGLE3
    params = make(config, seed=7)
    tokens, features = text_of(config, 10)
    rng = np.random.default_rng(0)
    rotations = [np.linalg.qr(rng.normal(size=(16, 16)))[0] for _ in range(3)]
    turned = np.stack([features[:, i] @ r for i, r in enumerate(rotations)], 1).astype(np.float32)
    adapter = FeatureAdapter(target=tuple(jnp.asarray(r.T, jnp.float32) for r in rotations))
    run = functools.partial(cached_steps, config, tokens=jnp.asarray(tokens), start=5, steps=3)
    plain = run(params, jnp.asarray(features))
    undone = run(params.replace(adapter=adapter), jnp.asarray(turned))
    np.testing.assert_allclose(plain, undone, rtol=1e-3, atol=1e-3)
    assert not np.allclose(plain[0], run(params, jnp.asarray(turned))[0], rtol=1e-2)

    flip = FeatureAdapter(draft=-jnp.eye(16))
    ahead = jax.jit(functools.partial(unroll, config=config, steps=2))
    batch = {"features": jnp.asarray(features)[None, :-1], "tokens": jnp.asarray(tokens)[None, 1:]}
    states = ahead(params, **batch)
    flipped = ahead(params.replace(adapter=flip), **batch)
    np.testing.assert_array_equal(states[0], flipped[0])
    assert not np.allclose(states[1], flipped[1], rtol=1e-2)


def test_half_precision_cache_is_the_drafts_own_choice():
    """The draft's keys and values may be bf16 while its weights are f32."""
    config = CONFIGS["modern"]
    params = make(config, seed=8)
    tokens, features = text_of(config, 9)
    row = (tokens[:-1], tokens[1:], features[:-1])
    out = {}
    for dtype in ("float32", "bfloat16"):
        proposer = Eagle(config, chain(2), cache_dtype=dtype)
        state = proposer.init(params, batch=1, capacity=16)
        assert {x.dtype.name for x in jax.tree.leaves(state.cache.layers)} == {dtype}
        state = jax.jit(proposer.observe)(params, state, observation(config, [row], [0], 8))
        assert state.feature.dtype == jnp.float32
        out[dtype] = state.feature
    np.testing.assert_allclose(out["bfloat16"], out["float32"], rtol=0.1, atol=0.1)
    assert not np.array_equal(out["bfloat16"], out["float32"])
