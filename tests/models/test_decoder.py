"""Properties that hold for any model: widths, trees, stale caches, donation, dtypes, refusals."""

from __future__ import annotations

import functools

import hf_export
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax import pytree
from eaglejax.drafts import tree as tree_lib
from eaglejax.errors import ConfigError
from eaglejax.models import decoder
from eaglejax.models.config import FINAL
from eaglejax.nn.kv import KV
from eaglejax.nn.visible import Causal, Tree

CAPACITY = 24


@functools.partial(jax.jit, static_argnames=("config", "aux"))
def forward(params, config, tokens, positions, cache, visible, aux=()):
    with jax.default_matmul_precision("highest"):
        out = decoder.forward(params, config, tokens, positions, cache, visible, aux=aux)
        return decoder.unembed(params, config, out.hidden), out


def causal(tokens, cache):
    """Arguments of a causal forward of ``tokens`` [B, N] on top of ``cache``."""
    return tokens, cache.lengths[:, None] + jnp.arange(tokens.shape[1]), cache, Causal()


def prefilled(params, config, rows: int, length: int, dtype=jnp.float32):
    tokens = (
        np.random.default_rng(1).integers(1, config.vocab_size, (1, length)).repeat(rows, 0).astype(np.int32)
    )
    cache = decoder.init_cache(config, rows, CAPACITY, dtype)
    _, out = forward(params, config, *causal(tokens, cache))
    return out.cache.advance(jnp.full((rows,), length))


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-5), (jnp.bfloat16, 0.03)])
def test_a_row_does_not_depend_on_width_or_batch(dtype, bound):
    _, config, params = hf_export.build("qwen2")
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    tokens = np.random.default_rng(2).integers(1, config.vocab_size, (8, 6)).astype(np.int32)
    rows = []
    for batch, width in ((1, 1), (1, 2), (1, 6), (8, 6), (8, 1)):
        cache = prefilled(params, config, batch, 5, dtype)
        logits, _ = forward(params, config, *causal(tokens[:batch, :width], cache))
        rows.append(np.asarray(logits[0, 0]))
    for row in rows[1:]:
        assert np.max(np.abs(row - rows[0])) <= bound * np.max(np.abs(rows[0]))


@pytest.mark.parametrize("family", ["gemma3", "mixtral"])
def test_a_tree_equals_each_of_its_paths_run_as_a_sequence(family):
    _, config, params = hf_export.build(family)
    shape = tree_lib.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 1, 0], [0, 1, 1], [0, 1, 1, 0]])
    n, depth = shape.nodes, np.array(shape.depths)
    tokens = np.random.default_rng(4).integers(1, config.vocab_size, (2, n)).astype(np.int32)
    cache = prefilled(params, config, 2, 8)
    cache = cache.replace(lengths=jnp.array([8, 3]))
    parent = jnp.broadcast_to(jnp.array(shape.parent), (2, n))
    visible = Tree(tree_lib.ancestors(parent, jnp.ones((2, n), bool), shape.depth))
    logits, _ = forward(params, config, tokens, cache.lengths[:, None] + depth, cache, visible)
    width = shape.depth + 1
    for node in range(n):
        path = [node]
        while path[0]:
            path.insert(0, shape.parent[path[0]])
        padded = tokens[:, path + [0] * (width - len(path))]
        alone, _ = forward(params, config, *causal(padded, cache))
        np.testing.assert_allclose(logits[:, node], alone[:, len(path) - 1], rtol=0, atol=2e-5)


def test_stale_cache_slots_have_no_influence():
    _, config, params = hf_export.build("gemma3")
    cache = prefilled(params, config, 2, 6)
    cache = cache.replace(lengths=jnp.array([6, 2]))
    tokens = np.array([[5, 6, 7], [8, 9, 10]], np.int32)
    clean, out = forward(params, config, *causal(tokens, cache))
    behind = (jnp.arange(CAPACITY) >= cache.lengths[:, None])[:, None, :, None]
    dirty = cache.replace(layers=jax.tree.map(lambda x: jnp.where(behind, jnp.nan, x), cache.layers))
    assert all(isinstance(layer, KV) for layer in dirty.layers)
    poisoned, _ = forward(params, config, *causal(tokens, dirty))
    np.testing.assert_array_equal(clean, poisoned)
    assert out.cache.lengths.tolist() == [6, 2]


