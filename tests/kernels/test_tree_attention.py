import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_checks import (
    gpu_simulator,
    lower_for,
    mosaic_gpu,
    shapes_of,
)
from tree_cases import CASES, ancestor_matrix, close, make_case, naive, random_parents, run, split

from kernels_pallas import KernelError
from kernels_pallas.tree_attention import merge, pack_ancestors, tree_attention, unpack_ancestors


@pytest.mark.parametrize("nodes", [1, 31, 32, 33, 64, 70])
def test_ancestor_words_round_trip(nodes):
    matrix = ancestor_matrix(random_parents(np.random.default_rng(nodes), 2, nodes))
    words = pack_ancestors(jnp.asarray(matrix))
    assert words.shape == (2, nodes, -(-nodes // 32))
    np.testing.assert_array_equal(unpack_ancestors(words, nodes), matrix)
    by_hand = sum(int(matrix[1, -1, j]) << j for j in range(min(nodes, 32)))
    assert int(np.uint32(np.asarray(words)[1, -1, 0])) == by_hand


@pytest.mark.parametrize("name", CASES)
def test_reference_equals_loops(name):
    case = make_case(**CASES[name])
    case.options.pop("block_kv", None)
    out, lse = run(case, implementation="xla")
    want_out, want_lse = naive(case)
    close(out, want_out, 2e-5)
    close(lse, want_lse, 2e-5)


@pytest.mark.parametrize(
    ("name", "simulator"),
    [(name, "generic") for name in CASES]
    + [("window", "tpu"), ("paged window int8", "tpu"), ("two words", "tpu")],
)
def test_tpu_kernel_equals_loops(name, simulator, tpu_simulator):
    case = make_case(**CASES[name])
    out, lse = run(case, implementation="tpu", interpret=True if simulator == "generic" else tpu_simulator)
    want_out, want_lse = naive(case)
    close(out, want_out, 2e-5)
    close(lse, want_lse, 2e-5)


@pytest.mark.parametrize(
    ("cache_dtype", "tolerance"), [(jnp.bfloat16, 2e-2), (jnp.float8_e4m3fn, 2e-2), (jnp.float8_e5m2, 2e-2)]
)
def test_bfloat16_queries_over_narrow_caches(cache_dtype, tolerance):
    case = make_case(lengths=[70, 129], dtype=jnp.bfloat16, cache_dtype=cache_dtype, slots=256)
    want_out, want_lse = naive(case)
    for implementation in ("xla", "tpu"):
        out, lse = run(case, implementation=implementation)
        assert out.dtype == jnp.bfloat16
        assert lse.dtype == jnp.float32
        close(out, want_out, tolerance)
        close(lse, want_lse, tolerance)


def test_all_ones_values_give_exactly_one_around_every_block_edge():
    nodes, block = 7, 128
    edges = [e + d for e in (0, block, 2 * block) for d in range(-nodes - 1, 2)]
    lengths = [length for length in edges if 0 <= length <= 300 - nodes]
    case = make_case(lengths=lengths, nodes=nodes, kv_heads=1, group=1, slots=300)
    q, k, _, words, length = case.args
    ones = jnp.where(jnp.isnan(case.args[2]), jnp.nan, 1.0)
    for implementation in ("xla", "tpu"):
        block_kv = {"block_kv": block} if implementation == "tpu" else {}
        attend = jax.jit(functools.partial(tree_attention, implementation=implementation, **block_kv))
        out, _ = attend(q, k, ones, words, length)
        np.testing.assert_allclose(out, 1.0, rtol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "tpu"])
def test_shards_of_prefix_and_tree_merge_to_the_whole(implementation):
    case = make_case(lengths=[200, 5, 129], slots=256, window=70)
    whole, whole_lse = run(case, implementation="xla")
    depth = jnp.asarray(ancestor_matrix(case.parents).sum(-1) - 1)

    @jax.jit
    def merged(q, k, v, words, lengths):
        attend = functools.partial(
            tree_attention,
            q,
            positions=lengths[:, None] + depth,
            window=70,
            implementation=implementation,
            out_dtype=jnp.float32,
        )
        halves = [(k[:, :, s : s + 128], v[:, :, s : s + 128], s) for s in (0, 128)]
        slots = (lengths[:, None] + jnp.arange(q.shape[1]))[:, None, :, None]
        tree = [jnp.take_along_axis(x, slots, axis=2) for x in (k, v)]
        prefix_and_tree = [attend(k, v, None, lengths, slot_offset=s) for k, v, s in halves]
        prefix_and_tree.append(attend(*tree, words, jnp.zeros_like(lengths)))
        shards = [attend(k, v, words, lengths, slot_offset=s) for k, v, s in halves]
        return [merge(*(jnp.stack(x) for x in zip(*p, strict=True))) for p in (prefix_and_tree, shards)]

    for out, lse in merged(*case.args):
        close(out, whole, 2e-6)
        close(lse, whole_lse, 2e-6)


@pytest.mark.parametrize("implementation", ["xla", "tpu"])
def test_a_node_that_sees_nothing_gives_zeros_and_minus_infinity(implementation):
    case = make_case(lengths=[0, 0], nodes=3)

    @jax.jit
    def attend(q, k, v, words, lengths):
        blind = tree_attention(q, k, v, words.at[:, 1].set(0), lengths, implementation=implementation)
        empty = tree_attention(q, k, v, None, lengths, implementation=implementation)
        return blind, empty, merge(*(jnp.stack([x, x]) for x in empty))

    blind, empty, merged = attend(*case.args)
    assert not blind[0][:, 1].any()
    assert (blind[1][:, 1] == -jnp.inf).all()
    assert jnp.isfinite(blind[0]).all()
    for out, lse in (empty, merged):
        assert not out.any()
        assert (lse == -jnp.inf).all()


GPU_CASES = {
    "plain": {"lengths": [0, 131, 255]},
    "window and softcap": {"lengths": [3, 200], "window": 20, "softcap": 2.0},
    "int8, window": {"lengths": [150, 60], "cache_dtype": jnp.int8, "window": 90},
    "fp8": {"lengths": [70], "cache_dtype": jnp.float8_e4m3fn},
    "paged": {"lengths": [90, 0], "page": 64, "slots": 192},
    "two words, head size 128": {"lengths": [120], "nodes": 40, "group": 1, "dim": 128},
    "head size 256, two tiles": {"lengths": [60], "nodes": 12, "kv_heads": 1, "dim": 256, "slots": 128},
    "split four ways": {"lengths": [1000, 70], "kv_heads": 1, "slots": 1024},
}


@pytest.mark.parametrize("name", GPU_CASES)
def test_simulated_gpu_kernel_equals_loops(name):
    case = make_case(**({"dtype": jnp.bfloat16, "slots": 320} | GPU_CASES[name]))
    out, lse = run(case, implementation="gpu", interpret=gpu_simulator())
    want_out, want_lse = naive(case)
    close(out, want_out, 2e-2)
    close(lse, want_lse, 5e-3)


@pytest.mark.parametrize("name", GPU_CASES)
def test_lowers_for_gpu(name):
    mosaic_gpu()
    case = make_case(**({"dtype": jnp.bfloat16, "slots": 320} | GPU_CASES[name]))
    arrays, statics = split(case.options)
    lowered = lower_for(
        "cuda",
        lambda args, arrays: tree_attention(
            *args, **arrays, **statics, implementation="gpu", interpret=False
        ),
        shapes_of(case.args),
        shapes_of(arrays),
    )
    assert "mosaic_gpu" in lowered


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"dtype": jnp.float32}, "takes bfloat16 and float16 queries"),
        ({"dim": 80}, "multiple of 64"),
        ({"page": 32}, "pages of a multiple of 64"),
        ({"slots": 300}, "caches of a multiple of 64"),
        ({"cache_dtype": jnp.float32}, "query's dtype or of 8 bits"),
    ],
)
def test_gpu_kernel_refuses_by_name(shapes, message):
    case = make_case(lengths=[20], **({"dtype": jnp.bfloat16, "slots": 320} | shapes))
    with pytest.raises(KernelError, match=message):
        tree_attention(*case.args, **case.options, implementation="gpu", interpret=False)


