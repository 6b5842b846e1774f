"""The C++ kernel for unquantised weights: what it computes, that rows are independent, its place in jax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax.nn.linear import linear
from kernels_pallas import KernelError, foreign, native
from kernels_pallas.dense_matmul import cpu, dense_matmul

LEVEL, WHY = cpu.KERNEL.status()
pytestmark = pytest.mark.skipif(LEVEL is None, reason=f"no native kernel: {WHY}")
# The level between shares its code with one or the other.
LEVELS = [level for level in native.levels_here() if level in cpu.KERNEL.levels]


@pytest.fixture(
    params=[
        level if level in (LEVEL, "avx2") else pytest.param(level, marks=pytest.mark.slow) for level in LEVELS
    ]
)
def level(request, monkeypatch):
    monkeypatch.setenv(native.LEVEL_VARIABLE, request.param)
    return request.param


def make_problem(rows, k, n, transposed=False, seed=0, dtype="bfloat16"):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(rows, k)), dtype)
    w = jnp.asarray(rng.normal(size=(n, k) if transposed else (k, n)), dtype)
    matrix = np.asarray(w, np.float64)
    return x, w, np.asarray(x, np.float64) @ (matrix.T if transposed else matrix)


def native_multiply(x, w, **options):
    # Not jitted: the call is one operation, whose little program jax keeps by shape.
    return dense_matmul(x, w, implementation="cpu", **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("transposed", [False, True])
# Several parts and tiles of rows of w, the last one odd, columns ending within a strip; less than a block;
# whole ones.
@pytest.mark.parametrize(("k", "n"), [(1101, 301), (3, 5), (64, 256)])
def test_equals_the_product_for_any_number_of_rows(level, k, n, transposed, dtype):
    # 17 rows are blocks of 6, 6 and 5; few rows are cut otherwise than many.
    x, w, want = make_problem(17, k, n, transposed, dtype=dtype)
    got = native_multiply(x, w, transposed=transposed, out_dtype=jnp.float32)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())
    for rows in (slice(3, 4), slice(2), slice(14, 17), slice(9), slice(5, 16)):
        some = native_multiply(x[rows], w, transposed=transposed, out_dtype=jnp.float32)
        np.testing.assert_array_equal(some, got[rows])
    rounded = native_multiply(x, w, transposed=transposed, out_dtype=jnp.bfloat16)
    np.testing.assert_array_equal(rounded, got.astype(jnp.bfloat16))


@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_not_finite_stays_in_its_row_and_column(level, transposed):
    x, w, want = make_problem(5, 33, 40, transposed)
    x = x.at[2, 7].set(jnp.nan)
    # In the last row of an odd number, whose partner is a zero that must not meet it.
    w = w.at[(4, 32) if transposed else (32, 4)].set(jnp.inf)
    got = np.asarray(native_multiply(x, w, transposed=transposed, out_dtype=jnp.float32))
    assert np.isnan(got[2]).all()
    rest, columns = np.arange(5) != 2, np.arange(40) != 4
    np.testing.assert_array_equal(got[rest, 4], np.where(np.asarray(x)[rest, 32] > 0, np.inf, -np.inf))
    np.testing.assert_allclose(got[rest][:, columns], want[rest][:, columns], atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_linear_layer_gives_a_token_the_same_bits_in_every_tree(level, dtype):
    x, w, _ = make_problem(cpu.MOST_ROWS[level][dtype], 96, 70, dtype=dtype)
    layer = jax.jit(lambda x: linear(x, w, jnp.ones(70, jnp.bfloat16)))
    whole = layer(x[None])[0]
    for rows in (1, 8):
        np.testing.assert_array_equal(layer(x[:rows]), whole[:rows])
    assert "eaglejax.DenseMatmul" in layer.lower(x).as_text()
    assert "eaglejax.DenseMatmul" not in layer.lower(jnp.concatenate([x, x[:1]])).as_text()


def test_other_dtypes_are_left_to_xla():
    x, w, want = make_problem(3, 32, 20)
    for a, b in ((x.astype(jnp.float32), w), (x.astype(jnp.float16), w.astype(jnp.float16))):
        program = jax.jit(functools.partial(dense_matmul, out_dtype=jnp.float32))
        assert "eaglejax" not in program.lower(a, b).as_text()
        np.testing.assert_allclose(program(a, b), want, atol=1e-2)
        with pytest.raises(
            KernelError, match=r"'cpu' takes bfloat16 or float32, .* alike, not .*run on \['xla'\]"
        ):
            native_multiply(a, b)
    for a, b, message in (
        (x, w[:31], r"x has K = 32, and w \(31, 20\) has 31"),
        (x.astype(jnp.int8), w, "x is int8, expected float"),
        (x, w[None], "w of rank 2"),
    ):
        with pytest.raises(KernelError, match=message):
            dense_matmul(a, b)
    assert dense_matmul(x[:0], w).shape == (0, 20)
    np.testing.assert_array_equal(dense_matmul(x[:, :0], w[:0]), jnp.zeros((3, 20)))


def test_in_a_loop_with_donated_buffers():
    """A hundred products a call, large enough to be shared between threads, inside a while_loop."""
    x, w, _ = make_problem(2, 512, 512)
    w = w / 20

    @functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
    def run(x, implementation):
        def step(carry):
            i, x = carry
            return i + 1, jnp.tanh(dense_matmul(x, w, implementation=implementation))

        return jax.lax.while_loop(lambda carry: carry[0] < 100, step, (0, x))[1]

    first, again = (np.asarray(run(jnp.array(x), "auto").astype(jnp.float32)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert np.isfinite(first).all()
    assert np.abs(first).max() > 0.1


@pytest.mark.parametrize("transposed", [False, True])
def test_vmap(transposed):
    x, w, _ = make_problem(6, 40, 24, transposed)
    product = functools.partial(native_multiply, transposed=transposed, out_dtype=jnp.float32)
    want = product(x, w)
    np.testing.assert_array_equal(jax.vmap(product, (0, None))(x.reshape(2, 3, 40), w).reshape(6, -1), want)
    both = jnp.stack([w, -w])
    for mapped in (jax.vmap(product, (None, 0))(x, both), jax.vmap(product)(jnp.stack([x, x]), both)):
        np.testing.assert_array_equal(mapped, jnp.stack([want, -want]))


def gradients(x, w, **options):
    """Of a sum that reaches every number of the result with a weight of its own."""
    transposed = options.get("transposed", False)
    columns = w.shape[0 if transposed else 1]
    weights = jnp.asarray(np.random.default_rng(5).normal(size=(x.shape[0], columns)), jnp.float32)

    def loss(x, w):
        return jnp.vdot(weights, dense_matmul(x, w, out_dtype=jnp.float32, **options))

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w), np.asarray(weights, np.float64)


@pytest.mark.parametrize("transposed", [False, True])
# The products of a gradient by x, of few rows, are the kernel's; of many they are XLA's.
@pytest.mark.parametrize("rows", [6, 520])
@pytest.mark.parametrize(
    ("dtypes", "rounding"),
    [
        ((jnp.bfloat16, jnp.bfloat16), 2.0**-8),
        ((jnp.float32, jnp.float32), 1e-6),
        ((jnp.bfloat16, jnp.float32), 2.0**-8),
        ((jnp.float32, jnp.bfloat16), 2.0**-8),
    ],
)
def test_gradients_are_products_of_the_operands_dtype(dtypes, rounding, rows, transposed):
    x, w, _ = make_problem(rows, 40, 24, transposed)
    x, w = x.astype(dtypes[0]), w.astype(dtypes[1])
    got, weights = gradients(x, w, transposed=transposed)
    matrix = np.asarray(w, np.float64)
    by_w = np.asarray(x, np.float64).T @ weights
    want = weights @ (matrix if transposed else matrix.T), by_w.T if transposed else by_w
    for ours, exact, like in zip(got, want, (x, w), strict=True):
        assert ours.dtype == like.dtype
        # What comes back and the result are rounded, each by half of that at most.
        np.testing.assert_allclose(np.asarray(ours, np.float64), exact, atol=rounding * np.abs(exact).max())


def test_float32_gradients_are_those_of_jaxs_own_rule():
    x, w, _ = make_problem(6, 40, 24)
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    weights = jnp.asarray(np.random.default_rng(5).normal(size=(6, 24)), jnp.float32)
    plain = jax.jit(jax.grad(lambda x, w: jnp.vdot(weights, x @ w), argnums=(0, 1)))(x, w)
    for ours, theirs in zip(gradients(x, w)[0], plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_the_gradient_by_weights_takes_the_kernel_where_it_is_faster(level):
    most = cpu.MOST_ROWS[level]["bfloat16"]
    x, w, _ = make_problem(2 * most, 96, 70)

    def loss(x, w):
        return jnp.sum(dense_matmul(x, w, out_dtype=jnp.float32) ** 2)

    # A new function for each level: jax remembers what it traced.
    text = jax.jit(jax.grad(lambda w: loss(x, w))).lower(w).as_text()
    assert ("eaglejax.DenseMatmul" in text) is (level == "avx512-bf16" or most >= 96)


def test_gradients_under_vmap():
    x, w, _ = make_problem(6, 40, 24)
    both = jnp.stack([w, -w])

    def loss(x, w):
        return jnp.sum(dense_matmul(x, w, out_dtype=jnp.float32))

    by_x, by_w = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1)), (None, 0)))(x, both)
    np.testing.assert_array_equal(by_x[1], -by_x[0])
    np.testing.assert_array_equal(by_w[1], by_w[0])
    alone = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    for mapped, one in zip((by_x, by_w), alone, strict=True):
        np.testing.assert_array_equal(mapped[0], one)


def test_programs_for_other_devices_hold_xlas_product():
    x, w, _ = make_problem(2, 64, 40)
    cuda = jax.export.export(jax.jit(dense_matmul), platforms=["cuda"])(x, w).mlir_module()
    assert "DenseMatmul" not in cuda
    assert "dot_general" in cuda


def test_what_has_no_vector_instructions_is_left_to_xla(monkeypatch, caplog):
    x, w, want = make_problem(2, 64, 40)
    monkeypatch.setenv(native.LEVEL_VARIABLE, "portable")
    np.testing.assert_allclose(dense_matmul(x, w, out_dtype=jnp.float32), want, atol=1e-4)
    with pytest.raises(KernelError, match=r"cannot be made here: it needs .*avx2 .* level is portable"):
        native_multiply(x, w)
    monkeypatch.setenv(native.OFF_VARIABLE, "1")
    with pytest.raises(KernelError, match="turned off by EAGLEJAX_NO_NATIVE"):
        native_multiply(x, w)
    assert not caplog.text


def test_without_a_compiler_auto_says_so_once(monkeypatch, caplog):
    x, w, want = make_problem(1, 64, 40)

    def load(source, level):
        raise KernelError("no compiler at all")

    monkeypatch.setattr(native, "load", load)
    foreign._made.cache_clear()
    try:
        for _ in range(2):
            np.testing.assert_allclose(dense_matmul(x, w, out_dtype=jnp.float32), want, atol=1e-4)
    finally:
        foreign._made.cache_clear()
    assert caplog.text.count("for few rows: no compiler at all") == 1
