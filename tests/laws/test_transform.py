"""The sampling transform: its support against transformers' warpers, ties, penalties, draws, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from law_oracle import SIGNIFICANCE, p_value, transform
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eaglejax import sampling
from eaglejax.errors import ConfigError, RequestError
from eaglejax.sampling import Sampling

GRID = [
    Sampling(temperature=t, top_k=k, top_p=p, min_p=m)
    for t in (0.5, 1.0, 2.0)
    for k, p, m in [
        (3, 0.9, 0),
        (0, 0.9, 0),
        (40, 0.7, 0),
        (0, 1, 0.05),
        (300, 0.95, 0.02),
        (0, 0.99, 0),
        (5, 1, 0),
    ]
]


@pytest.mark.parametrize("vocab", [50, 6000])
def test_a08_support_equals_transformers(vocab):
    """Both the small and the large vocabulary's search: top-k of 300 and flat distributions leave the sorted
    head."""
    logits = (2.5 * np.random.default_rng(vocab).normal(size=(len(GRID), 2, vocab))).astype(np.float32)
    rows = sampling.rows(GRID, vocab)
    got = np.asarray(jax.jit(sampling.distribution)(jnp.asarray(logits), rows))
    for row, s in enumerate(GRID):
        scores = TemperatureLogitsWarper(s.temperature)(None, torch.tensor(logits[row]))
        if s.top_k:
            scores = TopKLogitsWarper(min(s.top_k, vocab))(None, scores)
        if s.top_p < 1:
            scores = TopPLogitsWarper(s.top_p)(None, scores)
        if s.min_p:
            scores = MinPLogitsWarper(s.min_p)(None, scores)
        want = torch.softmax(scores, -1).numpy()
        np.testing.assert_array_equal(got[row] > 0, want > 0, err_msg=str(s))
        np.testing.assert_allclose(got[row], want, rtol=2e-5, atol=1e-9)
    np.testing.assert_allclose(got.sum(-1), 1, atol=1e-5)


def test_the_law_of_a_vocabulary_of_152k():
    """Filters, mass and normalisation against float64: a nucleus of 1e5 near-equal tokens, a tail beside one
    certain token, and a top-k within a nucleus. A distribution in f32 may be off by a token at the edge."""
    vocab, rng = 151_936, np.random.default_rng(0)
    settings = [
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=0.7, top_p=0.999),
        Sampling(temperature=1.3, top_k=1000, top_p=0.95, min_p=0.001),
    ]
    logits = (np.array([[0.3], [1.0], [2.0]]) * rng.normal(size=(3, vocab))).astype(np.float32)
    logits[1, 77] = 16.0
    rows = sampling.rows(settings, vocab)
    got = np.asarray(jax.jit(sampling.distribution)(jnp.asarray(logits)[:, None], rows), np.float64)[:, 0]
    for row, s in enumerate(settings):
        z = logits[row].astype(np.float64)
        order = np.argsort(-z, kind="stable")
        p = np.exp((z[order] - z.max()) / s.temperature)
        p[s.top_k or vocab :] = 0
        p /= p.sum()
        p[np.cumsum(p) - p >= s.top_p] = 0
        p[p < s.min_p * p[0]] = 0
        p /= p.sum()
        assert np.abs(got[row][order] - p).sum() < 2e-5
        assert abs(int((got[row] > 0).sum()) - int((p > 0).sum())) <= 3
        assert abs(got[row].sum() - 1) < 1e-6


def test_a08_ties_at_the_edges_are_kept():
    probs = np.array([0.4, 0.2, 0.2, 0.1, 0.1])
    for vocab in (5, 5000):
        logits = np.full((3, 1, vocab), -np.inf, np.float32)
        logits[..., :5] = np.log(probs)
        settings = [
            Sampling(temperature=1, top_k=2),
            Sampling(temperature=1, top_p=0.5),
            Sampling(temperature=1, top_k=4, top_p=0.99999),  # top-p must not lose top-k's tied last tokens
        ]
        got = np.asarray(sampling.distribution(jnp.asarray(logits), sampling.rows(settings, vocab)))[:, 0, :5]
        np.testing.assert_allclose(got[0], [0.5, 0.25, 0.25, 0, 0], rtol=1e-5)
        np.testing.assert_allclose(got[1], [0.5, 0.25, 0.25, 0, 0], rtol=1e-5)
        np.testing.assert_allclose(got[2], probs, rtol=1e-5)


def test_filters_work_on_ties_zeros_and_extremes():
    """Probabilities against the sorting oracle on logits with many ties, zeros, huge values and bans, alone
    and in a batch."""
    rng = np.random.default_rng(4)
    settings = [
        Sampling(temperature=t, top_k=k, top_p=p) for t in (0.3, 1.5) for k in (0, 2, 7) for p in (0.6, 1.0)
    ]
    logits = rng.integers(-3, 3, size=(len(settings), 3, 12)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    logits[:, 1] *= 1e30
    logits[:, 2] *= 1e-30
    logits[..., 5] = 0.0
    got = np.asarray(sampling.distribution(jnp.asarray(logits), sampling.rows(settings, 12)))
    for row, s in enumerate(settings):
        for node in range(3):
            want = transform(logits[row, node], s.temperature, s.top_k, s.top_p)
            np.testing.assert_allclose(got[row, node], want, atol=1e-6, err_msg=f"{s} {logits[row, node]}")


def test_tiny_temperatures_and_empty_distributions_are_finite():
    settings = [Sampling(temperature=t, top_p=0.9) for t in (1e-6, 1e-45, 1e-300, 1e38)]
    logits = jnp.asarray([[[1e4, -1e4, 0.0, -jnp.inf]]] * 4, jnp.float32)
    probs = np.asarray(sampling.distribution(logits, sampling.rows(settings, 4)))[:, 0]
    np.testing.assert_allclose(probs[:3], [[1, 0, 0, 0]] * 3)
    np.testing.assert_allclose(probs[3], [1 / 3, 1 / 3, 1 / 3, 0], atol=1e-5)
    empty = sampling.distribution(jnp.full((4, 1, 4), -jnp.inf), sampling.rows(settings, 4))
    np.testing.assert_array_equal(empty, 0.0)


def test_mass_keeps_the_tail():
    """1e5 rare tokens beside a certain one: a running f32 sum would lose all of their mass."""
    weights = jnp.full((150_000,), 2e-8, jnp.float32).at[7].set(1.0)
    assert abs(float(sampling.mass(weights)) - (1 + 149_999 * 2e-8)) < 2e-5


def test_draws_follow_the_weights_over_many_blocks():
    vocab, trials = 300, 200_000
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.full(vocab, 0.3)) * (rng.random(vocab) < 0.8)
    keys = jax.random.split(jax.random.key(1), trials)
    step = jax.jit(
        jax.vmap(lambda key: sampling.draw(jnp.asarray(7.5 * probs, jnp.float32)[None], key[None])[0])
    )
    counts = np.bincount(np.asarray(step(keys)), minlength=vocab)
    assert p_value(counts, probs) > SIGNIFICANCE
    shifted = np.roll(probs, 1)
    shifted[probs == 0] = 0
    assert p_value(counts, 0.97 * probs + 0.03 * shifted) < SIGNIFICANCE


def test_penalties_count_ancestors_as_a_plain_run_would():
    """A83: a node's logits after penalties equal those of a run that has emitted the path to it."""
    vocab, parent = 7, np.array([0, 0, 0, 1, 1, 3])
    settings = [
        Sampling(repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3),
        Sampling(frequency_penalty=-2.0),
        Sampling(frequency_penalty=2.0, logit_bias={3: -1.5}),
        Sampling(),
    ]
    rng = np.random.default_rng(3)
    prompts = [[1, 1, 2], [5], [0, 6], [3]]
    tokens = np.array([[4, 2, 2, 4, 6, 4]] * 4)
    generated = np.array([[0, 4]] * 4)  # the root, 4, is the last of them
    logits = rng.normal(size=(4, 6, vocab)).astype(np.float32)
    rows = sampling.rows(settings, vocab, prompts)
    rows = sampling.count_tokens(rows, jnp.pad(jnp.asarray(generated), [(0, 0), (0, 2)]), jnp.full(4, 2))
    ancestors = np.zeros((4, 6, 6), bool)
    for i in range(6):
        j = i
        while True:
            ancestors[:, i, j] = True
            if j == 0:
                break
            j = parent[j]
    process = jax.jit(sampling.process)
    got = process(jnp.asarray(logits), rows, jnp.asarray(tokens), jnp.asarray(ancestors))
    for row, s in enumerate(settings):
        for node in range(6):
            text = [*generated[row], *[tokens[row, j] for j in range(1, node + 1) if ancestors[row, node, j]]]
            want = logits[row, node].copy()
            for token, value in s.logit_bias or ():
                want[token] += value
            ids = torch.tensor([[*prompts[row], *text]])
            processor = RepetitionPenaltyLogitsProcessor(s.repetition_penalty)
            want = processor(ids, torch.tensor(want)[None])[0].numpy()
            counts = np.bincount(text, minlength=vocab)
            want = want - s.presence_penalty * (counts > 0) - s.frequency_penalty * counts
            np.testing.assert_allclose(got[row, node], want, rtol=1e-6, atol=1e-6)
            plain = sampling.rows([s], vocab, [prompts[row]])
            plain = sampling.count_tokens(plain, jnp.asarray([text]), jnp.asarray([len(text)]))
            if plain.penalised or plain.biased:
                alone = process(jnp.asarray(logits[row : row + 1, node : node + 1]), plain)
                np.testing.assert_array_equal(got[row, node], alone[0, 0])
    np.testing.assert_array_equal(got[3], logits[3])


