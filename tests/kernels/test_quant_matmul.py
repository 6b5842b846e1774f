import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import (
    TPU_TOPOLOGIES,
    compile_for_tpu,
    gpu_simulator,
    lower_for,
    mosaic_gpu,
    shapes_of,
)

from kernels_pallas import KernelError
from kernels_pallas.quant_matmul import pack_int4, quant_matmul, quantize_per_token, unpack_int4
from kernels_pallas.quant_matmul.tpu import quant_matmul_tpu

FORMS = {
    "W8A8": {"weight_bits": 8, "integer": True},
    "W4A8": {"weight_bits": 4, "integer": True},
    "W4A8 grouped": {"weight_bits": 4, "integer": True, "groups": 4},
    "W8A8 grouped": {"weight_bits": 8, "integer": True, "groups": 8},
    "W4A16 grouped": {"weight_bits": 4, "integer": False, "groups": 4},
    "W4A16": {"weight_bits": 4, "integer": False},
    "W8A16": {"weight_bits": 8, "integer": False},
}


def make_problem(*, weight_bits, integer, groups=None, rows=10, k=512, n=300, dtype=jnp.float32, seed=0):
    """Arguments of `quant_matmul`, and the float64 product."""
    rng = np.random.default_rng(seed)
    limit = 2 ** (weight_bits - 1)
    w = rng.integers(-limit, limit, (k, n)).astype(np.int8)
    w_scale = rng.uniform(0.5, 1.5, (groups, n) if groups else (n,)).astype(np.float32) / limit
    x = jnp.asarray(rng.normal(size=(rows, k)), dtype)
    arguments = {
        "w": pack_int4(jnp.asarray(w)) if weight_bits == 4 else jnp.asarray(w),
        "w_scale": jnp.asarray(w_scale),
    }
    exact_x = np.asarray(x.astype(jnp.float32), np.float64)
    if integer:
        x, x_scale = quantize_per_token(x)
        arguments["x_scale"] = x_scale
        exact_x = np.asarray(x, np.float64) * np.asarray(x_scale, np.float64)[:, None]
    exact_w = w.astype(np.float64) * np.repeat(
        w_scale.astype(np.float64).reshape(-1, n), k // (groups or 1), axis=0
    )
    return {"x": x} | arguments, exact_x @ exact_w


def multiply(arguments, **options):
    return jax.jit(functools.partial(quant_matmul, **options))(**arguments)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("implementation", ["xla", "tpu"])
def test_equals_the_dequantised_product(form, implementation):
    arguments, want = make_problem(**FORMS[form])
    got = multiply(arguments, implementation=implementation, out_dtype=jnp.float32)
    np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())


def test_integer_sums_are_exact_beyond_float32():
    k = 4096
    x = jnp.full((1, k), 127, jnp.int8).at[0, 0].set(126)
    w = jnp.full((k, 128), 127, jnp.int8)
    want = 127 * (127 * (k - 1) + 126)
    assert want > 2**24
    assert want % 2 == 1
    # Scaled below 2^24 in a power of two, an odd sum keeps its last bit only if it was summed exactly.
    for implementation in ("xla", "tpu"):
        got = multiply(
            {"x": x, "w": w, "w_scale": jnp.ones(128), "x_scale": jnp.ones(1)},
            implementation=implementation,
            out_dtype=jnp.float32,
        )
        np.testing.assert_array_equal(got, np.float32(want))


@pytest.mark.parametrize("form", ["W8A8", "W4A8 grouped"])
def test_integer_products_in_bfloat16_are_the_same(form):
    arguments, _ = make_problem(**FORMS[form], k=2048, n=128)
    groups = arguments["w_scale"].reshape(-1, 128)
    int8, bfloat16 = (
        quant_matmul_tpu(
            arguments["x"],
            arguments["x_scale"],
            arguments["w"],
            groups,
            packed=form.startswith("W4"),
            out_dtype=jnp.dtype("float32"),
            int8=int8,
            interpret=True,
        )
        for int8 in (True, False)
    )
    np.testing.assert_array_equal(int8, bfloat16)


def test_activations_too_large_to_stay_in_vmem():
    arguments, want = make_problem(**FORMS["W4A16 grouped"], rows=256, k=4096, n=128)
    got = multiply(arguments, implementation="tpu")
    np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())


