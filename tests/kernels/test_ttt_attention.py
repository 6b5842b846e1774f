import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_checks import (
    TPU_TOPOLOGIES,
    compile_for_tpu,
    gpu_simulator,
    lower_for,
    mosaic_gpu,
    shapes_of,
)

from kernels_pallas import KernelError
from kernels_pallas.ttt_attention import ttt_attention


def make_problem(
    *, length, steps, kv_heads=2, group=2, dim=64, batch=2, documents=3, dtype=jnp.float32, seed=0
):
    rng = np.random.default_rng(seed)

    def normal(heads):
        return jnp.asarray(rng.normal(size=(batch, length, heads, dim)), dtype)

    ids = jnp.asarray(np.sort(rng.integers(0, documents, (batch, length)), axis=1), jnp.int32)
    q, grad = normal(kv_heads * group), normal(kv_heads * group)
    return q, [normal(kv_heads) for _ in range(steps)], [normal(kv_heads) for _ in range(steps)], ids, grad


def by_loops(q, keys, values, ids):
    """float64 [B, T, Hq, D]."""
    q, keys, values = (np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64) for x in (q, keys, values))
    out = np.zeros_like(q)
    group = q.shape[2] // keys.shape[3]
    for b, t, h in np.ndindex(*q.shape[:3]):
        seen = [(0, s) for s in range(t + 1) if ids[b, s] == ids[b, t]]
        seen += [(step, t) for step in range(1, len(keys))]
        k = np.array([keys[step, b, s, h // group] for step, s in seen])
        v = np.array([values[step, b, s, h // group] for step, s in seen])
        scores = k @ q[b, t, h] * q.shape[3] ** -0.5
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights @ v / weights.sum()
    return out


def out_and_gradients(problem, **options):
    q, keys, values, ids, grad = problem

    def loss(q, keys, values):
        out = ttt_attention(q, keys, values, document_ids=ids, **options)
        return jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32)), out

    gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, keys, values)
    return out, gradients


def assert_close(got, want, tolerance):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        x, y = np.asarray(x.astype(jnp.float32)), np.asarray(y.astype(jnp.float32))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * max(1.0, np.abs(y).max()))


@pytest.mark.parametrize(("length", "steps"), [(1, 3), (37, 1), (37, 4)])
def test_reference_equals_loops(length, steps):
    q, keys, values, ids, _ = make_problem(length=length, steps=steps)
    want = by_loops(q, keys, values, np.asarray(ids))
    for chunk in (None, 16):
        attend = jax.jit(functools.partial(ttt_attention, implementation="xla", block_q=chunk))
        np.testing.assert_allclose(attend(q, keys, values, document_ids=ids), want, atol=2e-6)


CASES = {
    "packed": {"length": 300, "steps": 3},
    "one short document, one step": {"length": 50, "steps": 1, "documents": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_and_gradients_equal_autodiff_of_the_reference(name):
    problem = make_problem(**CASES[name])
    want = out_and_gradients(problem, implementation="xla")
    got = out_and_gradients(problem, implementation="tpu", interpret=True, block_q=64, block_kv=128)
    assert_close(got, want, 3e-6)


def test_simulated_tpu_sees_no_race_and_no_read_out_of_bounds(tpu_simulator):
    problem = make_problem(length=200, steps=2, batch=1, kv_heads=1)
    got = out_and_gradients(problem, implementation="tpu", interpret=tpu_simulator, block_q=64, block_kv=128)
    assert_close(got, out_and_gradients(problem, implementation="xla"), 3e-6)


def test_bfloat16_gradients():
    problem, want = bfloat16_problem(length=140, steps=2)
    for options in ({"implementation": "xla"}, {"implementation": "tpu", "interpret": True}):
        assert_close(out_and_gradients(problem, **options), want, 3e-2)


def bfloat16_problem(**shapes):
    """A bfloat16 problem, and its output and gradients in float32 rounded once."""
    problem = make_problem(**shapes, dtype=jnp.bfloat16)
    wide = [jax.tree.map(lambda x: x.astype(jnp.float32), x) for x in problem]
    wide[3] = problem[3]
    want = out_and_gradients(tuple(wide), implementation="xla")
    return problem, jax.tree.map(lambda x: x.astype(jnp.bfloat16), want)


GPU_CASES = {
    "packed": {"length": 200, "steps": 3, "batch": 1, "kv_heads": 1},
    "one document, head size 128": {
        "length": 200,
        "steps": 1,
        "documents": 1,
        "dim": 128,
        "batch": 1,
        "group": 1,
    },
}


@pytest.mark.parametrize("name", GPU_CASES)
def test_simulated_gpu_kernels_equal_autodiff_of_the_reference_and_race_nowhere(name):
    simulator = gpu_simulator()
    problem, want = bfloat16_problem(**GPU_CASES[name])
    assert_close(out_and_gradients(problem, implementation="gpu", interpret=simulator), want, 1e-2)


def test_documents_do_not_see_each_other():
    q, keys, values, _, _ = make_problem(length=160, steps=2, batch=1)
    ids = jnp.repeat(jnp.arange(2, dtype=jnp.int32), 80)[None]
    for implementation in ("xla", "tpu"):
        attend = jax.jit(functools.partial(ttt_attention, implementation=implementation))
        packed = attend(q, keys, values, document_ids=ids)
        alone = attend(q[:, 80:], [k[:, 80:] for k in keys], [v[:, 80:] for v in values])
        np.testing.assert_allclose(packed[:, 80:], alone, atol=1e-6)


def check_random(seed, length, steps, kv_heads, group, dim, documents):
    problem = make_problem(
        seed=seed,
        length=length,
        steps=steps,
        kv_heads=kv_heads,
        group=group,
        dim=dim,
        documents=documents,
        batch=1,
    )
    got = out_and_gradients(problem, implementation="tpu", interpret=True, block_q=32, block_kv=128)
    assert_close(got, out_and_gradients(problem, implementation="xla", block_q=64), 5e-6)


test_many_random_problems = pytest.mark.slow(
    settings(max_examples=25, deadline=None, phases=[Phase.generate])(
        given(
            seed=st.integers(0, 10**6),
            length=st.integers(1, 300),
            steps=st.integers(1, 4),
            kv_heads=st.integers(1, 2),
            group=st.integers(1, 4),
            dim=st.sampled_from([64, 80, 96, 128, 256]),
            documents=st.integers(1, 6),
        )(check_random)
    )
)


def gradient(q, keys, values, ids, implementation="tpu"):
    def loss(q, keys, values):
        out = ttt_attention(q, keys, values, document_ids=ids, implementation=implementation, interpret=False)
        return jnp.sum(out.astype(jnp.float32))

    return jax.grad(loss, (0, 1, 2))(q, keys, values)


def training_shapes(batch=1, length=2048, heads=32, kv_heads=8, dim=128, steps=3, dtype="bfloat16"):
    kv = [jax.ShapeDtypeStruct((batch, length, kv_heads, dim), dtype)] * steps
    return (
        jax.ShapeDtypeStruct((batch, length, heads, dim), dtype),
        kv,
        kv,
        jax.ShapeDtypeStruct((batch, length), jnp.int32),
    )


def test_lowers_for_tpu():
    assert lower_for("tpu", gradient, *training_shapes()).count("tpu_custom_call") >= 3


@pytest.mark.parametrize("dim", [64, 128])
def test_lowers_for_gpu(dim):
    mosaic_gpu()
    lowered = lower_for("cuda", functools.partial(gradient, implementation="gpu"), *training_shapes(dim=dim))
    assert lowered.count("stablehlo.custom_call @mosaic_gpu") == 3


@pytest.mark.parametrize("generation", TPU_TOPOLOGIES)
def test_compiles_for_tpu(generation):
    compile_for_tpu(generation, gradient, *training_shapes(length=512))


@pytest.mark.slow
def test_compiled_memory_is_linear_in_length():
    sizes = [
        compile_for_tpu("v5e", gradient, *training_shapes(length=n)).memory_analysis().temp_size_in_bytes
        for n in (2048, 8192)
    ]
    assert sizes[1] < 4.5 * sizes[0]


@pytest.mark.slow
@pytest.mark.parametrize("generation", TPU_TOPOLOGIES)
@pytest.mark.parametrize(
    "shapes",
    [
        {"dtype": "float32"},
        {"dim": 64, "heads": 16, "kv_heads": 16, "steps": 1},
        {"dim": 80, "heads": 8, "kv_heads": 1},
        {"dim": 96, "heads": 9, "kv_heads": 3, "length": 300},
        {"dim": 256, "heads": 16},
        {"heads": 32, "kv_heads": 1, "length": 300},
    ],
)
def test_compiles_for_tpu_in_every_variant(generation, shapes):
    compile_for_tpu(generation, gradient, *training_shapes(**shapes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": []}, "one array a step"),
        ({"implementation": "rocm"}, r"no implementation 'rocm' .* \['xla', 'tpu'\]"),
        ({"implementation": "gpu"}, "takes bfloat16, not float32"),
        ({"implementation": "tpu", "block_kv": 100}, "multiple of 128"),
        ({"implementation": "tpu", "block_q": 24}, "divides block_kv"),
        ({"document_ids": jnp.zeros((2, 9), jnp.int32)}, "document_ids must be int32"),
        ({"q": jnp.zeros((2, 8, 3, 64))}, "not a multiple"),
        ({"q": jnp.zeros((2, 8, 4, 64), jnp.float16)}, "expected float32 or bfloat16"),
        ({"values": [jnp.zeros((2, 8, 2, 32))] * 2}, r"values\[0\] must be"),
    ],
)
def test_refuses_by_name(change, message):
    q, keys, values, ids, _ = make_problem(length=8, steps=2)
    arguments = {"q": q, "keys": keys, "values": values, "document_ids": ids} | change
    with pytest.raises(KernelError, match=message):
        ttt_attention(**arguments)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ({"dim": 96}, {}, "head sizes 64 and 128, not 96"),
        ({}, {"block_q": 128}, "64 tokens at a time, not block_q 128"),
    ],
)
def test_gpu_kernels_refuse_by_name(shapes, options, message):
    q, keys, values, ids, _ = make_problem(length=8, steps=2, dtype=jnp.bfloat16, **shapes)
    with pytest.raises(KernelError, match=message):
        ttt_attention(q, keys, values, document_ids=ids, implementation="gpu", **options)


def test_shapes_of_gradients():
    problem = make_problem(length=20, steps=2, dtype=jnp.bfloat16)
    _, gradients = jax.eval_shape(functools.partial(out_and_gradients, implementation="tpu"), problem)
    assert shapes_of(gradients) == shapes_of(tuple(problem[:3]))
