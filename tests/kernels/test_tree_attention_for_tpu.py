"""Tree attention lowers and compiles for TPUs, at the sizes of serving, without a copy of the cache."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from kernel_checks import (
    TPU_TOPOLOGIES,
    compile_for_tpu,
    compile_for_tpus,
    lower_for,
    shapes_of,
)
from tree_cases import CASES, make_case, split

from kernels_pallas.tree_attention import merge, tree_attention


@pytest.mark.parametrize("name", CASES)
def test_lowers_for_tpu(name):
    case = make_case(**CASES[name])
    arrays, statics = split(case.options)
    lowered = lower_for(
        "tpu",
        lambda args, arrays: tree_attention(
            *args, **arrays, **statics, implementation="tpu", interpret=False
        ),
        shapes_of(case.args),
        shapes_of(arrays),
    )
    assert "tpu_custom_call" in lowered


def serving_shapes(
    batch=4, nodes=64, heads=32, kv_heads=8, dim=128, slots=8192, dtype="bfloat16", cache=None, page=None
):
    cache = jnp.dtype(cache or dtype)
    kv = jax.ShapeDtypeStruct((512, kv_heads, page, dim) if page else (batch, kv_heads, slots, dim), cache)
    words = jax.ShapeDtypeStruct((batch, nodes, -(-nodes // 32)), jnp.int32)
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
    arrays = {}
    if cache == jnp.int8:
        arrays = dict.fromkeys(("k_scale", "v_scale"), jax.ShapeDtypeStruct(kv.shape[:3], jnp.float32))
    if page:
        arrays["block_tables"] = jax.ShapeDtypeStruct((batch, slots // page), jnp.int32)
    return (jax.ShapeDtypeStruct((batch, nodes, heads, dim), dtype), kv, kv, words, lengths), arrays


def compile_serving(generation, shapes, **options):
    return compile_for_tpu(
        generation,
        lambda args, arrays: tree_attention(
            *args, **arrays, **options, implementation="tpu", interpret=False
        ),
        *serving_shapes(**shapes),
    )


@pytest.mark.parametrize("generation", TPU_TOPOLOGIES)
def test_compiles_for_tpu(generation):
    compiled = compile_serving(generation, {"cache": "int8"})
    analysis = compiled.memory_analysis()
    cache_bytes = 2 * 4 * 8 * 8192 * (128 + 4)
    # The cache is an argument, and no copy of it is made.
    assert analysis.argument_size_in_bytes >= cache_bytes
    assert analysis.temp_size_in_bytes < cache_bytes / 4


def test_no_copy_of_a_cache_that_fits_vmem_is_made_before_the_kernel():
    text = compile_serving("v7x", {"batch": 1}).as_text()
    cache = "bf16[1,8,8192,128]"
    assert cache in text
    copies = [
        line for line in text.splitlines() if cache in line and (" copy(" in line or " copy-start(" in line)
    ]
    assert not copies


def test_compiles_over_four_chips_by_heads_and_by_cache_slots():
    shapes, _ = serving_shapes()
    q, kv = P(None, None, "heads"), P(None, "heads", "slots")

    def make_function(mesh):
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(q, kv, kv, P(), P()), out_specs=q, check_vma=False
        )
        def attend(q, k, v, words, lengths):
            offset = lax.axis_index("slots") * k.shape[2]
            part = tree_attention(
                q,
                k,
                v,
                words,
                lengths,
                slot_offset=offset,
                out_dtype=jnp.float32,
                implementation="tpu",
                interpret=False,
            )
            return merge(*(lax.all_gather(x, "slots") for x in part))[0].astype(q.dtype)

        return attend

    program = compile_for_tpus("v5e", {"heads": 2, "slots": 2}, make_function, shapes, (q, kv, kv, P(), P()))
    text = program.as_text()
    assert "all-gather" in text
    # The cache stays where it is: no collective moves anything as large as a shard of it.
    assert program.memory_analysis().temp_size_in_bytes < 4 * 4 * 8192 * 128 * 2 / 4


@pytest.mark.slow
@pytest.mark.parametrize("generation", TPU_TOPOLOGIES)
@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ({"dtype": "float32"}, {}),
        ({"cache": "float8_e4m3fn"}, {}),
        ({"cache": "float8_e5m2"}, {}),
        ({}, {"window": 1024, "softcap": 30.0}),
        ({"page": 128}, {}),
        ({"page": 16, "cache": "int8"}, {}),
        ({"dim": 64}, {}),
        ({"dim": 80}, {}),
        ({"dim": 96}, {}),
        ({"dim": 256, "heads": 16}, {}),
        ({"slots": 700}, {}),
        ({"nodes": 1}, {}),
        ({"nodes": 128, "heads": 16, "kv_heads": 1}, {}),
    ],
)
def test_compiles_for_tpu_in_every_variant(generation, shapes, options):
    compile_serving(generation, shapes, **options)
