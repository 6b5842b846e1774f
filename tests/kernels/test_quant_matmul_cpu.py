"""The C++ kernel: what it computes, that rows do not depend on each other, and how it stands inside jax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_quant_matmul import FORMS, make_problem, multiply

from kernels_pallas import KernelError, foreign, native
from kernels_pallas.quant_matmul import cpu, pack_int4, quant_matmul, quantize_per_token

BEST = native.levels_here()[0]
# Kernels are compiled for these; the levels between share their code with one or the other.
DEFAULT_LEVELS = (BEST, "portable")

LEVEL, WHY = cpu.KERNEL.status()
pytestmark = pytest.mark.skipif(LEVEL is None, reason=f"no native kernel: {WHY}")


@pytest.fixture(
    params=[
        level if level in DEFAULT_LEVELS else pytest.param(level, marks=pytest.mark.slow)
        for level in native.levels_here()
    ]
)
def level(request, monkeypatch):
    monkeypatch.setenv(native.LEVEL_VARIABLE, request.param)
    return request.param


def native_multiply(arguments, **options):
    # Not jitted: the call is one operation, whose little program jax keeps by shape.
    return quant_matmul(**arguments, implementation="cpu", **options)


def some_rows(arguments, rows):
    return {name: value[rows] if name in ("x", "x_scale") else value for name, value in arguments.items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_the_dequantised_product_for_any_number_of_rows(level, form, dtype):
    # 300 columns end within a strip of any level; 17 rows are blocks of 6, 6 and 5, or 4, 4, 3, 3 and 3.
    arguments, want = make_problem(**FORMS[form], rows=17, dtype=jnp.dtype(dtype))
    got = native_multiply(arguments, out_dtype=jnp.float32)
    np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())
    for rows in (slice(3, 4), slice(8), slice(9, 17), slice(5, 8)):
        np.testing.assert_array_equal(
            native_multiply(some_rows(arguments, rows), out_dtype=jnp.float32), got[rows]
        )


@pytest.mark.parametrize("form", ["W8A8", "W4A8"])
def test_integer_products_have_the_bits_of_the_reference(level, form):
    arguments, _ = make_problem(**FORMS[form], rows=3)
    for dtype in (jnp.float32, jnp.bfloat16):
        np.testing.assert_array_equal(
            native_multiply(arguments, out_dtype=dtype),
            multiply(arguments, implementation="xla", out_dtype=dtype),
        )


@pytest.mark.parametrize("k", [4098, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_integer_sums_are_exact_at_their_extremes(level, packed, k):
    # Neither a multiple of the four rows of a step nor of the terms summed in float32; all of one sign.
    rng = np.random.default_rng(0)
    x = np.full((2, k), -128, np.int8)
    x[0, 0] = -127
    w = np.full((k, 70), -8 if packed else -128, np.int8)
    w[-1] = rng.integers(-8 if packed else -128, 0, 70)
    want = x.astype(np.int64) @ w.astype(np.int64)
    # Differences of neighbouring columns are small: exact in float32 if the sums are.
    got = native_multiply(
        {
            "x": jnp.asarray(x),
            "w": pack_int4(jnp.asarray(w)) if packed else jnp.asarray(w),
            "w_scale": jnp.ones(70),
            "x_scale": jnp.ones(2),
        },
        out_dtype=jnp.float32,
    )
    np.testing.assert_array_equal(got, want.astype(np.float32))


@pytest.mark.parametrize("form", ["W8A8 grouped", "W8A16", "W4A16 grouped"])
def test_groups_of_any_size(level, form):
    rows = {"k": 5 * 6, "groups": 5, "rows": 3, "n": 20}
    for groups in ({"groups": 5}, {"groups": 15}, {"groups": None}):
        if form.startswith("W4") and groups["groups"] == 15:
            continue
        arguments, want = make_problem(**(FORMS[form] | rows | groups), dtype=jnp.bfloat16)
        got = native_multiply(arguments, out_dtype=jnp.float32)
        np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())


def test_float16_activations_and_results():
    arguments, want = make_problem(**FORMS["W8A16"], dtype=jnp.float16)
    got = native_multiply(arguments)
    assert got.dtype == jnp.float16
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=2e-3 * np.abs(want).max())


def test_bfloat16_results_are_rounded_to_even():
    # 1 + 2^-8 lies between two bfloat16 numbers, of which 1 is even; 1 + 3 * 2^-8 goes up.
    x = jnp.asarray([[1, 1]], jnp.float32)
    w = jnp.asarray([[127, 127], [127, 127]], jnp.int8)
    scale = jnp.asarray([(1 + 2**-8) / 254, (1 + 3 * 2**-8) / 254], jnp.float32)
    got = native_multiply({"x": x, "w": w, "w_scale": scale}, out_dtype=jnp.bfloat16)
    np.testing.assert_array_equal(got.astype(jnp.float32), [[1, 1 + 2**-6]])


def test_in_a_loop_with_donated_buffers():
    """A hundred small products a call, large enough to be shared between threads, inside a while_loop."""
    arguments, _ = make_problem(**FORMS["W8A8"], rows=2, k=512, n=512)

    @functools.partial(jax.jit, donate_argnums=0, static_argnums=2)
    def run(x, rest, implementation):
        def step(carry):
            i, x = carry
            integers, x_scale = quantize_per_token(x)
            product = quant_matmul(
                integers, **rest, x_scale=x_scale, implementation=implementation, out_dtype=jnp.float32
            )
            return i + 1, jnp.tanh(product)

        return jax.lax.while_loop(lambda carry: carry[0] < 100, step, (0, x))[1]

    rest = {name: arguments[name] for name in ("w", "w_scale")}
    x = np.random.default_rng(1).normal(size=(2, 512)).astype(np.float32)
    first, again = (np.asarray(run(jnp.array(x), rest, "cpu")) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_allclose(first, run(jnp.array(x), rest, "xla"), atol=1e-5)


@pytest.mark.parametrize("form", ["W8A8", "W4A16 grouped"])
def test_vmap_over_rows_and_over_weights(form):
    arguments, _ = make_problem(**FORMS[form], rows=6, k=64, n=40)
    product = functools.partial(quant_matmul, implementation="cpu", out_dtype=jnp.float32)
    want = product(**arguments)
    split = {
        name: value.reshape(2, 3, *value.shape[1:]) if name in ("x", "x_scale") else value
        for name, value in arguments.items()
    }
    axes = {name: 0 if name in ("x", "x_scale") else None for name in arguments}

    def mapped(values, axes):
        names = sorted(values)
        return jax.vmap(
            lambda *a: product(**dict(zip(names, a, strict=True))), in_axes=[axes[n] for n in names]
        )(*(values[n] for n in names))

    np.testing.assert_array_equal(mapped(split, axes).reshape(6, -1), want)
    stacked = arguments | {"w": jnp.stack([arguments["w"], -arguments["w"] // 2])}
    each = mapped(stacked, {name: 0 if name == "w" else None for name in arguments})
    np.testing.assert_array_equal(each[0], want)
    np.testing.assert_array_equal(each[1], product(**(arguments | {"w": stacked["w"][1]})))


def test_derivatives_are_those_of_the_dequantised_product():
    arguments, _ = make_problem(**FORMS["W4A16 grouped"], rows=3, k=64, n=40)

    def loss(x, implementation):
        return jnp.sum(jnp.sin(quant_matmul(**(arguments | {"x": x}), implementation=implementation)))

    got, want = (jax.jit(jax.grad(loss), static_argnums=1)(arguments["x"], name) for name in ("cpu", "xla"))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_auto_is_the_kernel_on_a_cpu_and_xla_elsewhere():
    arguments, _ = make_problem(**FORMS["W8A8"], rows=2, k=64, n=40)
    product = jax.jit(functools.partial(quant_matmul, implementation="auto"))
    here, cuda = (
        jax.export.export(product, platforms=[platform], disabled_checks=[_any_custom_call()])(
            **arguments
        ).mlir_module()
        for platform in ("cpu", "cuda")
    )
    assert "eaglejax.QuantMatmul" in here
    assert "eaglejax.QuantMatmul" not in cuda


def _any_custom_call():
    return jax.export.DisabledSafetyCheck.custom_call(cpu.KERNEL.target("QuantMatmul"))


def test_a_kernel_of_another_machine_is_refused(monkeypatch):
    monkeypatch.setenv(native.LEVEL_VARIABLE, "sve")
    with pytest.raises(KernelError, match=r"EAGLEJAX_NATIVE_LEVEL is 'sve'; this processor runs .*portable"):
        native.level_here()


def test_without_a_kernel_auto_says_so_once_and_leaves_the_product_to_xla(monkeypatch, caplog):
    tried = []

    def load(source, level):
        tried.append(level)
        raise KernelError("no compiler at all")

    arguments, want = make_problem(**FORMS["W8A8"], rows=2, k=64, n=40)
    monkeypatch.setattr(native, "load", load)
    foreign._made.cache_clear()
    try:
        for _ in range(2):
            got = quant_matmul(**arguments, out_dtype=jnp.float32)
            np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())
        with pytest.raises(KernelError, match=r"'cpu' cannot be made here: no compiler at all; .*\['xla'"):
            native_multiply(arguments)
    finally:
        foreign._made.cache_clear()
    assert tried == [BEST]
    assert caplog.text.count("left to XLA, which is slower: no compiler at all") == 1