def test_bfloat16_activations():
    arguments, want = make_problem(**FORMS["W4A16 grouped"], dtype=jnp.bfloat16)
    for implementation in ("xla", "tpu"):
        got = multiply(arguments, implementation=implementation)
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(jnp.float32), want, atol=1.5e-2 * np.abs(want).max())


@pytest.mark.parametrize("form", ["W8A8", "W4A16 grouped"])
def test_simulated_tpu_sees_no_race_and_no_read_out_of_bounds(form, tpu_simulator):
    arguments, want = make_problem(**FORMS[form], rows=3, n=256)
    got = multiply(arguments, implementation="tpu", interpret=tpu_simulator, out_dtype=jnp.float32)
    np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())


GPU_PROBLEM = {"dtype": jnp.bfloat16, "k": 1024, "n": 128}


# The others recombine what these have: widening of 8 or 4 bits, sums that are scaled once or by group.
GPU_FORMS = ["W8A8", "W4A8 grouped", "W4A16 grouped", "W8A16"]


@pytest.mark.parametrize(
    "form",
    [*GPU_FORMS, *(pytest.param(f, marks=pytest.mark.slow) for f in FORMS if f not in GPU_FORMS)],
)
def test_simulated_gpu_kernel_equals_the_dequantised_product(form):
    simulator = gpu_simulator()
    arguments, want = make_problem(**(FORMS[form] | GPU_PROBLEM))
    got = multiply(arguments, implementation="gpu", interpret=simulator, out_dtype=jnp.float32)
    np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())


def test_simulated_gpu_kernel_takes_more_rows_than_a_tile():
    simulator = gpu_simulator()
    arguments, want = make_problem(**(FORMS["W4A16 grouped"] | GPU_PROBLEM | {"rows": 70, "n": 64, "k": 512}))
    got = multiply(arguments, implementation="gpu", interpret=simulator, out_dtype=jnp.float32)
    np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize("packed", [False, True])
def test_gpu_sums_of_integers_as_bfloat16_are_exact(packed):
    mosaic_gpu()
    from kernels_pallas.quant_matmul.hopper import unit_rows

    # A unit's products, at most 2^14 each, sum to at most 2^24, up to which float32 holds every integer.
    terms_per_row = 2 if packed else 1
    for stored in range(64, 16384 + 64, 64):
        rows = unit_rows(stored, terms_per_row)
        assert stored % rows == 0
        assert rows * terms_per_row * 2**14 <= 2**24

    k = 2048
    x = jnp.full((1, k), -128, jnp.int8).at[0, 0].set(-127)
    w = jnp.full((k, 64), -8 if packed else -128, jnp.int8)
    w = w.at[0].set(-7 if packed else -127)
    want = np.asarray(x, np.int64) @ np.asarray(w, np.int64)
    assert want[0, 0] % 2 == 1
    got = multiply(
        {
            "x": x,
            "w": pack_int4(w) if packed else w,
            "w_scale": jnp.ones(64),
            "x_scale": jnp.ones(1),
        },
        implementation="gpu",
        interpret=gpu_simulator(),
        out_dtype=jnp.float32,
    )
    np.testing.assert_array_equal(got, want.astype(np.float32))


@pytest.mark.parametrize(
    ("form", "dtype"), [*((form, "bfloat16") for form in FORMS), ("W4A16 grouped", "float16")]
)
def test_lowers_for_gpu(form, dtype):
    mosaic_gpu()
    lowered = lower_for(
        "cuda",
        lambda arguments: quant_matmul(**arguments, implementation="gpu", interpret=False),
        serving_shapes(FORMS[form], dtype=dtype),
    )
    assert "mosaic_gpu" in lowered


@pytest.mark.parametrize(
    ("form", "problem", "message"),
    [
        ("W8A16", {"dtype": jnp.float32}, "takes int8, bfloat16 and float16 activations, not float32"),
        (
            "W4A16 grouped",
            {"dtype": jnp.bfloat16, "k": 256},
            "4-bit groups of a multiple of 128 rows, got 64",
        ),
        ("W8A8 grouped", {"k": 256}, "8-bit groups of a multiple of 64 rows, got 32"),
        ("W8A8", {"n": 300}, "takes N as a multiple of 64, got 300"),
    ],
)
def test_gpu_kernel_refuses_by_name(form, problem, message):
    arguments, _ = make_problem(**(FORMS[form] | problem))
    with pytest.raises(KernelError, match=message):
        quant_matmul(**arguments, implementation="gpu", interpret=False)


