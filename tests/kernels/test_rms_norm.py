"""Normalisation on a CPU: what it computes, and that a row's bits are its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.rms_norm import KERNEL, MOST_ROWS, rms_norm

LEVEL, WHY = KERNEL.status()
needs_kernel = pytest.mark.skipif(LEVEL is None, reason=f"no native kernel: {WHY}")


def make_problem(rows, size, dtype=jnp.float32):
    rng = np.random.default_rng(size)
    return jnp.asarray(rng.normal(size=(rows, size)) * 3, dtype), jnp.asarray(
        rng.normal(size=size), jnp.float32
    )


def expected(x, weight, eps=1e-6):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


# Whole lanes, a part of one behind them, less than one.
@pytest.mark.parametrize("size", [896, 637, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_plain_arithmetic_in_any_number_of_rows(size, dtype):
    x, weight = make_problem(17, size, dtype)
    whole = rms_norm(x, weight, 1e-6)
    assert whole.dtype == x.dtype
    tolerance = 1e-6 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(np.asarray(whole, np.float64), expected(x, weight), rtol=tolerance, atol=1e-6)
    if LEVEL is not None:
        for rows in (1, 2, 8, 9):
            np.testing.assert_array_equal(rms_norm(x[:rows], weight, 1e-6), whole[:rows])


@needs_kernel
def test_where_the_kernel_stands():
    x, weight = make_problem(MOST_ROWS + 1, 8)
    traced = jax.jit(rms_norm, static_argnums=2).trace(x[:3].reshape(3, 1, 8), weight, 1e-6)
    assert "RmsNorm" in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "RmsNorm" not in traced.lower(lowering_platforms=("tpu",)).as_text()
    for other in (x, x[:2].astype(jnp.float16), x[:0]):
        assert "RmsNorm" not in jax.jit(rms_norm, static_argnums=2).lower(other, weight, 1e-6).as_text()


def test_derivatives_and_vmap():
    x, weight = make_problem(4, 24)

    def plain(x, weight):
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight

    def total(function):
        return jax.grad(lambda x, w: jnp.sum(jnp.sin(function(x, w))), argnums=(0, 1))(x, weight)

    for ours, want in zip(total(lambda x, w: rms_norm(x, w, 1e-6)), total(plain), strict=True):
        np.testing.assert_allclose(ours, want, atol=1e-5)
    mapped = jax.vmap(lambda row: rms_norm(row, weight, 1e-6))(x)
    np.testing.assert_allclose(mapped, plain(x, weight), rtol=1e-5, atol=1e-6)
