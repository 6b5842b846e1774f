import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import TPU_TOPOLOGIES, compile_for_tpu, gpu_simulator, lower_for, mosaic_gpu

from kernels_pallas import KernelError
from kernels_pallas.hadamard import factor, hadamard, hadamard_matrix

# Powers of two; Paley's first construction on prime and prime-power fields; his second; doublings of each.
ORDERS = [1, 2, 8, 12, 20, 24, 28, 36, 40, 52, 76, 100, 108, 148, 344]


def rotate(x, **options):
    return jax.jit(functools.partial(hadamard, **options))(x)


@pytest.mark.parametrize("order", ORDERS)
def test_matrices_are_hadamard(order):
    matrix = hadamard_matrix(order).astype(np.int64)
    assert (np.abs(matrix) == 1).all()
    np.testing.assert_array_equal(matrix @ matrix.T, order * np.eye(order, dtype=np.int64))


@pytest.mark.parametrize(
    ("size", "base"),
    # Hidden and intermediate sizes of Llama, Qwen and Mistral models.
    [(4096, 1), (5120, 20), (8960, 140), (11008, 344), (13824, 108), (14336, 28), (18944, 148), (29568, 924)],
)
def test_sizes_of_real_models_factor(size, base):
    assert factor(size) == (base, size // base)


@pytest.mark.parametrize("size", [64, 96, 128, 768, 3584])
@pytest.mark.parametrize("implementation", ["xla", "tpu"])
def test_rotation_is_the_matrix_and_its_transpose_the_inverse(size, implementation):
    x = jnp.asarray(np.random.default_rng(size).normal(size=(2, 3, size)), jnp.float32)
    y = rotate(x, implementation=implementation)
    want = np.asarray(x, np.float64) @ (hadamard_matrix(size) / np.sqrt(size))
    np.testing.assert_allclose(y, want, atol=5e-6)
    np.testing.assert_allclose(rotate(y, implementation=implementation, transpose=True), x, atol=5e-6)
    np.testing.assert_allclose(jnp.linalg.norm(y, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)


def test_bfloat16_is_rounded_once():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(33, 512)), jnp.bfloat16)
    want = rotate(x.astype(jnp.float32)).astype(jnp.bfloat16)
    for implementation in ("xla", "tpu"):
        got = rotate(x, implementation=implementation)
        assert got.dtype == jnp.bfloat16
        # One unit in the last place where float32 sums in another order cross a rounding edge.
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=2**-7, atol=1e-6)


def test_simulated_tpu_sees_no_race_and_no_read_out_of_bounds(tpu_simulator):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(34, 1536)), jnp.float32)
    got = rotate(x, implementation="tpu", interpret=tpu_simulator)
    np.testing.assert_allclose(got, rotate(x, implementation="xla"), atol=5e-6)


def kernel(x):
    return hadamard(x, implementation="tpu", interpret=False)


@pytest.mark.parametrize("size", [64, 96, 128, 4096, 14336])
def test_lowers_for_tpu(size):
    assert "tpu_custom_call" in lower_for("tpu", kernel, jax.ShapeDtypeStruct((64, size), jnp.bfloat16))


@pytest.mark.parametrize("generation", TPU_TOPOLOGIES)
def test_compiles_for_tpu(generation):
    compile_for_tpu(generation, kernel, jax.ShapeDtypeStruct((64, 14336), jnp.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("generation", TPU_TOPOLOGIES)
@pytest.mark.parametrize("size", [64, 128, 768, 4096, 11008, 29568])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiles_for_tpu_in_every_size(generation, size, dtype):
    compile_for_tpu(generation, kernel, jax.ShapeDtypeStruct((64, size), dtype))


@pytest.mark.parametrize(("size", "dtype"), [(768, "bfloat16"), (1280, "float16")])
def test_simulated_gpu_kernel_is_rounded_once_and_races_nowhere(size, dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, size)), dtype)
    # The simulator hands out shared memory full of nan, which rows past a size of 12 or 20 must not pass on.
    for transpose in (False, True):
        got = rotate(x, implementation="gpu", interpret=gpu_simulator(), transpose=transpose)
        want = rotate(x.astype(jnp.float32), transpose=transpose).astype(dtype)
        assert got.dtype == dtype
        step = jnp.finfo(dtype).eps
        np.testing.assert_allclose(
            got.astype(jnp.float32), want.astype(jnp.float32), rtol=step, atol=step / 256
        )


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (64, "bfloat16"),
        (1280, "float16"),
        (14336, "bfloat16"),
        *(pytest.param(n, "float16", marks=pytest.mark.slow) for n in (128, 4096, 18944, 20480)),
    ],
)
def test_lowers_for_gpu(size, dtype):
    mosaic_gpu()
    lowered = lower_for(
        "cuda",
        lambda x: hadamard(x, implementation="gpu", interpret=False),
        jax.ShapeDtypeStruct((64, size), dtype),
    )
    assert "mosaic_gpu" in lowered


def test_refuses_by_name():
    with pytest.raises(KernelError, match="no matrix of order 92 is known here; the next larger order is 96"):
        hadamard(jnp.zeros((2, 92)))
    with pytest.raises(KernelError, match="not float"):
        hadamard(jnp.zeros((2, 64), jnp.int32))
    with pytest.raises(KernelError, match="not float16"):
        hadamard(jnp.zeros((2, 64), jnp.float16), implementation="tpu")
    for size, dtype, message in (
        (64, "float32", "takes bfloat16 and float16, not float32"),
        (11008, "bfloat16", "power of two of at least 64 beside the base order, got 32"),
        (28672, "bfloat16", "first stage is at most 160, got 224"),
    ):
        with pytest.raises(KernelError, match=message):
            hadamard(jnp.zeros((2, size), dtype), implementation="gpu")
