"""The torch decoder against the JAX decoder, family by family, over a ragged cache and a tree."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_cases as cases

from eaglejax.errors import ConfigError
from eaglejax.interop.backends.adapter import get_adapter
from eaglejax.interop.backends.arrays import to_numpy
from eaglejax.interop.convert import export, parts
from eaglejax.interop.convert.tensors import cache_to_torch, to_torch, tree_to_torch
from eaglejax.interop.models import decoder as torch_decoder
from eaglejax.interop.models import layers
from eaglejax.interop.models.specs import from_dict, to_dict
from eaglejax.models import decoder
from eaglejax.models.config import LayerSpec
from eaglejax.nn.cache import Cache
from eaglejax.nn.kv import KV
from eaglejax.nn.rope import RopeConfig, frequencies
from eaglejax.nn.visible import Tree

CPU = get_adapter("torch-cpu")
LENGTHS, NODES, CAPACITY = (9, 4), 5, 16
PARENTS = (0, 0, 0, 1, 3)


def tree_inputs(config, seed=0):
    """(tokens, positions, cache with a random prefix, visible) of one tree a row."""
    rng = np.random.default_rng(seed)
    b = len(LENGTHS)
    tokens = rng.integers(0, config.vocab_size, (b, NODES)).astype(np.int32)
    seen = np.eye(NODES, dtype=bool)
    for node in range(1, NODES):
        seen[node] |= seen[PARENTS[node]]
    lengths = np.asarray(LENGTHS, np.int32)
    positions = (lengths[:, None] + seen.sum(1) - 1).astype(np.int32)
    shape = (b, config.num_kv_heads, CAPACITY, config.head_dim)

    def side():
        return [jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(config.num_layers)]

    return (
        tokens,
        positions,
        Cache(tuple(map(KV, side(), side())), jnp.asarray(lengths)),
        np.broadcast_to(seen, (b, NODES, NODES)),
    )


@functools.partial(jax.jit, static_argnames=("config", "aux"))
def jax_forward(params, config, tokens, positions, cache, visible, aux):
    with jax.default_matmul_precision("highest"):
        out = decoder.forward(params, config, tokens, positions, cache, Tree(visible), aux=aux)
        return decoder.unembed(params, config, out.hidden), out.aux, out.cache


def torch_forward(spec, params, inputs, aux):
    tokens, positions, cache, visible = inputs
    cache = cache_to_torch(cache)
    visible = torch.from_numpy(visible.copy())
    out = torch_decoder.forward(
        CPU, spec, params, torch.from_numpy(tokens), torch.from_numpy(positions), cache, visible, aux=aux
    )
    return torch_decoder.unembed(CPU, spec, params, out.hidden), out.aux, cache


def relative(got, want):
    return float(np.max(np.abs(got - np.asarray(want))) / np.max(np.abs(want)))


QUICK = ("llama_biased", "mixtral", "qwen3_moe", "gemma3", "rotated")
"""Between them these have every setting but the kinds of rope; the others run with the slow tests."""


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in cases.CONFIGS]
)
def test_logits_boundaries_and_the_written_cache_are_those_of_jax(name):
    config = cases.CONFIGS[name]
    target = cases.target(config)
    inputs = tree_inputs(config)
    aux = tuple(range(config.num_layers + 1))
    logits, boundaries, cache = jax_forward(target.params, config, *inputs, aux)
    exported = export.export_target(target)
    spec = from_dict(json.loads(json.dumps(to_dict(exported.spec))))
    assert spec == exported.spec
    got, taps, held = torch_forward(spec, exported.params, inputs, aux)
    assert relative(got.numpy(), logits) < 1e-5
    assert relative(taps.numpy(), boundaries) < 1e-5
    for b, start in enumerate(LENGTHS):
        for mine, theirs in zip(
            (*held.k, *held.v),
            (*(x.k for x in cache.layers), *(x.v for x in cache.layers)),
            strict=True,
        ):
            assert relative(mine[b, :, : start + NODES].numpy(), theirs[b, :, : start + NODES]) < 1e-5
    assert held.lengths.tolist() == list(LENGTHS)


def test_bfloat16_rounds_where_jax_rounds():
    config = cases.CONFIGS["llama_biased"]
    target = cases.target(config, dtype="bfloat16")
    inputs = tree_inputs(config)
    logits, _, _ = jax_forward(target.params, config, *inputs, ())
    exported = export.export_target(target)
    got, _, _ = torch_forward(exported.spec, exported.params, inputs, ())
    assert relative(got.numpy(), logits) < 2e-2
    assert got.dtype == torch.float32


def test_a_broken_token_spoils_those_that_see_it_alone():
    config = cases.LLAMA
    target = cases.target(config)
    exported = export.export_target(target)
    tokens, positions, cache, visible = tree_inputs(config)
    exported.params["embed"] = exported.params["embed"].clone()
    exported.params["embed"][int(tokens[0, 3])] = torch.nan
    tokens[:, [0, 1, 2, 4]] = (tokens[0, 3] + 1) % config.vocab_size
    logits, _, _ = torch_forward(exported.spec, exported.params, (tokens, positions, cache, visible), ())
    # Node 3 is broken and node 4 is its child; nodes 0 to 2 are not below it.
    assert logits[0].isfinite().all(-1).tolist() == [True, True, True, False, False]


def test_what_torch_does_not_compute_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(export, "_DECODER_FIELDS", export._DECODER_FIELDS - {"attention_softcap"})
    with pytest.raises(ConfigError, match=r"does not compute attention_softcap=3\.0"):
        export.decoder_spec(cases.CONFIGS["gemma3"])
    export.decoder_spec(cases.CONFIGS["llama3"])  # a setting that is not in use does no harm
    for layer, said in ((LayerSpec(chunk=6), "sees its chunk"), (LayerSpec(rotary=False), "turns nothing")):
        other = dataclasses.replace(cases.LLAMA, layers=(layer,) * cases.LLAMA.num_layers)
        with pytest.raises(ConfigError, match=said):
            export.decoder_spec(other)
    with pytest.raises(ConfigError, match="does not know 'int8'"):
        parts.cache_dtype("int8")
    with pytest.raises(ConfigError, match="activation 'swish'"):
        layers.activation("swish")


def test_specs_of_another_version_are_refused_with_what_differs():
    data = to_dict(export.decoder_spec(cases.LLAMA))
    with pytest.raises(ConfigError, match=r"lacks \[norm_eps\] and has \[norm_epsilon\]"):
        from_dict({("norm_epsilon" if k == "norm_eps" else k): v for k, v in data.items()})
    with pytest.raises(ConfigError, match="type 'encoder' is not known"):
        from_dict({"type": "encoder"})


def test_rope_frequencies_survive_json_to_the_bit():
    rope = RopeConfig("llama3", 500000.0, 131072, factor=8.0, original_max_position=8192)
    spec = json.loads(json.dumps(dataclasses.asdict(parts.rope_spec(rope, 128))))
    assert np.array_equal(np.asarray(spec["inv_freq"], np.float32), frequencies(rope, 128)[0])


@pytest.mark.parametrize("size", [8, 12, 24, 40])
def test_hadamard_is_the_kernels(size):
    from eaglejax.interop.convert.tensors import hadamard_base
    from kernels_pallas.hadamard import hadamard_matrix

    x = np.random.default_rng(0).normal(size=(3, size)).astype(np.float32)
    want = x @ hadamard_matrix(size) / np.sqrt(size)
    assert np.allclose(layers.hadamard(torch.from_numpy(x), hadamard_base(size)).numpy(), want, atol=1e-6)


def test_greedy_and_top_k_take_the_lower_id_of_equals():
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]])
    assert layers.greedy(x).tolist() == [1]
    values, order = layers.top_k(x, 4)
    assert order.tolist() == [[1, 2, 4, 3]]
    assert values.tolist() == [[3.0, 3.0, 3.0, 2.0]]


@functools.cache
def quantised(bits, activation, groups, offset, smooth, transposed):
    from eaglejax.quant.array import QuantArray
    from kernels_pallas.quant_matmul import pack_int4

    rng = np.random.default_rng(bits + groups)
    limit = 7 if bits == 4 else 127
    integers = jnp.asarray(rng.integers(-limit, limit + 1, (16, 12)), jnp.int8)
    scale = jnp.asarray(rng.uniform(0.01, 0.02, (groups, 12) if groups > 1 else (12,)), jnp.float32)
    return QuantArray(
        values=pack_int4(integers) if bits == 4 else integers,
        scale=scale,
        input_scale=jnp.float32(0.03) if activation == "static" else None,
        input_offset=jnp.float32(7.0) if offset else None,
        smooth=jnp.asarray(rng.uniform(0.5, 2, 16), jnp.float32) if smooth else None,
        bits=bits,
        activation=activation,
        transposed=transposed,
        dtype=np.dtype("float32"),
    )


@pytest.mark.parametrize(
    "scheme",
    [
        (8, "dynamic", 1, False, False, False),
        (8, "dynamic", 4, False, True, False),
        (8, "static", 1, False, False, False),
        (8, "static", 1, True, True, False),
        (4, "dynamic", 1, False, False, False),
        (4, None, 4, False, False, False),
        (8, None, 1, False, False, True),
    ],
    ids=str,
)
def test_packed_products_and_looked_up_rows_are_those_of_jax(scheme):
    weight = quantised(*scheme)
    packed = tree_to_torch(weight)
    assert packed.values.shape == weight.values.shape
    x = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
    want = weight.matmul(jnp.asarray(x), transposed=scheme[-1])
    got = layers.linear(CPU, torch.from_numpy(x), packed, transposed=scheme[-1])
    assert relative(got.numpy(), want) < 1e-5
    if scheme[-1]:
        ids = np.asarray([[3, 0], [11, 3]], np.int32)
        rows = layers.embed(packed, torch.from_numpy(ids))
        assert np.array_equal(rows.numpy(), np.asarray(weight.take(jnp.asarray(ids))))
    else:
        with pytest.raises(ConfigError, match="no rows to look up"):
            layers.embed(packed, torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ConfigError, match="packed for one side"):
        layers.linear(CPU, torch.from_numpy(x), packed, transposed=not scheme[-1])


def test_packed_experts_multiply_their_own_rows_as_in_jax():
    one = quantised(8, "dynamic", 4, False, False, False)
    weight = one.replace(
        values=jnp.stack([one.values, -one.values]), scale=jnp.stack([one.scale, 2 * one.scale])
    )
    x = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    want = weight.grouped_matmul(jnp.asarray(x), jnp.asarray([2, 3], jnp.int32))
    packed = tree_to_torch(weight)
    parts = [
        layers.linear(CPU, torch.from_numpy(rows), layers._expert(packed, i))
        for i, rows in enumerate((x[:2], x[2:]))
    ]
    assert relative(torch.cat(parts).numpy(), want) < 1e-5


def test_a_turned_weight_turns_its_input():
    from eaglejax.quant.online import HadamardInput

    w = jnp.asarray(np.random.default_rng(0).normal(size=(24, 5)), jnp.float32)
    x = np.random.default_rng(1).normal(size=(2, 24)).astype(np.float32)
    want = HadamardInput(w).matmul(jnp.asarray(x), transposed=False)
    got = layers.linear(CPU, torch.from_numpy(x), tree_to_torch(HadamardInput(w)))
    assert relative(got.numpy(), want) < 1e-5


def test_layers_hold_their_shapes_on_the_meta_device():
    target = export.export_target(cases.target())
    layer = {name: w.to("meta") for name, w in target.params["layers"][0].items()}
    x = torch.empty(2, 3, 16, device="meta", dtype=torch.bfloat16)
    for got in (layers.rms_norm(x, layer["mlp_norm"], 1e-6), layers.gated_mlp(CPU, x, layer, "silu")):
        assert (got.shape, got.dtype) == (x.shape, x.dtype)
    angles = layers.rotation(torch.empty(2, 3, device="meta"), target.spec.rope_table[0])
    assert layers.rotate(torch.empty(2, 3, 4, 8, device="meta"), angles).shape == (2, 3, 4, 8)
    assert layers.greedy(torch.empty(2, 3, 32, device="meta")).shape == (2, 3)


def test_a_cache_too_small_is_refused():
    exported = export.export_target(cases.target())
    cache = torch_decoder.init_cache(2, 1, 4, 2, 8, torch.float32, torch.device("cpu"))
    tokens = torch.zeros(1, 5, dtype=torch.int32)
    with pytest.raises(ConfigError, match="5 tokens do not fit a cache of 4"):
        torch_decoder.forward(
            CPU, exported.spec, exported.params, tokens, tokens, cache, torch.ones(1, 5, 5, dtype=torch.bool)
        )


def test_ragged_prompts_are_the_masked_ones():
    """What an adapter reads without padding equals the same chunk under a mask."""
    exported = export.export_target(cases.target())
    count = torch.tensor([5, 0, 3], dtype=torch.int32)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 32, (3, 5)).astype(np.int32))
    ragged = get_adapter("torch-cpu")
    ragged.ragged_prompts = True
    outs = []
    for adapter in (CPU, ragged):
        cache = torch_decoder.init_cache(2, 3, 12, 2, 8, torch.float32, torch.device("cpu"))
        cache.lengths = torch.tensor([2, 4, 0], dtype=torch.int32)
        positions = cache.lengths[:, None] + torch.arange(5, dtype=torch.int32)
        visible = torch_decoder.causal(3, count, 5)
        out = torch_decoder.forward(
            adapter, exported.spec, exported.params, tokens, positions, cache, visible, prompt=count
        )
        outs.append(out.hidden)
    for row, n in enumerate(count.tolist()):
        assert torch.allclose(outs[0][row, :n], outs[1][row, :n], atol=1e-5)


def test_narrow_floats_become_numpy_by_widening():
    x = jnp.asarray([1.5, -2.0], jnp.bfloat16)
    assert to_numpy(to_torch(x)).dtype == np.float32
