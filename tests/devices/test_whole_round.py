"""A decode round with the kernel in it lowers for devices that are not there, and compiles for a TPU."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kernel_checks import TPU_TOPOLOGIES, compile_for_tpu, lower_for, shapes_of, tpu_topology

from eaglejax import devices, pytree, sampling
from eaglejax.devices import Attention
from eaglejax.drafts.ngram import NGram
from eaglejax.models import decoder, memory
from eaglejax.models.config import ModelConfig
from eaglejax.nn.attention import attend
from eaglejax.nn.attention_implementations import MOST_ROWS
from eaglejax.nn.rope import RopeConfig
from eaglejax.nn.visible import Seen
from eaglejax.sampling import Sampling
from eaglejax.speculate import rounds

CONFIG = ModelConfig(
    family="llama",
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    max_position=512,
    rope=RopeConfig(),
    query_scale=128**-0.5,
)


def a_round(kernel, *, batch=2, capacity=256):
    """A bfloat16 decode round with a chain of seven guesses, and the shapes of its arguments."""
    config = CONFIG
    program = rounds.Program(config, NGram(length=7), attention=Attention(kernel, interpret=False))
    params = rounds.Params(pytree.abstract(decoder.param_table(config, jnp.bfloat16)))
    rows = sampling.rows([Sampling(seed=0)] * batch, config.vocab_size, [[1]] * batch)
    state = jax.eval_shape(
        functools.partial(rounds.init_state, program, capacity=capacity, cache_dtype=jnp.dtype("bfloat16")),
        params,
        rows,
        budget=jnp.full((batch,), 9, jnp.int32),
        eos=jnp.zeros((1,), jnp.int32),
    )
    # Keys travel as their words, because exported functions take plain arrays.
    words = jax.eval_shape(jax.random.key_data, state.rows.keys)
    plain = dataclasses.replace(state, rows=dataclasses.replace(state.rows, keys=words))

    def run(params, state):
        keys = jax.random.wrap_key_data(state.rows.keys)
        state = dataclasses.replace(state, rows=dataclasses.replace(state.rows, keys=keys))
        state, record = rounds.decode_round(program, params, state)
        keys = jax.random.key_data(state.rows.keys)
        return dataclasses.replace(state, rows=dataclasses.replace(state.rows, keys=keys)), record

    return run, params, plain


@pytest.mark.parametrize(
    ("platform", "kernel", "call"), [("tpu", "tpu", "tpu_custom_call"), ("cuda", "gpu", "mosaic_gpu")]
)
def test_a_decode_round_lowers_with_the_kernel(platform, kernel, call):
    if kernel == "gpu":
        pytest.importorskip("absl")
    run, params, state = a_round(kernel)
    text = lower_for(platform, run, shapes_of(params), shapes_of(state))
    assert text.count(call) >= CONFIG.num_layers


def test_a_decode_round_compiles_for_a_tpu_as_counted_by_hand():
    batch, capacity, nodes = 4, 1024, 8
    run, params, state = a_round("tpu", batch=batch, capacity=capacity)
    mesh = Mesh(np.array(tpu_topology("v5e").devices[:1]), ("x",))
    placed = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, PartitionSpec())),
        shapes_of((params, state)),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jax.jit(run, donate_argnums=1).lower(*placed).compile()
    analysis = compiled.memory_analysis()
    hand = memory.footprint(
        CONFIG,
        1 << 34,
        weight_dtype="bfloat16",
        cache_dtype="bfloat16",
        nodes=nodes,
        prefill=nodes,
        scores=False,
    )
    cache = batch * capacity * hand.per_token
    assert hand.weights + cache < analysis.argument_size_in_bytes < 1.02 * (hand.weights + cache)
    # The cache is updated where it lies.
    assert analysis.alias_size_in_bytes >= cache
    assert analysis.temp_size_in_bytes < cache / 2
    assert "tpu_custom_call" in compiled.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("generation", TPU_TOPOLOGIES)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("nodes", [1, 16, 64, 256, 512])
def test_every_block_of_the_rule_compiles(generation, dim, nodes):
    kind = TPU_TOPOLOGIES[generation][1]
    adapter = devices.choose(SimpleNamespace(platform="tpu", device_kind=kind))
    batch, heads, kv_heads, slots = 2, 16, 4, 8192
    block = adapter.block_kv(head_dim=dim, dtype="bfloat16", rows=min(nodes * heads // kv_heads, MOST_ROWS))
    cache = jax.ShapeDtypeStruct((batch, kv_heads, slots, dim), jnp.bfloat16)
    attention = Attention("tpu", interpret=False, block_kv=block)
    compile_for_tpu(
        generation,
        lambda q, k, v, lengths, seen, positions: attend(
            q, k, v, lengths, Seen(seen), positions, scale=0.1, implementation=attention
        ),
        jax.ShapeDtypeStruct((batch, nodes, heads, dim), jnp.bfloat16),
        cache,
        cache,
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        jax.ShapeDtypeStruct((batch, nodes, nodes), bool),
        jax.ShapeDtypeStruct((batch, nodes), jnp.int32),
    )