def test_a_donated_step_writes_its_cache_in_place():
    _, config, params = hf_export.build("llama3")
    cache = decoder.init_cache(config, 2, CAPACITY)
    step = jax.jit(
        lambda params, cache, tokens: decoder.forward(params, config, *causal(tokens, cache)).cache,
        donate_argnums=1,
    )
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache.layers)]
    after = step(params, cache, jnp.ones((2, 3), jnp.int32))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(after.layers)] == before


def test_bf16_stays_near_f32():
    _, config, params = hf_export.build("gemma3")
    tokens = np.random.default_rng(5).integers(1, config.vocab_size, (1, 8)).astype(np.int32)
    full, _ = forward(params, config, *causal(tokens, decoder.init_cache(config, 1, CAPACITY)))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    cache = decoder.init_cache(config, 1, CAPACITY, jnp.bfloat16)
    got, out = forward(half, config, *causal(tokens, cache))
    assert got.dtype == jnp.float32
    assert out.hidden.dtype == out.cache.layers[0].k.dtype == jnp.bfloat16
    assert np.max(np.abs(got - full)) < 0.1 * np.max(np.abs(full))


@pytest.mark.parametrize("family", hf_export.FAMILIES)
def test_the_table_describes_the_exported_weights(family):
    _, config, params = hf_export.build(family)
    table = decoder.param_table(config)
    assert jax.tree.structure(table, is_leaf=pytree.is_info) == jax.tree.structure(params)
    assert jax.tree.map(lambda i: i.shape, table, is_leaf=pytree.is_info) == jax.tree.map(np.shape, params)
    random = decoder.init_params(config, jax.random.key(0), jnp.bfloat16)
    assert jax.tree.structure(random) == jax.tree.structure(params)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(random))


def test_boundaries_come_in_the_order_asked_for():
    _, config, params = hf_export.build("llama2")
    args = causal(np.ones((1, 3), np.int32), decoder.init_cache(config, 1, CAPACITY))
    _, out = forward(params, config, *args, aux=(3, 0, 3))
    _, none = forward(params, config, *args)
    assert none.aux is None
    np.testing.assert_array_equal(out.aux[:, :, 0], out.aux[:, :, 2])
    np.testing.assert_allclose(out.aux[:, :, 1], jnp.broadcast_to(params["embed"][1], (1, 3, 32)), rtol=1e-6)
    _, last = forward(params, config, *args, aux=(FINAL, 3))
    np.testing.assert_array_equal(last.aux[:, :, 0], last.hidden)
    np.testing.assert_array_equal(last.aux[:, :, 1], out.aux[:, :, 0])


@pytest.mark.parametrize("aux", [(4,), (-1,), (0, 9), ("last",)])
def test_boundaries_that_do_not_exist_are_refused(aux):
    _, config, params = hf_export.build("llama2")
    args = causal(np.ones((1, 3), np.int32), decoder.init_cache(config, 1, CAPACITY))
    with pytest.raises(ConfigError, match="0 to 3"):
        decoder.forward(params, config, *args, aux=aux)


def test_shapes_that_do_not_fit_are_refused():
    _, config, params = hf_export.build("llama2")
    cache = decoder.init_cache(config, 1, 4)
    tokens, positions, cache, _ = causal(np.ones((1, 3), np.int32), cache)
    for shape in ((1, 2, 3), (1, 3, 4), (2, 3, 3)):
        with pytest.raises(ConfigError, match="visible"):
            decoder.forward(params, config, tokens, positions, cache, Tree(jnp.ones(shape, bool)))
    with pytest.raises(ConfigError, match="4 slots"):
        decoder.forward(params, config, *causal(np.ones((1, 5), np.int32), cache))