def test_leading_axes_are_kept():
    arguments, want = make_problem(**FORMS["W8A8"])
    arguments["x"] = arguments["x"].reshape(2, 5, -1)
    arguments["x_scale"] = arguments["x_scale"].reshape(2, 5)
    got = multiply(arguments, out_dtype=jnp.float32)
    np.testing.assert_allclose(got, want.reshape(2, 5, -1), atol=2e-6 * np.abs(want).max())


def test_nibbles_round_trip_at_every_value():
    w = jnp.asarray(np.stack(np.meshgrid(np.arange(-8, 8), np.arange(-8, 8))).reshape(2, -1), jnp.int8)
    packed = pack_int4(w)
    assert packed.shape == (1, 256)
    assert len(set(np.asarray(packed)[0].tolist())) == 256
    np.testing.assert_array_equal(unpack_int4(packed), w)


def test_token_quantisation_is_within_half_a_step_and_keeps_zero_rows():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)), jnp.float32).at[2].set(0)
    quantised, scale = quantize_per_token(x)
    assert np.abs(np.asarray(quantised)).max() == 127
    assert (np.abs(quantised * scale[:, None] - x) <= scale[:, None] * 0.5001).all()
    assert scale[2] == 1
    assert not quantised[2].any()


def serving_shapes(form, rows=64, k=4096, n=14336, dtype="bfloat16"):
    bits, integer, groups = form["weight_bits"], form["integer"], form.get("groups")
    groups = groups and k // 128
    shapes = {
        "x": jax.ShapeDtypeStruct((rows, k), "int8" if integer else dtype),
        "w": jax.ShapeDtypeStruct((k * bits // 8, n), "int8"),
        "w_scale": jax.ShapeDtypeStruct((groups, n) if groups else (n,), "float32"),
    }
    return shapes | ({"x_scale": jax.ShapeDtypeStruct((rows,), "float32")} if integer else {})


def kernel(arguments):
    return quant_matmul(**arguments, implementation="tpu", interpret=False)


@pytest.mark.parametrize("form", FORMS)
def test_lowers_for_tpu(form):
    arguments, _ = make_problem(**FORMS[form])
    assert "tpu_custom_call" in lower_for("tpu", kernel, shapes_of(arguments))


@pytest.mark.parametrize("generation", TPU_TOPOLOGIES)
@pytest.mark.parametrize("form", ["W8A8", "W4A16 grouped"])
def test_compiles_for_tpu(generation, form):
    compiled = compile_for_tpu(generation, kernel, serving_shapes(FORMS[form]))
    # No dequantised copy of the weights is made.
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 14336 / 8


@pytest.mark.slow
@pytest.mark.parametrize("generation", TPU_TOPOLOGIES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 512])
def test_compiles_for_tpu_in_every_form(generation, form, rows):
    compile_for_tpu(generation, kernel, serving_shapes(FORMS[form], rows=rows, n=4096))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": jnp.zeros((300, 300), jnp.int8)}, "needs 512, or 256 packed"),
        ({"w": jnp.zeros((512, 300))}, "must be int8"),
        ({"x_scale": None}, "come with x_scale"),
        ({"x_scale": jnp.ones(9)}, r"x_scale must be \(10,\)"),
        ({"w_scale": jnp.ones(200)}, "must end in N = 300"),
        ({"w_scale": jnp.ones((7, 300))}, "7 groups do not divide"),
        ({"w_scale": jnp.ones((32, 300)), "implementation": "tpu"}, "multiple of 32 rows, got 16"),
        ({"implementation": "rocm"}, "no implementation 'rocm'"),
    ],
)
def test_refuses_by_name(change, message):
    arguments, _ = make_problem(**FORMS["W8A8"])
    with pytest.raises(KernelError, match=message):
        quant_matmul(**(arguments | change))