def test_gpu_kernel_has_one_block_size():
    case = make_case(lengths=[20], dtype=jnp.bfloat16, slots=320)
    with pytest.raises(KernelError, match="handles 64 slots"):
        run(case, implementation="gpu", interpret=False, block_kv=128)


def test_interpreting_the_gpu_kernel_is_refused_where_jax_cannot():
    if hasattr(mosaic_gpu(), "InterpretGPUParams"):
        pytest.skip("this jax simulates Mosaic GPU kernels")
    case = make_case(lengths=[20], dtype=jnp.bfloat16, slots=320)
    with pytest.raises(KernelError, match=r"interpreted by jax 0\.12 or later"):
        run(case, implementation="gpu")


def check_random_case(seed, nodes, kv_heads, group, dim, lengths, kind, window, softcap):
    options = {
        "float32": {},
        "int8": {"cache_dtype": jnp.int8},
        "paged": {"page": 64},
        "bfloat16": {"dtype": jnp.bfloat16},
    }[kind]
    case = make_case(
        seed=seed, nodes=nodes, kv_heads=kv_heads, group=group, dim=dim, lengths=lengths, slots=320, **options
    )
    case.options |= {"window": window, "softcap": softcap}
    want_out, want_lse = naive(case)
    tolerance = 3e-2 if kind == "bfloat16" else 5e-5
    for implementation in ("xla", "tpu"):
        out, lse = run(case, implementation=implementation)
        close(out, want_out, tolerance)
        close(lse, want_lse, tolerance)


