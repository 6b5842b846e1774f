"""Products with the blocks of GGUF files: the file's numbers to the bit, exact sums, rows that do not depend
on others."""

from __future__ import annotations

import functools

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_cases import KINDS, random_blocks
from gguf import GGMLQuantizationType as Kind

from eaglejax.checkpoint.gguf.blocks import fields_of
from kernels_pallas import KernelError, native
from kernels_pallas.block_matmul import FORMS, block_matmul, cpu, pack, round_groups, unpack

LEVEL, WHY = cpu.KERNEL.status()
needs_kernel = pytest.mark.skipif(LEVEL is None, reason=f"no native kernel: {WHY}")
DEFAULT_LEVELS = native.levels_here()[:1]
"""The others take half a minute each to compile."""


@pytest.fixture(
    params=[
        level if level in DEFAULT_LEVELS else pytest.param(level, marks=pytest.mark.slow)
        for level in native.levels_here()
    ]
)
def level(request, monkeypatch):
    monkeypatch.setenv(native.LEVEL_VARIABLE, request.param)
    return request.param


@functools.cache
def problem(kind: Kind, columns: int, k: int):
    """(tiles, the file's numbers f64 [columns, K])."""
    raw = random_blocks(kind, columns, k)
    return jnp.asarray(pack(FORMS[kind.name], fields_of(kind, raw))), gguf.dequantize(raw, kind).astype(
        np.float64
    )


def product(x, w, kind, columns, *, integers, implementation="cpu", **options):
    return np.asarray(
        block_matmul(
            jnp.asarray(x),
            w,
            form=FORMS[kind.name],
            columns=columns,
            integers=integers,
            implementation=implementation,
            out_dtype=jnp.float32,
            **options,
        )
    )


def meant(x, integers):
    """f64: what the kernel takes x for."""
    if not integers:
        return np.asarray(x, np.float64)
    rounded, scale = (np.asarray(a, np.float64) for a in round_groups(jnp.asarray(x)))
    return (rounded.reshape(*scale.shape, -1) * scale[..., None]).reshape(rounded.shape)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_tiles_hold_the_files_numbers_to_the_bit(kind):
    for columns, k in ((37, 512), (16, 256), (1, 256)):
        w, want = problem(kind, columns, k)
        numbers = unpack(FORMS[kind.name], w).reshape(-1, k)
        np.testing.assert_array_equal(numbers[:columns], want.astype(np.float32))
        np.testing.assert_array_equal(numbers[columns:], 0)


# 37 columns end within a tile; 17 rows are blocks of 6, 6 and 5; 768 numbers end within a step of 256 once
# (Q4_0: 800).
@needs_kernel
@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_products_are_those_of_the_files_numbers_for_any_number_of_rows(level, kind, integers):
    k = 768 if kind.name.endswith("_K") else 800
    w, numbers = problem(kind, 37, k)
    x = np.random.default_rng(1).normal(size=(17, k)).astype(np.float32)
    x[3, :64] = 0
    got, taken = product(x, w, kind, 37, integers=integers), meant(x, integers)
    assert (np.abs(got - taken @ numbers.T) <= 3e-7 * (np.abs(taken) @ np.abs(numbers.T))).all()
    for rows in (slice(3, 4), slice(8), slice(9, 17), slice(5, 8), slice(2)):
        np.testing.assert_array_equal(product(x[rows], w, kind, 37, integers=integers), got[rows])


@needs_kernel
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_sums_of_a_group_are_exact_at_their_extremes(level, kind):
    # One group of activations at both ends of their range, of which every number rounds to itself; scales are
    # powers of two, so that nothing but the sums could round.
    form = FORMS[kind.name]
    raw = random_blocks(kind, 40, form.unit)
    fields = fields_of(kind, raw)
    q = np.random.default_rng(2).choice([0, (1 << form.bits) - 1], fields.q.shape).astype(np.uint8)
    q[0], q[1] = 0, (1 << form.bits) - 1
    ones = np.full_like(fields.scale, 1)
    factor = None if fields.factor is None else np.full_like(fields.factor, 1)
    exact = type(fields)(q, ones, ones if form.mins else None, factor, factor if form.mins else None)
    w = jnp.asarray(pack(form, exact))
    numbers = np.asarray(unpack(form, w), np.float64).reshape(-1, form.unit)[:40]
    x = np.random.default_rng(3).choice([-127.0, 127.0], (3, form.unit)).astype(np.float32)
    x[0], x[1] = 127, -127
    np.testing.assert_array_equal(product(x, w, kind, 40, integers=True), x.astype(np.float64) @ numbers.T)


