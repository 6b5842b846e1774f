"""The fused loss over a vocabulary: its figures and gradient against plain arithmetic, and where it runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import KernelError, native
from kernels_pallas.soft_cross_entropy import KERNEL, soft_cross_entropy

LEVEL, WHY = KERNEL.status()
# The level between shares its code with one or the other.
LEVELS = [
    level if level in (LEVEL, "avx2") else pytest.param(level, marks=pytest.mark.slow)
    for level in native.levels_here()
    if level in KERNEL.levels
]


@pytest.fixture(params=[*LEVELS, "xla"])
def implementation(request, monkeypatch):
    if request.param == "xla":
        monkeypatch.setenv(native.OFF_VARIABLE, "1")
    else:
        monkeypatch.setenv(native.LEVEL_VARIABLE, request.param)
        if LEVEL is None:
            pytest.skip(f"no native kernel: {WHY}")
    jax.clear_caches()


def make_problem(rows=6, size=37, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, size)) * 5
    teacher = np.exp(rng.normal(size=(rows, size)) * 3)
    # Shifted rows of a teacher are zeros at the end of a text: distributions that do not sum to one.
    teacher /= teacher.sum(-1, keepdims=True) * np.linspace(1, 2, rows)[:, None]
    return logits, teacher, rng.random(rows)


def expected(logits, teacher, inside):
    q = np.exp(logits - logits.max(-1, keepdims=True))
    q /= q.sum(-1, keepdims=True)
    entropy = -(teacher * np.log(q)).sum(-1)
    accept = np.minimum(teacher * inside[:, None], q).sum(-1)
    return entropy, accept, logits.argmax(-1), q * teacher.sum(-1, keepdims=True) - teacher


def single(*arrays):
    return (jnp.asarray(x, jnp.float32) for x in arrays)


# Less than a register, whole registers, and a part of one behind them.
@pytest.mark.parametrize("size", [5, 32, 37])
def test_figures_and_gradient_are_those_of_plain_arithmetic(implementation, size):
    logits, teacher, inside = make_problem(size=size)
    entropy, accept, best, slope = expected(logits, teacher, inside)
    arguments = tuple(single(logits, np.log(teacher), inside))
    got = jax.jit(soft_cross_entropy)(*arguments)
    for ours, want in zip(got, (entropy, accept, best), strict=True):
        np.testing.assert_allclose(ours, want, rtol=2e-6, atol=2e-6)
    weights = jnp.arange(len(logits), dtype=jnp.float32)
    gradient = jax.grad(lambda x: jnp.sum(weights * soft_cross_entropy(x, *arguments[1:])[0]))(arguments[0])
    np.testing.assert_allclose(gradient, slope * np.asarray(weights)[:, None], rtol=1e-5, atol=2e-6)
    rounded = jax.grad(
        lambda x: jnp.sum(weights * soft_cross_entropy(x, *arguments[1:], dtype=jnp.bfloat16)[0])
    )(arguments[0])
    np.testing.assert_allclose(rounded, gradient, rtol=2**-8, atol=1e-7)


def test_a_row_left_out_may_hold_anything(implementation):
    logits, teacher, inside = make_problem()
    logits[2, 3] = np.nan
    arguments = tuple(single(logits, np.log(teacher), inside))
    kept = jnp.arange(len(logits)) != 2

    def loss(x):
        return jnp.sum(jnp.where(kept, soft_cross_entropy(x, *arguments[1:])[0], 0))

    value, gradient = jax.value_and_grad(loss)(arguments[0])
    assert np.isfinite(value)
    assert not np.asarray(gradient[2]).any()
    assert np.isfinite(gradient).all()
    assert np.isnan(soft_cross_entropy(*arguments)[0][2])


def test_the_first_of_equal_logits_is_the_likeliest(implementation):
    logits = jnp.zeros((1, 40)).at[0, jnp.array([20, 33])].set(1)
    assert soft_cross_entropy(logits, jnp.full((1, 40), -3.0), jnp.ones(1))[2] == 20


def test_refuses_what_does_not_fit():
    ok = jnp.zeros((2, 8))
    for arguments, message in (
        ((ok, ok[:1], jnp.ones(2)), r"\(2, 8\) against \(1, 8\)"),
        ((ok, ok, jnp.ones(3)), r"inside must be \(2,\), got \(3,\)"),
        ((ok.astype(jnp.bfloat16), ok, jnp.ones(2)), "logits must be float32, got bfloat16"),
    ):
        with pytest.raises(KernelError, match=message):
            soft_cross_entropy(*arguments)


@pytest.mark.skipif(LEVEL is None, reason=f"no native kernel: {WHY}")
def test_programs_for_other_devices_do_without_the_kernel():
    traced = jax.jit(soft_cross_entropy).trace(jnp.zeros((2, 8)), jnp.zeros((2, 8)), jnp.ones(2))
    assert "SoftCrossEntropy" in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "SoftCrossEntropy" not in traced.lower(lowering_platforms=("tpu",)).as_text()