random_cases = given(
    seed=st.integers(0, 10**6),
    nodes=st.integers(1, 66),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 5),
    dim=st.sampled_from([64, 80, 96, 128, 256]),
    lengths=st.lists(st.integers(0, 254), min_size=1, max_size=3),
    kind=st.sampled_from(["float32", "int8", "paged", "bfloat16"]),
    window=st.none() | st.integers(1, 200),
    softcap=st.none() | st.floats(1.0, 50.0),
)
test_random_cases = settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate])(
    random_cases(check_random_case)
)
test_many_random_cases = pytest.mark.slow(
    settings(max_examples=60, deadline=None, phases=[Phase.generate])(random_cases(check_random_case))
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "cuda"}, "no implementation 'cuda'"),
        ({"implementation": "xla", "interpret": True}, "interpret applies"),
        ({"implementation": "tpu", "block_kv": 100}, "multiple of 128"),
        ({"window": 0}, "window must be positive"),
        ({"k_scale": jnp.ones((1, 2, 300))}, "come together"),
        ({"positions": jnp.zeros((1, 9), jnp.int32)}, "positions must be"),
        ({"ancestors": None, "window": 4}, "needs positions"),
        ({"ancestors": jnp.zeros((1, 10, 2), jnp.int32)}, "from pack_ancestors"),
        ({"k": jnp.zeros((1, 4, 300, 64))}, "must be alike"),
        ({"q": jnp.zeros((1, 10, 5, 64))}, "not a multiple"),
        ({"q": jnp.zeros((1, 10, 6, 32))}, "head size"),
        ({"q": jnp.zeros((1, 10, 6, 64), jnp.int32)}, "expected one of"),
        (
            {"k": jnp.zeros((1, 2, 300, 64), jnp.int8), "v": jnp.zeros((1, 2, 300, 64), jnp.int8)},
            "needs k_scale",
        ),
    ],
)
def test_refuses_by_name(change, message):
    case = make_case(lengths=[20])
    arguments = dict(zip(("q", "k", "v", "ancestors", "lengths"), case.args, strict=True)) | change
    with pytest.raises(KernelError, match=message):
        tree_attention(**arguments)


def test_float16_is_refused_by_the_tpu_kernel_alone():
    case = make_case(lengths=[20], dtype=jnp.float16)
    with pytest.raises(KernelError, match=r"not float16; these arguments run on \['xla'"):
        run(case, implementation="tpu")
    close(run(case)[0], naive(case)[0], 5e-3)
