"""Linear products, norms and the mixture of experts by themselves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax import pytree
from eaglejax.errors import ConfigError
from eaglejax.nn.linear import embedding, grouped_linear, linear
from eaglejax.nn.mlp import ACTIVATIONS, activation, gated_mlp
from eaglejax.nn.moe import MoeConfig, moe_mlp, route
from eaglejax.nn.norm import rms_norm

H, F, E = 16, 24, 5


def random(seed, *shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_row_alone_equals_the_same_row_in_company(dtype, rows):
    x, w, b = random(0, 3, H, dtype=dtype), random(1, H, F, dtype=dtype), random(2, F, dtype=dtype)
    got = jax.jit(linear)(x[None, :rows], w, b)
    want = np.asarray(x, np.float32) @ np.asarray(w, np.float32) + np.asarray(b, np.float32)
    assert got.shape == (1, rows, F)
    assert got.dtype == dtype
    np.testing.assert_allclose(
        got[0].astype(np.float32), want[:rows], rtol=1e-2 if dtype == jnp.bfloat16 else 1e-5, atol=1e-5
    )


def test_a_transposed_weight_and_another_result_dtype():
    x, w = random(0, 2, H, dtype=jnp.bfloat16), random(1, H, F, dtype=jnp.bfloat16)
    plain = linear(x, w, dtype=jnp.float32)
    assert plain.dtype == jnp.float32
    np.testing.assert_allclose(
        linear(x, w.T, transposed=True, dtype=jnp.float32), plain, rtol=1e-6, atol=1e-6
    )


@pytree.dataclass
class Doubled:
    """A packed weight that stands for twice its array."""

    half: jax.Array

    def matmul(self, x, *, transposed):
        return x.astype(jnp.float32) @ (2 * (self.half.T if transposed else self.half))

    def grouped_matmul(self, x, sizes):
        return jax.lax.ragged_dot(x, 2 * self.half, sizes)

    def take(self, ids):
        return 2 * self.half[ids]


def test_packed_weights_plug_in_everywhere():
    x, w, table, experts = random(0, 3, H), random(1, H, F), random(2, 7, H), random(3, 2, H, F)
    sizes = jnp.array([1, 2])
    pairs = [
        (linear(x, Doubled(w)), linear(x, 2 * w)),
        (linear(x, Doubled(table), transposed=True), linear(x, 2 * table, transposed=True)),
        (embedding(Doubled(table), jnp.array([3, 1])), embedding(2 * table, jnp.array([3, 1]))),
        (grouped_linear(x, Doubled(experts), sizes), grouped_linear(x, 2 * experts, sizes)),
    ]
    for got, want in pairs:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_norm_is_computed_in_f32_and_offset_counts_from_one():
    x = 1e3 * random(0, 4, H, dtype=jnp.float16)  # squares overflow half precision
    w = random(1, H)
    y = np.asarray(x, np.float64)
    want = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(w)
    got = rms_norm(x, w, 1e-6)
    assert got.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(
        np.asarray(rms_norm(x, w - 1, 1e-6, offset=True), np.float64), want, rtol=2e-3, atol=2e-3
    )


def test_unknown_activations_are_refused():
    with pytest.raises(ConfigError, match="silu"):
        activation("swoosh")


@pytest.fixture
def experts():
    return {
        "router": random(1, H, E),
        "experts": {"gate": random(2, E, H, F), "up": random(3, E, H, F), "down": random(4, E, F, H)},
    }


MIXTURES = [
    MoeConfig(E, 2, F, scores="softmax", normalize=True),
    MoeConfig(E, 3, F, scores="softmax", normalize=False),
    MoeConfig(E, 2, F, scores="of chosen", normalize=False),
]


@pytest.mark.parametrize("moe", MIXTURES, ids=["normalized", "raw", "topk_first"])
def test_mixture_equals_the_loop_over_its_experts(moe, experts):
    x = random(0, 2, 4, H)
    logits = np.asarray(x @ experts["router"], np.float64)
    want = np.zeros(x.shape)
    for at in np.ndindex(2, 4):
        chosen = np.argsort(-logits[at])[: moe.top_k]
        every = np.exp(logits[at] - logits[at].max())
        weights = every[chosen] / (
            every.sum() if moe.scores == "softmax" and not moe.normalize else every[chosen].sum()
        )
        for e, weight in zip(chosen, weights, strict=True):
            mlp = {name: w[e] for name, w in experts["experts"].items()}
            want[at] += weight * np.asarray(gated_mlp(x[at], mlp, "silu"))
    got = moe_mlp(x, experts, moe, "silu")
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_a_token_does_not_depend_on_its_batch_mates(experts):
    """Alone, in mixed company, and among copies of itself that crowd its experts."""
    moe = MIXTURES[0]
    run = jax.jit(lambda x: moe_mlp(x, experts, moe, "silu"))
    x = random(0, 64, H)
    alone = run(x[:1])[0]
    assert len(np.unique(route(x @ experts["router"], moe)[1])) == E
    scale = float(jnp.max(jnp.abs(alone)))
    for company in (x, jnp.broadcast_to(x[0], (64, H)), x[::-1]):
        at = int(jnp.argmax(jnp.all(company == x[0], axis=-1)))
        np.testing.assert_allclose(run(company)[at], alone, rtol=0, atol=2e-6 * scale)


def test_a_mixture_cannot_ask_for_more_experts_than_it_has():
    with pytest.raises(ConfigError, match="1 to 4"):
        MoeConfig(4, 5, F, scores="softmax", normalize=True)


def test_every_activation_is_smooth_at_its_name():
    x = jnp.linspace(-3, 3, 7)
    assert {name: float(act(x)[-1]) for name, act in ACTIVATIONS.items()} == pytest.approx(
        {"silu": 2.857722, "gelu": 2.995950, "gelu_tanh": 2.996363, "relu": 3.0, "swiglu_clamped": 2.981933},
        abs=1e-5,
    )
