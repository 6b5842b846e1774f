"""A quantised weight multiplies as its integers and scales say, against NumPy; so do stacks and tables."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax.errors import ConfigError
from eaglejax.nn.linear import PackedWeight, embedding, grouped_linear, linear
from eaglejax.quant.array import QuantArray
from eaglejax.quant.calibrate import InputRange
from eaglejax.quant.quantize import quantize_array
from eaglejax.quant.schemes import Scheme, get_scheme

ROWS, COLUMNS, EXPERTS = 24, 16, 3
SCHEMES = {
    "w8a8": get_scheme("w8a8"),
    "w8a8-static": get_scheme("w8a8-static"),
    "w8a8-static-offset": get_scheme("w8a8-static", 12, asymmetric=True),
    "w4a8": get_scheme("w4a8"),
    "w4a8-g6": get_scheme("w4a8", 6),
    "w4a16-g8": get_scheme("w4a16-g8"),
    "w8a16": get_scheme("w8a16"),
}
# Inputs of calibration and of the products; the products' are a little wider, so that static ones clip.
LOW, HIGH = np.linspace(-3.0, -0.5, ROWS, dtype=np.float32), np.linspace(0.2, 4.0, ROWS, dtype=np.float32)
each_scheme = pytest.mark.parametrize("name", SCHEMES)


@functools.cache
def make(
    name: str, *, lead: tuple[int, ...] = (), smooth: bool = False, transposed: bool = False
) -> QuantArray:
    rng = np.random.default_rng(1)
    shape = (COLUMNS, ROWS) if transposed else (*lead, ROWS, COLUMNS)
    return quantize_array(
        rng.normal(size=shape).astype(np.float32),
        SCHEMES[name],
        smooth=np.linspace(0.5, 2.0, ROWS, dtype=np.float32) if smooth else None,
        inputs=InputRange(LOW, HIGH),
        transposed=transposed,
    )


def inputs(count: int, seed: int = 2) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.uniform(1.2 * LOW, 1.2 * HIGH, (count, ROWS)).astype(np.float32)


def integers(weight: QuantArray) -> np.ndarray:
    """[..., I, O] in f64, nibbles taken apart by arithmetic on unsigned bytes."""
    stored = np.asarray(weight.values)
    if weight.bits == 8:
        return stored.astype(np.float64)
    low, high = (stored.view(np.uint8) & 15).astype(int), (stored.view(np.uint8) >> 4).astype(int)
    pairs = np.stack([low, high], axis=-2).reshape(*stored.shape[:-2], -1, stored.shape[-1])
    return np.where(pairs > 7, pairs - 16, pairs).astype(np.float64)


def scaled(weight: QuantArray) -> np.ndarray:
    """Integers times scales [..., I, O], f64."""
    whole, scale = integers(weight), np.asarray(weight.scale, np.float64)
    if scale.ndim < whole.ndim:
        scale = scale[..., None, :]
    return whole * np.repeat(scale, whole.shape[-2] // scale.shape[-2], axis=-2)


def quantised_input(weight: QuantArray, x: np.ndarray) -> np.ndarray:
    """What of ``x`` meets the integers, f64."""
    if weight.smooth is not None:
        x = x * (1 / np.asarray(weight.smooth))
    if weight.activation is None:
        return x.astype(np.float64)
    if weight.activation == "dynamic":
        step = np.abs(x).max(-1, keepdims=True) * np.float32(1 / 127)
        return np.round(x * (1 / step)).astype(np.float64) * step
    step, zero = np.float32(weight.input_scale), 0.0
    low = -127
    if weight.input_offset is not None:
        zero, low = float(weight.input_offset), -128
    return (np.clip(np.round(x * (1 / step) + np.float32(zero)), low, 127) - zero) * step


@jax.jit
def multiply(x: jax.Array, weight: QuantArray) -> jax.Array:
    return linear(x, weight, transposed=weight.transposed)


dequantize = jax.jit(QuantArray.dequantize)
look_up = jax.jit(embedding)


def close(got: jax.Array, want: np.ndarray) -> None:
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    ("name", "smooth"), [*((n, False) for n in SCHEMES), ("w8a8", True), ("w8a16", True)]
)
def test_the_product_is_that_of_integers_and_scales(name: str, smooth: bool) -> None:
    weight, x = make(name, smooth=smooth), inputs(6)
    assert isinstance(weight, PackedWeight)
    assert weight.shape == (ROWS, COLUMNS)
    close(multiply(x, weight), quantised_input(weight, x) @ scaled(weight))
    factor = np.asarray(weight.smooth)[:, None] if smooth else 1.0
    close(dequantize(weight), scaled(weight) / factor)


def test_any_leading_dimensions_and_a_bias() -> None:
    weight, x = make("w4a8-g6"), inputs(6)
    plain = np.asarray(linear(jnp.asarray(x), weight))
    shaped = linear(jnp.asarray(x).reshape(2, 3, ROWS), weight, jnp.arange(COLUMNS, dtype=jnp.float32))
    np.testing.assert_array_equal(shaped.reshape(6, -1), plain + np.arange(COLUMNS, dtype=np.float32))


@each_scheme
def test_experts_multiply_their_own_rows(name: str) -> None:
    weight, x = make(name, lead=(EXPERTS,)), inputs(7)
    sizes = np.array([3, 0, 4], np.int32)
    each = np.repeat(np.arange(EXPERTS), sizes)
    want = np.einsum("ti,tio->to", quantised_input(weight, x), scaled(weight)[each])
    close(jax.jit(grouped_linear)(x, weight, sizes), want)
    close(dequantize(weight), scaled(weight))


@each_scheme
def test_a_table_is_looked_up_and_is_a_tied_head(name: str) -> None:
    table, x = make(name, transposed=True), inputs(4)
    assert table.shape == (COLUMNS, ROWS)
    product = multiply(x, table)
    close(product, quantised_input(table, x) @ scaled(table))
    whole = dequantize(table)
    close(whole, scaled(table).T)
    ids = np.array([[3, 0, 15], [15, 7, 3]])
    close(look_up(table, ids), np.asarray(whole)[ids])
    some = np.array([1, 8, 9])
    head = table.columns(some)
    assert head.shape == (3, ROWS)
    np.testing.assert_array_equal(multiply(x, head), product[:, some])


@pytest.mark.parametrize("name", ["w8a8", "w4a8-g6", "w8a8-static"])
def test_a_row_does_not_depend_on_the_rows_beside_it(name: str) -> None:
    """Compiled as one program and op by op, where compilers take other turns."""
    x, weight = jnp.asarray(inputs(17)), make(name)
    for run, widths in ((multiply, (1, 2, 3, 4, 8, 9)), (linear, (1, 2))):
        whole = run(x, weight)
        for width in widths:
            np.testing.assert_array_equal(run(x[:width], weight), whole[:width])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(dtype: str) -> None:
    raw = np.random.default_rng(1).normal(size=(ROWS, COLUMNS))
    weight = quantize_array(jnp.asarray(raw, dtype), get_scheme("w8a8"))
    assert weight.dtype == jnp.dtype(dtype)
    assert weight.dequantize().dtype == jnp.float32
    x = jnp.asarray(inputs(3), dtype)
    got = linear(x, weight)
    assert got.dtype == jnp.dtype(dtype)
    want = quantised_input(weight, np.asarray(x, np.float32)) @ scaled(weight)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=1e-2, atol=1e-2)
    table = quantize_array(jnp.asarray(raw, dtype), get_scheme("w8a8"), transposed=True)
    assert embedding(table, jnp.arange(3)).dtype == jnp.dtype(dtype)


def test_a_row_of_zeros_gives_zeros() -> None:
    x = np.zeros((2, ROWS), np.float32)
    for name in SCHEMES:
        np.testing.assert_allclose(multiply(x, make(name)), 0.0, atol=1e-5)


@each_scheme
def test_a_token_that_is_not_finite_stays_so_and_stays_alone(name: str) -> None:
    """Integers have no NaN: without care a token that cannot be computed would become a sound one."""
    weight, stack, x = make(name), make(name, lead=(EXPERTS,)), inputs(3)
    sizes = np.array([1, 1, 1], np.int32)
    for bad in (np.nan, np.inf):
        broken = x.copy()
        broken[1, 5] = bad
        for run, args in ((multiply, (weight,)), (jax.jit(grouped_linear), (stack, sizes))):
            got, want = (np.asarray(run(x_, *args)) for x_ in (broken, x))
            assert not np.isfinite(got[1]).any()
            np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])


def test_the_sums_of_an_offset_may_be_left_out() -> None:
    weight, x = make("w8a8-static-offset"), jnp.asarray(inputs(3))
    assert weight.offset_sums is not None
    without = dataclasses.replace(weight, offset_sums=None)
    np.testing.assert_allclose(linear(x, without), linear(x, weight), rtol=1e-6)


def test_weights_of_one_form_share_a_program() -> None:
    traced = []

    @jax.jit
    def run(x: jax.Array, w: QuantArray) -> jax.Array:
        traced.append(w.bits)
        return linear(x, w)

    x = jnp.asarray(inputs(2))
    first = make("w8a8")
    other = dataclasses.replace(first, scale=first.scale * 2)
    np.testing.assert_array_equal(2 * run(x, first), run(x, other))
    run(x, make("w4a8"))
    assert traced == [8, 4]


def test_uses_that_cannot_be_are_refused() -> None:
    weight, table = make("w8a8"), make("w8a8", transposed=True)
    x = jnp.asarray(inputs(2))
    with pytest.raises(ConfigError, match=r"a matrix of shape \(24, 16\) cannot be multiplied as the other"):
        linear(jnp.zeros((2, COLUMNS)), weight, transposed=True)
    with pytest.raises(ConfigError, match="a table of shape"):
        linear(x, table)
    with pytest.raises(ConfigError, match="has no rows to look up"):
        embedding(weight, jnp.zeros((1,), jnp.int32))
    with pytest.raises(ConfigError, match=r"floats \[..., 24\], not float32 \(2, 16\)"):
        linear(jnp.zeros((2, COLUMNS)), weight)
    with pytest.raises(ConfigError, match="not int8"):
        linear(x.astype(jnp.int8), weight)
    bare = dataclasses.replace(weight, activation="static")
    with pytest.raises(ConfigError, match="need input_scale; calibrate"):
        linear(x, bare)


def test_schemes_are_values() -> None:
    assert get_scheme("w4a8-g32") == Scheme("w4a8", 4, "dynamic", 32)
    assert get_scheme("w4a8", 32).label == "w4a8-g32"
    assert hash(get_scheme("w8a8")) == hash(get_scheme("w8a8"))
    for wrong in (
        lambda: get_scheme("w2a2"),
        lambda: get_scheme("w4a8-g32", 64),
        lambda: get_scheme("w4a8", 3),
        lambda: get_scheme("w8a8", asymmetric=True),
        lambda: Scheme("x", 5, None),
        lambda: Scheme("x", 8, "sometimes"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError):
            wrong()