def test_keys_depend_on_the_seed_alone_and_purposes_differ():
    a = sampling.rows([Sampling(seed=s) for s in (7, 2**40 + 7, 0)], 4)
    b = sampling.rows([Sampling(seed=0), Sampling(seed=7)], 4)
    data = jax.random.key_data
    np.testing.assert_array_equal(np.asarray(data(a.keys))[[2, 0]], data(b.keys))
    assert len({tuple(k) for k in np.asarray(data(a.keys)).tolist()}) == 3
    keys = sampling.round_keys(a, jnp.asarray([5, 5, 5]))
    folded = [data(sampling.fold(keys, int(p))) for p in sampling.Purpose]
    assert len({tuple(k) for k in np.concatenate(folded).tolist()}) == 12
    fresh = sampling.rows([Sampling(temperature=1), Sampling(temperature=1)], 4)
    assert (data(fresh.keys)[0] != data(fresh.keys)[1]).any()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (-0.1, float("nan"), float("inf"), "0.7", True, None)],
        *[("top_k", v) for v in (-1, 2.5, "5", False, float("nan"))],
        *[("top_p", v) for v in (0, -0.5, 1.01, float("nan"), "1", True)],
        *[("min_p", v) for v in (-0.1, 1.5, float("nan"), None)],
        *[("repetition_penalty", v) for v in (0, -1, 9e-4, 1001, 3e38, float("inf"), "x")],
        *[
            (f, v)
            for f in ("presence_penalty", "frequency_penalty")
            for v in (float("nan"), float("inf"), 3e38, -1001, "1", True)
        ],
        *[
            ("logit_bias", v)
            for v in ({-1: 1.0}, {"a": 1.0}, {1: "b"}, {1: float("nan")}, {1: float("inf")}, 3, "ab")
        ],
        *[("logit_bias", {1: v}) for v in (3e38, -3e38, 1.1e9, -1.1e9)],
        *[("logit_bias", v) for v in ({True: 1.0}, {1: True}, {1: 10**400})],
        *[("seed", v) for v in (-1, 1.5, "7", True, 2**64)],
    ],
)
def test_values_that_cannot_be_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        Sampling(**{field: value})


