"""Defects that other implementations shipped, each as a test named by its case number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from law_oracle import SIGNIFICANCE, p_value
from law_tools import begin, logits_of, tile, tree

from eaglejax import sampling
from eaglejax.errors import ConfigError
from eaglejax.sampling import Sampling
from eaglejax.speculate import verify as verify_module
from eaglejax.speculate.verify import verify

OPTIMISED = True

step = jax.jit(verify, static_argnames="method")
TRIALS = 200_000


def first_token(verdict, draft) -> np.ndarray:
    kept = jnp.take_along_axis(draft.tokens, verdict.path[:, 1:2], axis=1)[:, 0]
    return np.asarray(jnp.where(verdict.accepted > 0, kept, verdict.next_token))


def at_every_node(probs, nodes, rows):
    return jnp.broadcast_to(logits_of(probs), (rows.keys.shape[0], nodes, len(probs)))


def test_a01_argmax_drafts_are_one_hot():
    p = np.array([0.5, 0.3, 0.2])
    rows = tile([Sampling(temperature=1.0)], TRIALS, 3, seed=0)
    for token in (0, 2):
        draft = tree(np.full((TRIALS, 2), token), (0, 0))
        verdict = step(at_every_node(p, 2, rows), draft, rows, begin(rows))
        assert p_value(np.bincount(first_token(verdict, draft), minlength=3), p) > SIGNIFICANCE


@pytest.mark.parametrize("luck", [0.0, 1 - 2**-24, 1.0])
@pytest.mark.parametrize("p", [[1.0, 0, 0], [0.5, 0.3, 0.2]])
@pytest.mark.parametrize("shape", ["chain", "tree", "block"])
def test_a02_an_empty_residual_is_finite(monkeypatch, luck, p, shape):
    """p == q leaves nothing after a refusal; ``luck`` 1 forces refusals that cannot happen."""
    monkeypatch.setattr(verify_module, "uniforms", lambda keys, n: jnp.full((*keys.shape, n), luck))
    parent = (0, 0, 0) if shape == "tree" else (0, 0, 1)
    rows = tile([Sampling(temperature=1.0)], 64, 3, seed=0)
    q = jnp.broadcast_to(jnp.asarray(p, jnp.float32), (64, 3, 3))
    draft = tree(np.zeros((64, 3)), parent, q=q)
    method = "block" if shape == "block" else "token"
    verdict = verify(at_every_node(p, 3, rows), draft, rows, begin(rows), method=method)
    assert (np.asarray(p)[np.asarray(verdict.next_token)] > 0).all()
    if luck < 1:
        assert (verdict.accepted == max(draft.max_depth, 1)).all()


def test_a03_temperature_reaches_the_output():
    rows = sampling.rows([Sampling(temperature=1.0, seed=s) for s in range(300)], 3)
    draft = tree(np.ones((300, 2)), (0, 0))
    verdict = step(at_every_node([0.4, 0.3, 0.3], 2, rows), draft, rows, jnp.full(300, 9))
    assert set(first_token(verdict, draft)) == {0, 1, 2}


def test_a06_a13_seeds_replay_in_any_slot_and_batch():
    logits = logits_of(np.random.default_rng(0).dirichlet(np.ones(8), size=(1, 4)))
    draft = tree([[0, 1, 2, 3]], (0, 0, 0, 1))

    def run(seeds, slot):
        rows = sampling.rows([Sampling(temperature=0.9, seed=s) for s in seeds], 8)
        n = len(seeds)
        wide = jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *x.shape[1:])), draft)
        lengths = jnp.arange(n, dtype=jnp.int32).at[slot].set(40)
        out = step(jnp.broadcast_to(logits, (n, *logits.shape[1:])), wide, rows, lengths)
        return int(out.accepted[slot]), int(out.next_token[slot])

    for seed in range(7, 12):
        alone = run([seed], 0)
        assert alone == run([seed], 0) == run([1, 2, 3, seed], 3) == run([seed, 2, 3, 1], 0)
    assert len({run([seed], 0) for seed in range(7, 12)}) > 1


def test_a07_filters_hold_at_every_position():
    rows = sampling.rows([Sampling(temperature=1.0, top_p=0.5, seed=s) for s in range(64)], 3)
    for token in (0, 1):
        draft = tree(np.full((64, 3), token), (0, 0, 1))
        verdict = step(at_every_node([0.6, 0.3, 0.1], 3, rows), draft, rows, begin(rows))
        assert (verdict.next_token == 0).all()
        assert (verdict.accepted == (2 if token == 0 else 0)).all()
    logits = jax.random.normal(jax.random.key(0), (2, 4, 9))
    draft = tree(np.repeat(np.asarray(sampling.greedy(logits))[:1, [3, 0, 1, 2]], 2, 0), (0, 0, 1, 2))
    logits = jnp.broadcast_to(logits[:1], logits.shape)
    mixed = sampling.rows([Sampling(temperature=1.0, top_k=1, seed=3), Sampling()], 9)
    verdict = step(logits, draft, mixed, begin(mixed))
    assert int(verdict.accepted[0]) == int(verdict.accepted[1]) == 3
    assert int(verdict.next_token[0]) == int(verdict.next_token[1])


def test_a09_deterministic_siblings_keep_the_law():
    p = np.array([0.51, 0.49])
    rows = tile([Sampling(temperature=1.0)], TRIALS, 2, seed=4)
    draft = tree(np.broadcast_to([0, 0, 1], (TRIALS, 3)), (0, 0, 0))
    verdict = step(at_every_node(p, 3, rows), draft, rows, begin(rows))
    assert p_value(np.bincount(first_token(verdict, draft), minlength=2), p) > SIGNIFICANCE


def random_batch(n, vocab=12, nodes=5):
    logits = 2 * jax.random.normal(jax.random.key(1), (1, nodes, vocab))
    q = jax.nn.softmax(jax.random.normal(jax.random.key(2), (1, nodes, vocab)))
    draft = tree([[0, 3, 5, 3, 1]], (0, 0, 0, 1, 1), q=q)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *x.shape[1:])), (logits, draft))


def solo_equals_batch(settings, vocab=12):
    """Each row of a mixed batch decides and draws what it does alone (with its own static flags)."""
    logits, draft = random_batch(len(settings), vocab)
    rows = sampling.rows(settings, vocab)
    whole = step(logits, draft, rows, begin(rows))
    for i, setting in enumerate(settings):
        alone = sampling.rows([setting], vocab)
        out = step(logits[:1], jax.tree.map(lambda x: x[:1], draft), alone, begin(alone))
        assert int(out.accepted[0]) == int(whole.accepted[i]), setting
        assert int(out.next_token[0]) == int(whole.next_token[i]), setting
    return whole


@pytest.mark.parametrize("zero", [0, 0.0, None])
def test_a10_greedy_rows_in_a_sampled_batch(zero):
    cold = Sampling() if zero is None else Sampling(temperature=zero)
    whole = solo_equals_batch(
        [cold, Sampling(temperature=1.0, seed=5), cold, Sampling(temperature=1e-6, seed=1)]
    )
    # A tiny temperature judges drafts by q, so only its first token is comparable.
    _, draft = random_batch(4)
    assert first_token(whole, draft)[3] == first_token(whole, draft)[0]


def test_a11_banned_tokens_in_a_mixed_batch():
    ban = {i: -float("inf") for i in range(0, 12, 2)}
    settings = [Sampling(), *[Sampling(temperature=1.3, logit_bias=ban, seed=s) for s in range(32)]]
    logits, draft = random_batch(len(settings))
    rows = sampling.rows(settings, 12)
    processed = sampling.process(logits, rows)
    assert not np.isnan(sampling.distribution(processed, rows)).any()
    verdict = step(processed, draft, rows, begin(rows))
    tokens = np.asarray(verdict.next_token)[1:]
    assert (tokens % 2 == 1).all()
    np.testing.assert_array_equal(processed[0], logits[0])


def test_a12_rows_with_and_without_filters():
    ks = [None, 1, 5, 12, 22, 0]
    solo_equals_batch([Sampling(temperature=1.2, top_k=k, seed=i) for i, k in enumerate(ks)])


def test_a14_unseeded_rows_do_not_disturb_seeded_ones():
    logits, draft = random_batch(3)
    seeded, got = Sampling(temperature=1.5, seed=1), set()
    for _ in range(24):
        rows = sampling.rows([Sampling(temperature=1.5), seeded, Sampling(temperature=1.5)], 12)
        verdict = step(logits, draft, rows, begin(rows))
        got.add((int(verdict.next_token[0]), int(verdict.next_token[2])))
        row = (int(verdict.accepted[1]), int(verdict.next_token[1]))
        alone = sampling.rows([seeded], 12)
        one = step(logits[:1], jax.tree.map(lambda x: x[:1], draft), alone, begin(alone))
        assert row == (int(one.accepted[0]), int(one.next_token[0]))
    assert len(got) > 5


@pytest.mark.parametrize("vocab", [6, 300])
def test_a17_ties_go_to_the_lowest_id(vocab):
    logits = np.zeros((1, 2, vocab), np.float32)
    logits[..., [2, 4, vocab - 1]] = 3.0
    rows = sampling.rows([Sampling()], vocab)
    assert np.asarray(sampling.greedy(jnp.asarray(logits))).tolist() == [[2, 2]]
    assert np.asarray(sampling.distribution(jnp.asarray(logits), rows)).argmax(-1).tolist() == [[2, 2]]
    for token, accepted in ((2, 1), (4, 0), (vocab - 1, 0)):
        verdict = step(jnp.asarray(logits), tree([[0, token]], (0, 0)), rows, begin(rows))
        assert int(verdict.accepted[0]) == accepted
        assert int(verdict.next_token[0]) == 2


def test_a22_a_refused_eos_leaves_no_trace():
    eos = 3
    rows = sampling.rows([Sampling(), Sampling(temperature=1.0, top_p=0.5, seed=1)], 4)
    draft = tree(np.full((2, 3), eos), (0, 0, 1))
    verdict = step(at_every_node([0.1, 0.6, 0.2, 0.1], 3, rows), draft, rows, begin(rows))
    assert np.asarray(verdict.accepted).tolist() == [0, 0]
    assert np.asarray(verdict.next_token).tolist() == [1, 1]


@pytest.mark.parametrize("penalty", [-2.0, 0.0, 2.0])
def test_a83_penalties_shape_the_verified_path(penalty):
    """Greedy drafts of one repeated word are kept exactly as long as a plain penalised run repeats it."""
    vocab, nodes = 5, 6
    base = np.array([0.0, 3.0, 2.0, -1.0, -2.0], np.float32)
    rows = sampling.rows([Sampling(frequency_penalty=penalty)], vocab, [[1, 1, 1]])
    root = 1
    rows = sampling.count_tokens(rows, jnp.asarray([[root]]), jnp.asarray([1]))
    plain, counts = [], np.bincount([root], minlength=vocab)
    for _ in range(nodes):
        plain.append(int(np.argmax(base - penalty * counts)))
        counts[plain[-1]] += 1
    draft = tree([[root] * nodes], (0, *range(nodes - 1)))
    seen = jnp.tril(jnp.ones((1, nodes, nodes), bool))
    processed = sampling.process(jnp.broadcast_to(base, (1, nodes, vocab)), rows, draft.tokens, seen)
    verdict = step(processed, draft, rows, begin(rows))
    kept = int(verdict.accepted[0])
    assert [root] * kept + [int(verdict.next_token[0])] == plain[: kept + 1]
    assert kept == {-2.0: 5, 0.0: 5, 2.0: 0}[penalty]


def test_drafts_of_probability_zero_never_pass(monkeypatch):
    """Strictly u < ratio: even u = 0 refuses them."""
    monkeypatch.setattr(verify_module, "uniforms", lambda keys, n: jnp.zeros((*keys.shape, n)))
    p, rows = [0.0, 0.7, 0.3], tile([Sampling(temperature=1.0)], 32, 3, seed=0)
    q = jnp.full((32, 3, 3), 1 / 3)
    for draft, method in (
        (tree(np.zeros((32, 3)), (0, 0, 1)), "token"),
        (tree(np.zeros((32, 3)), (0, 0, 0)), "token"),
        (tree(np.zeros((32, 3)), (0, 0, 1), q=q), "token"),
        (tree(np.zeros((32, 3)), (0, 0, 0), q=q), "token"),
        (tree(np.zeros((32, 3)), (0, 0, 1), q=q), "block"),
        (tree(np.zeros((32, 3)), (0, 0, 1)), "block"),
    ):
        verdict = verify(at_every_node(p, 3, rows), draft, rows, begin(rows), method=method)
        assert not verdict.accepted.any()
        assert (verdict.next_token > 0).all()


def test_drafts_of_almost_no_chance_do_not_pass_on_a_draw_of_zero(monkeypatch):
    """A chance of 1e-31 is not that of a 23-bit number to be 0, which is 1e-7."""
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: jnp.zeros(shape, dtype))
    rows = tile([Sampling(temperature=1.0)], 4, 3, seed=0)
    q = jnp.full((4, 3, 3), 1 / 3)
    for draft, method in (
        (tree(np.zeros((4, 3)), (0, 0, 1)), "token"),
        (tree(np.zeros((4, 3)), (0, 0, 0)), "token"),
        (tree(np.zeros((4, 3)), (0, 0, 1), q=q), "token"),
        (tree(np.zeros((4, 3)), (0, 0, 0), q=q), "token"),
        (tree(np.zeros((4, 3)), (0, 0, 1), q=q), "block"),
        (tree(np.zeros((4, 3)), (0, 0, 1)), "block"),
    ):
        verdict = verify(at_every_node([1e-31, 0.7, 0.3], 3, rows), draft, rows, begin(rows), method=method)
        assert not verdict.accepted.any()
        assert (verdict.next_token > 0).all()


def test_greedy_rows_walk_greedily_under_any_proposal():
    """A wrong, one-hot or empty q does not change a greedy row."""
    logits = jnp.asarray(np.random.default_rng(8).normal(size=(2, 4, 6)), jnp.float32)
    best = np.asarray(sampling.greedy(logits))
    tokens = np.stack([np.zeros(2), best[:, 0], best[:, 1], best[:, 2]], 1)
    rows = sampling.rows([Sampling(), Sampling(temperature=1.0, seed=0)], 6)
    for q in (jnp.zeros((2, 4, 6)), jax.nn.one_hot(jnp.full((2, 4), 5), 6), jnp.full((2, 4, 6), 1 / 6)):
        draft = tree(tokens, (0, 0, 1, 2), q=q)
        for d, method in ((draft, "token"), (draft, "block"), (draft.replace(chain=False), "token")):
            verdict = step(logits, d, rows, begin(rows), method=method)
            assert int(verdict.accepted[0]) == 3
            assert int(verdict.next_token[0]) == best[0, 3]


def test_root_alone_is_plain_decoding():
    rows = tile([Sampling(temperature=1.0), Sampling()], TRIALS // 2, 3, seed=2)
    draft = tree(np.zeros((TRIALS, 1)), (0,))
    verdict = step(at_every_node([0.2, 0.5, 0.3], 1, rows), draft, rows, begin(rows))
    assert verdict.path.shape == (TRIALS, 1)
    counts = np.bincount(np.asarray(verdict.next_token)[: TRIALS // 2], minlength=3)
    assert p_value(counts, np.array([0.2, 0.5, 0.3])) > SIGNIFICANCE
    assert (np.asarray(verdict.next_token)[TRIALS // 2 :] == 1).all()


def test_what_cannot_be_verified_is_refused():
    rows = sampling.rows([Sampling()], 3)
    logits, draft = jnp.zeros((1, 3, 3)), tree([[0, 1, 2]], (0, 0, 0))
    with pytest.raises(ConfigError, match="chains"):
        verify(logits, draft, rows, begin(rows), method="block")
    with pytest.raises(ConfigError, match="'typical' is unknown"):
        verify(logits, draft, rows, begin(rows), method="typical")
    with pytest.raises(ConfigError, match="max_depth"):
        verify(logits, draft.replace(chain=True, max_depth=1), rows, begin(rows))