@needs_kernel
def test_bfloat16_and_wide_batches(level):
    kind, k = Kind.Q5_0, 1024
    w, numbers = problem(kind, 200, k)
    x = jnp.asarray(np.random.default_rng(4).normal(size=(70, k)), jnp.bfloat16)
    for integers in (False, True):
        taken = meant(x.astype(jnp.float32), integers)
        got = product(x, w, kind, 200, integers=integers)
        assert (np.abs(got - taken @ numbers.T) <= 3e-7 * (np.abs(taken) @ np.abs(numbers.T))).all()
        rounded = block_matmul(x, w, form=FORMS["Q5_0"], columns=200, integers=integers, implementation="cpu")
        np.testing.assert_array_equal(rounded, jnp.asarray(got).astype(jnp.bfloat16))


@needs_kernel
def test_numbers_that_are_none_stay_in_their_row(level):
    w, _ = problem(Kind.Q8_0, 37, 800)
    x = np.random.default_rng(5).normal(size=(9, 800)).astype(np.float32)
    for integers in (False, True):
        want = product(x, w, Kind.Q8_0, 37, integers=integers)
        bad = x.copy()
        bad[2, 5], bad[7, 799] = np.nan, np.inf
        got = product(bad, w, Kind.Q8_0, 37, integers=integers)
        assert not np.isfinite(got[[2, 7]]).any()
        rest = [0, 1, 3, 4, 5, 6, 8]
        np.testing.assert_array_equal(got[rest], want[rest])


@needs_kernel
def test_groups_of_rows_meet_their_own_matrices_on_the_kernel_as_on_xla():
    kind, k = Kind.Q4_K, 256
    matrices = [problem(kind, columns, k) for columns in (33, 34, 35)]
    w = jnp.stack([tiles for tiles, _ in matrices])
    sizes = jnp.asarray([2, 0, 5], jnp.int32)
    x = np.random.default_rng(6).normal(size=(7, k)).astype(np.float32)
    for integers in (False, True):
        got, xla = (
            product(x, w, kind, 33, integers=integers, sizes=sizes, implementation=name)
            for name in ("cpu", "xla")
        )
        taken = meant(x, integers)
        want = np.concatenate([taken[:2] @ matrices[0][1][:33].T, taken[2:] @ matrices[2][1][:33].T])
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
        np.testing.assert_allclose(xla, want, atol=1e-5 * np.abs(want).max())


@needs_kernel
def test_inside_jax_vmap_gradients_and_other_devices():
    kind, k = Kind.Q6_K, 256
    w, numbers = problem(kind, 20, k)
    x = jnp.asarray(np.random.default_rng(7).normal(size=(6, k)), jnp.float32)
    multiply = functools.partial(block_matmul, w=w, form=FORMS["Q6_K"], columns=20)
    want = multiply(x, implementation="cpu")
    np.testing.assert_array_equal(jax.vmap(multiply)(x.reshape(2, 3, k)).reshape(6, 20), want)
    slope = jax.grad(lambda x: jnp.sum(multiply(x)))(x)
    np.testing.assert_allclose(slope, np.broadcast_to(numbers.sum(0), x.shape), rtol=1e-4, atol=1e-4)
    both = jnp.stack([w, w[::-1]])
    each = jax.vmap(lambda w: block_matmul(x, w, form=FORMS["Q6_K"], columns=20))(both)
    np.testing.assert_array_equal(each[0], want)
    cuda = jax.export.export(jax.jit(multiply), platforms=["cuda"])(x).mlir_module()
    assert "eaglejax.BlockMatmul" not in cuda


def test_what_does_not_fit_is_refused():
    w, _ = problem(Kind.Q4_K, 37, 512)
    form = FORMS["Q4_K"]
    x = jnp.ones((2, 512))
    for change, message in (
        ({"x": jnp.ones((2, 300))}, r"K = 300 is no multiple of the 256 numbers of a Q4_K block"),
        ({"columns": 50}, r"a Q4_K matrix \[50, 512\] is uint8 \(4, 4736\).* w is uint8 \(3, 4736\)"),
        ({"x": jnp.ones((2, 512), jnp.int8)}, r"x must be float \[..., K\], got int8"),
        ({"sizes": jnp.ones((2,), jnp.int32)}, r"w is uint8 \(3, 4736\)"),
        ({"implementation": "tpu"}, r"no implementation 'tpu' for this operation; use one of \['xla'"),
    ):
        with pytest.raises(KernelError, match=message):
            block_matmul(**({"x": x, "w": w, "form": form, "columns": 37} | change))
