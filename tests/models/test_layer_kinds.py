"""Every kind of layer: what it computes, and that its memory is what a forward from nothing would leave."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eaglejax as ej
from eaglejax import pytree
from eaglejax.drafts import tree as tree_lib
from eaglejax.errors import ConfigError, EaglejaxError
from eaglejax.kv_format import KVFormat
from eaglejax.models import decoder
from eaglejax.models.config import LayerSpec, ModelConfig
from eaglejax.models.target import random_target
from eaglejax.nn.cache import Cache, Placement, rewind
from eaglejax.nn.indexer import Indexer
from eaglejax.nn.latent import LatentAttention
from eaglejax.nn.recurrent import GatedDelta
from eaglejax.nn.rope import Angles, RopeConfig, apply_rope
from eaglejax.nn.visible import Causal, Full, Seen, Tree
from eaglejax.quant.quantize import quantize_target
from eaglejax.rotation.rotate import rotate_target

VOCAB, HIDDEN, CAPACITY, ROWS = 40, 16, 32, 2
ROPE = RopeConfig(theta=100.0)
LATENT = LatentAttention(4, 6, 4, 5, 8, scale=10**-0.5, rope=ROPE, query_rank=7)
DELTA = GatedDelta(key_heads=2, heads=4, key_dim=6, value_dim=5, kernel=3)


def config_of(*layers: LayerSpec) -> ModelConfig:
    return ModelConfig(
        family="toy",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=20,
        num_layers=len(layers),
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=CAPACITY,
        rope=ROPE,
        query_scale=8**-0.5,
        layers=layers,
    )


PLAIN_QUERIES = dataclasses.replace(LATENT, query_rank=None)
SPARSE = dataclasses.replace(LATENT, indexer=Indexer(heads=16, head_dim=6, top_k=4, rope_dim=4))
CONFIGS = {
    "mixed": config_of(LayerSpec(mixer=DELTA), LayerSpec(window=7), LayerSpec(mixer=PLAIN_QUERIES)),
    "recurrent": config_of(LayerSpec(mixer=DELTA)),
    "sparse": config_of(LayerSpec(mixer=SPARSE)),
    "chunked": dataclasses.replace(
        config_of(LayerSpec(chunk=6), LayerSpec(rotary=False)), qk_norm_bare=True, temperature=(3.0, 0.5)
    ),
}
NORM = CONFIGS["mixed"].block(0).norm


@functools.cache
def weights(name: str) -> Any:
    """Far enough from zero that every part of a layer matters."""
    params = decoder.init_params(CONFIGS[name], jax.random.key(1))
    return jax.tree.map(lambda x: x * 12 if x.ndim > 1 else x, params)


@functools.partial(jax.jit, static_argnames=("name",))
def step(name: str, params: Any, tokens: Any, depth: Any, cache: Cache, visible: Any) -> tuple[Any, Cache]:
    positions = cache.lengths[:, None] + depth
    out = decoder.forward(params, CONFIGS[name], tokens, positions, cache, visible)
    return decoder.unembed(params, CONFIGS[name], out.hidden), out.cache


def chain(name: str, tokens: np.ndarray, cache: Cache) -> tuple[Any, Cache]:
    return step(name, weights(name), tokens, np.arange(tokens.shape[1]), cache, Causal())


SHAPE = tree_lib.from_choices([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0], [0, 1, 0, 0]])
PATHS = np.asarray([[0, 1, 4, 6, 7], [0, 2, 5, 5, 5]], np.int32)
"""Nodes of a path of each row; the second row keeps three."""


@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_trees_and_single_tokens_leave_what_one_forward_leaves(name: str) -> None:
    """A padded prompt in two chunks, a tree of which a path is kept, then token by token; rows of different
    lengths. Logits at every step and the memory at the end are those of one forward over each text."""
    config, rng = CONFIGS[name], np.random.default_rng(0)
    start, kept = (7, 4), (4, 3)
    texts = rng.integers(1, VOCAB, (ROWS, 16)).astype(np.int32)
    tokens = rng.integers(1, VOCAB, (ROWS, SHAPE.nodes)).astype(np.int32)
    for b in range(ROWS):
        # The tree's path is what the text goes on with.
        tokens[b, PATHS[b, : kept[b]]] = texts[b, start[b] : start[b] + kept[b]]
    want, whole = chain(name, texts, decoder.init_cache(config, ROWS, CAPACITY))
    cache = decoder.init_cache(config, ROWS, CAPACITY)
    assert cache.capacity == (None if name == "recurrent" else CAPACITY)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4)
    for begin in (0, 5):
        count = np.clip(np.asarray(start) - begin, 0, 5)
        logits, cache = chain(name, texts[:, begin : begin + 5], cache)
        cache = cache.advance(jnp.asarray(count))
        for b, n in enumerate(count):
            close(logits[b, :n], want[b, begin : begin + n])
    parent = jnp.broadcast_to(jnp.asarray(SHAPE.parent), (ROWS, SHAPE.nodes))
    valid = jnp.ones((ROWS, SHAPE.nodes), bool).at[1, 6:].set(False)
    seen = Tree(tree_lib.ancestors(parent, valid, SHAPE.depth))
    logits, cache = step(name, weights(name), tokens, np.asarray(SHAPE.depths), cache, seen)
    for b in range(ROWS):
        close(logits[b, PATHS[b, : kept[b]]], want[b, start[b] : start[b] + kept[b]])
    cache = jax.jit(Cache.commit)(cache, PATHS, np.asarray(kept, np.int32))
    ends = np.asarray(start) + kept
    np.testing.assert_array_equal(cache.lengths, ends)
    for _ in range(3):
        one = np.stack([texts[b, e : e + 1] for b, e in enumerate(ends)])
        logits, cache = chain(name, one, cache)
        cache = cache.advance(jnp.ones(ROWS, jnp.int32))
        for b, e in enumerate(ends):
            close(logits[b, 0], want[b, e])
        ends = ends + 1
    fresh = whole.advance(jnp.asarray(ends))
    for got, from_nothing in zip(cache.layers, fresh.layers, strict=True):
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(from_nothing), strict=True):
            for b, end in enumerate(ends):
                close(x[b, :, :end] if got.capacity else x[b], y[b, :, :end] if got.capacity else y[b])


def test_a_choice_of_every_slot_is_dense_attention() -> None:
    """An indexer that may choose as many slots as are seen changes nothing; one of fewer does."""
    rng = np.random.default_rng(2)
    tokens = rng.integers(1, VOCAB, (ROWS, 12)).astype(np.int32)
    params, made = weights("sparse"), {}
    run = jax.jit(decoder.forward, static_argnums=1)
    for top_k in (4, 12, CAPACITY):
        indexer = dataclasses.replace(SPARSE.indexer, top_k=top_k)
        config = config_of(LayerSpec(mixer=dataclasses.replace(SPARSE, indexer=indexer)))
        cache = decoder.init_cache(config, ROWS, CAPACITY)
        places = jnp.broadcast_to(jnp.arange(12), (ROWS, 12))
        made[top_k] = run(params, config, tokens, places, cache, Causal()).hidden
    np.testing.assert_allclose(made[12], made[CAPACITY], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(made[4][:, :4], made[CAPACITY][:, :4], rtol=1e-5, atol=1e-5)
    assert np.abs(made[4][:, 8:] - made[CAPACITY][:, 8:]).max() > 0.01
    with pytest.raises(ConfigError, match="narrow queries"):
        dataclasses.replace(SPARSE, query_rank=None)


def test_a_text_joins_and_leaves_a_batch() -> None:
    """A prompt that was run alone goes on in a slot of a larger batch as it would alone, its neighbour does
    not notice, and a released slot begins anew."""
    name, rng = "mixed", np.random.default_rng(1)
    config = CONFIGS[name]
    texts = rng.integers(1, VOCAB, (3, 5)).astype(np.int32)
    count = jnp.full((ROWS,), 5)
    _, cache = chain(name, texts[:ROWS], decoder.init_cache(config, ROWS, CAPACITY))
    cache = cache.advance(count)
    _, alone = chain(name, texts[2:], decoder.init_cache(config, 1, 16))
    alone = alone.advance(count[:1])
    joined = jax.jit(Cache.insert)(cache.release(1), 1, alone)
    assert joined.lengths.tolist() == [5, 5]
    new = texts[1:] % 7 + 3
    before, _ = chain(name, new, cache)
    own, _ = chain(name, new[1:], alone)
    after, _ = chain(name, new, joined)
    np.testing.assert_allclose(after[0], before[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(after[1], own[0], rtol=1e-4, atol=1e-4)
    freed = jax.jit(Cache.release)(joined, jnp.int32(1))
    assert freed.lengths.tolist() == [5, 0]
    anew, _ = chain(name, new, freed)
    first, _ = chain(name, new[1:], decoder.init_cache(config, 1, 16))
    np.testing.assert_allclose(anew[1], first[0], rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="32 slots does not fit a cache of 16"):
        alone.insert(0, cache)


def test_a_broken_token_reaches_those_alone_that_see_it() -> None:
    name = "mixed"
    tokens = np.asarray([[5, 30, 31, 7, 8]] * ROWS, np.int32)
    parent, depth = (0, 0, 0, 1, 2), np.asarray([0, 1, 1, 2, 2])
    every = jnp.ones((ROWS, 5), bool)
    seen = Tree(tree_lib.ancestors(jnp.asarray([parent] * ROWS), every, 2))
    params = weights(name)
    broken = {**params, "embed": params["embed"].at[31].set(jnp.nan)}
    empty = decoder.init_cache(CONFIGS[name], ROWS, CAPACITY)
    want, sound = step(name, params, tokens, depth, empty, seen)
    got, spoilt = step(name, broken, tokens, depth, empty, seen)
    assert np.isnan(got[:, [2, 4]]).all()
    np.testing.assert_allclose(got[:, [0, 1, 3]], want[:, [0, 1, 3]], rtol=1e-5, atol=1e-5)
    path, kept = jnp.asarray([[0, 1, 3]] * ROWS), jnp.full((ROWS,), 3)
    after = [chain(name, tokens[:, :1], c.commit(path, kept))[0] for c in (sound, spoilt)]
    np.testing.assert_allclose(after[1], after[0], rtol=1e-5, atol=1e-5)


def test_latent_attention_is_that_of_expanded_keys_and_values() -> None:
    """Against heads that are expanded one by one, in numpy."""
    rng, n = np.random.default_rng(2), 6
    norm, table = NORM, LATENT.table(HIDDEN, HIDDEN, NORM, jnp.float32)
    given = {k: jnp.asarray(rng.normal(0, 0.5, i.shape), jnp.float32) for k, i in table.items()}
    y = jnp.asarray(rng.normal(size=(1, n, HIDDEN)), jnp.float32)

    positions = jnp.arange(n)[None]
    memory = pytree.zeros(LATENT.cache_table(1, n, KVFormat("float32")))
    at = Placement(jnp.zeros(1, jnp.int32), positions, Causal())
    with jax.default_matmul_precision("highest"):
        got, _ = LATENT(given, y, Angles(positions), norm, memory, at)
        q = (norm(y @ given["q_a"], given["q_a_norm"]) @ given["q_b"]).reshape(n, 4, 10)
        both = y @ given["kv_a"]
        latent = norm(both[..., :8], given["kv_a_norm"])[0]
        shared = np.asarray(apply_rope(both[:, :, None, 8:], positions, ROPE))[0, :, 0]
        turned = np.asarray(apply_rope(q[None, :, :, 6:], positions, ROPE))[0]
    keys = np.asarray(latent @ given["k_b"]).reshape(n, 4, 6)
    values = np.asarray(latent @ given["v_b"]).reshape(n, 4, 5)
    out = np.zeros((n, 4, 5))
    for i, h in np.ndindex(n, 4):
        score = keys[: i + 1, h] @ np.asarray(q)[i, h, :6] + shared[: i + 1] @ turned[i, h]
        w = np.exp(LATENT.scale * (score - score.max()))
        out[i, h] = (w / w.sum()) @ values[: i + 1, h]
    np.testing.assert_allclose(got[0], out.reshape(n, -1) @ np.asarray(given["o"]), rtol=1e-4, atol=1e-4)


def test_the_delta_rule_is_its_recurrence() -> None:
    """Against the rule applied one token after another, convolution included, in float64."""
    rng, n = np.random.default_rng(3), 7
    table = DELTA.table(HIDDEN, HIDDEN, NORM, jnp.float32)
    given = {k: rng.normal(0, 0.6, i.shape) for k, i in table.items()}
    y = rng.normal(size=(1, n, HIDDEN))

    positions = jnp.arange(n)[None]
    memory = pytree.zeros(DELTA.cache_table(1, n, KVFormat("float32")))
    at = Placement(jnp.zeros(1, jnp.int32), positions, Causal())
    f32 = {k: jnp.asarray(x, jnp.float32) for k, x in given.items()}
    with jax.default_matmul_precision("highest"):
        got, after = DELTA(f32, jnp.asarray(y, jnp.float32), Angles(positions), NORM, memory, at)
    after = after.commit(jnp.zeros(1, jnp.int32), None, jnp.asarray([n]))

    def silu(x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-x))

    raw = np.concatenate([np.zeros((2, DELTA.channels)), y[0] @ given["qkv"]])
    state, out = np.zeros((4, 6, 5)), np.zeros((n, 4, 5))
    for t in range(n):
        mixed = silu(sum(given["conv"][i] * raw[t + i] for i in range(3)))
        q, k, v = mixed[:12].reshape(2, 6), mixed[12:24].reshape(2, 6), mixed[24:].reshape(4, 5)
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        beta = 1 / (1 + np.exp(-(y[0, t] @ given["b"])))
        g = -np.exp(given["a_log"]) * np.log1p(np.exp(y[0, t] @ given["a"] + given["dt_bias"]))
        for h in range(4):
            state[h] *= np.exp(g[h])
            state[h] += np.outer(k[h // 2], beta[h] * (v[h] - k[h // 2] @ state[h]))
            read = q[h // 2] / np.sqrt(6) @ state[h]
            scaled = read / np.sqrt((read * read).mean() + NORM.eps) * given["out_norm"]
            out[t, h] = scaled * silu((y[0, t] @ given["z"]).reshape(4, 5)[h])
    np.testing.assert_allclose(got[0], out.reshape(n, -1) @ given["o"], rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(after.state[0], state, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(after.recent[0], raw[-2:], rtol=1e-5, atol=1e-5)


def test_what_a_recurrent_layer_cannot_do_is_refused() -> None:
    config, params = CONFIGS["recurrent"], weights("recurrent")
    cache, tokens = decoder.init_cache(config, 1, 8), jnp.ones((1, 3), jnp.int32)
    for kind in (Full(), Seen(jnp.ones((1, 3, 3), bool))):
        with pytest.raises(ConfigError, match="along one path"):
            decoder.forward(params, config, tokens, jnp.arange(3)[None], cache, kind)
    with pytest.raises(EaglejaxError, match="not written"):
        cache.advance(jnp.ones(1, jnp.int32))
    with pytest.raises(ConfigError, match="cannot go back"):
        rewind(cache, cache.lengths)
    for change, match in (({"heads": 3}, "multiple of 2 key heads"), ({"kernel": 1}, "mixes nothing")):
        with pytest.raises(ConfigError, match=match):
            dataclasses.replace(DELTA, **change)
    target = random_target(config)
    for refuse, what in ((rotate_target, "a rotation"), (quantize_target, "quantisation")):
        with pytest.raises(ConfigError, match=f"{what} knows grouped-query attention.*layer 0 is GatedDelta"):
            refuse(target, "w8a8" if refuse is quantize_target else None)


def test_a_cache_s_table_names_its_axes_and_counts_its_bytes() -> None:

    for name in ("float32", "int8", "turbo4"):
        table = decoder.cache_table(CONFIGS["mixed"], 3, CAPACITY, KVFormat(name))
        cache = decoder.init_cache(CONFIGS["mixed"], 3, CAPACITY, name)
        assert pytree.nbytes(table) == sum(x.nbytes for x in jax.tree.leaves(cache))
        infos = jax.tree.leaves(table, is_leaf=pytree.is_info)
        assert [i.shape for i in infos] == [x.shape for x in jax.tree.leaves(cache)]
        assert all(i.axes[0] == "batch" and i.shape[0] == 3 for i in infos)


def test_speculation_over_every_kind_at_once_is_plain_decoding() -> None:
    target = dataclasses.replace(random_target(CONFIGS["mixed"]), params=weights("mixed"))
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    plain = ej.generate(target, prompt, max_new_tokens=16)
    drafted = ej.generate(target, prompt, max_new_tokens=16, proposer=ej.NGram(length=4))
    assert drafted.token_ids == plain.token_ids