def test_what_other_servers_accept_is_accepted():
    for value in (-2, 2, -100.0, 100):
        Sampling(presence_penalty=value, frequency_penalty=value, logit_bias={1: value})
    for value in (0.01, 2, 10):
        Sampling(repetition_penalty=value)
    Sampling(logit_bias={1: -1e9, 2: float("-inf")})


def test_uniforms_are_finer_than_f32_and_never_0_or_1():
    """2**25 draws of 23 bits hold about four zeros, each of which would accept a draft of chance 1e-31."""
    draws = np.asarray(jax.jit(sampling.uniforms, static_argnums=1)(jax.random.key(0), 2**25))
    small = draws[draws < 2.0**-23]
    assert draws.max() < 1
    assert small.size > 0
    assert (small > 0).all()
    assert len(np.unique(small)) == small.size
    near = draws[draws < 2.0**-15]
    assert abs(near.mean() * 2.0**16 - 1) < 6 / np.sqrt(3 * near.size)


def test_a_draw_of_zero_takes_no_token_of_almost_no_chance(monkeypatch):
    """The first of a uniform's two numbers is 0 once in 8 million draws: both numbers 0 is the worst."""
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: jnp.zeros(shape, dtype))
    keys = jax.random.split(jax.random.key(0), 2)
    for vocab in (3, 400):
        weights = jnp.zeros((2, vocab)).at[:, 0].set(1e-31).at[:, -1].set(1.0)
        assert sampling.draw(weights, keys).tolist() == [vocab - 1] * 2


def test_settings_are_hashable_and_equal_by_value():
    assert hash(Sampling(logit_bias={3: 1, 1: -2.0})) == hash(Sampling(logit_bias={1: -2, 3: 1.0}))
    assert Sampling(logit_bias={}) == Sampling(logit_bias=None)


def test_rows_refuse_what_does_not_fit_the_vocabulary():
    with pytest.raises(ConfigError, match="token 9"):
        sampling.rows([Sampling(logit_bias={9: 1.0})], 9)
    with pytest.raises(ConfigError, match="every token"):
        sampling.rows([Sampling(logit_bias={0: -float("inf"), 1: -float("inf")})], 2)
    with pytest.raises(ConfigError, match="prompts"):
        sampling.rows([Sampling(repetition_penalty=1.1)], 9)
    with pytest.raises(ConfigError, match="2 prompts"):
        sampling.rows([Sampling()], 9, [[1], [2]])
    with pytest.raises(ConfigError, match="at least one"):
        sampling.rows([], 9)
    with pytest.raises(RequestError, match="prompt 0"):
        sampling.rows([Sampling(presence_penalty=1.0)], 9, [[9]])
