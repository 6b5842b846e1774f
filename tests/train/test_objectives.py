"""Losses and alignment: against the peers' definitions, by hand, and under padding and packing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from tiny_model import HIDDEN, VOCAB
from train_tools import draft_config, packed

from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.model import EagleParams, init_eagle
from eaglejax.drafts.eagle.unroll import unroll
from eaglejax.errors import ConfigError
from eaglejax.train import chain as module
from eaglejax.train.batch import Batch, row_mask, shift
from eaglejax.train.chain import chain_loss, trained_rows
from eaglejax.train.eagle.objective import objective_loss
from eaglejax.train.losses import dpace_weights
from eaglejax.train.objective import Objective
from eaglejax.train.objectives import Head

MEMBER = np.zeros(VOCAB, bool)
MEMBER[np.random.default_rng(9).choice(VOCAB, 64, replace=False)] = True
IDS = jnp.asarray(np.flatnonzero(MEMBER), jnp.int32)
RNG = np.random.default_rng(3)
EMBED = jnp.asarray(RNG.normal(size=(VOCAB, HIDDEN)), jnp.float32)
TARGET_HEAD = np.asarray(RNG.normal(size=(HIDDEN, VOCAB)), np.float32)
STEPS = 3


@pytest.fixture(scope="module")
def draft():
    config = draft_config()
    weights = init_eagle(config, jax.random.key(1))
    weights = jax.tree.map(lambda w: w * 4 if w.ndim == 2 else w, weights)
    return config, EagleParams(weights, embed=EMBED, ids=IDS)


HEAD = Head(jnp.asarray(TARGET_HEAD[:, MEMBER]), IDS)


def with_summary(batch):
    """The batch with what the target says over its whole vocabulary."""
    logits = np.asarray(batch.hidden) @ TARGET_HEAD
    return batch.replace(
        top=jnp.asarray(logits.argmax(-1), jnp.int32), log_norm=jax.nn.logsumexp(jnp.asarray(logits), -1)
    )


@functools.partial(jax.jit, static_argnums=(1, 3))
def jitted_logits(params, config, batch, steps):
    states = unroll(
        params,
        config,
        batch.aux,
        shift(batch.tokens, 1),
        steps,
        positions=batch.positions,
        documents=batch.documents,
    )
    return [eagle_model.logits(params, config, s) for s in states]


def draft_logits(draft, batch, steps=STEPS):
    config, params = draft
    return [np.asarray(q) for q in jitted_logits(params, config, batch, steps)]


@functools.partial(jax.jit, static_argnums=(1, 2))
def jitted_value(params, config, objective, batch, head):
    rows = trained_rows(objective, head, batch)
    return objective_loss(params, config, objective, head, batch, rows)


def value(draft, objective, batch, head=HEAD):
    config, params = draft
    return jitted_value(params, config, objective, batch, head)


@pytest.fixture(scope="module")
def one_document():
    return with_summary(packed(24, capacity=24))


def test_the_loss_is_specforges_with_its_options(draft):
    # Behind the end of the row it trains on zero padding, which ours never does: no row may run off the end.
    batch = with_summary(packed(24, capacity=24))
    marks = np.asarray(batch.supervised).copy()
    marks[:, -(STEPS + 1) :] = False
    batch = batch.replace(supervised=jnp.asarray(marks))
    objective = Objective(
        steps=STEPS, alignment="unshifted", normaliser="positions", out_of_vocabulary="drop"
    )
    loss, _ = value(draft, objective, batch)
    logits = np.asarray(batch.hidden) @ TARGET_HEAD
    wanted, _ = oracles.specforge(logits, draft_logits(draft, batch), marks, MEMBER)
    assert abs(float(loss) - wanted) < 1e-6 * abs(wanted)


@pytest.mark.parametrize(("kind", "name"), [("kl", "kl"), ("soft_ce", "ce"), ("tv", "tv")])
def test_the_loss_is_speculators_with_its_options(draft, one_document, kind, name):
    objective = Objective(
        steps=STEPS, step_decay=0.7, alignment="inputs", loss=kind, out_of_vocabulary="keep"
    )
    loss, _ = value(draft, objective, one_document)
    logits = np.asarray(one_document.hidden) @ TARGET_HEAD
    marks = np.asarray(one_document.supervised)
    wanted = oracles.speculators(
        logits, draft_logits(draft, one_document), marks, MEMBER, decay=0.7, kind=name
    )
    # They add 1e-5 to the mask's sum.
    assert abs(float(loss) - wanted) < 2e-6 * abs(wanted)


@pytest.mark.parametrize("kind", ["alpha", "lambda"])
def test_acceptance_losses_use_the_mass_outside_the_draft_vocabulary(draft, one_document, kind):
    scales = {"kl_scale": 0.8, "kl_decay": 2.0} if kind == "lambda" else {}
    objective = Objective(steps=1, loss=f"lk_{kind}", out_of_vocabulary="keep", **scales)
    loss, metrics = value(draft, objective, one_document)
    logits = np.asarray(one_document.hidden) @ TARGET_HEAD
    mask = np.asarray(row_mask(one_document, 0))
    wanted = oracles.specforge_lk(
        kind, logits, draft_logits(draft, one_document, 1)[0], mask, MEMBER, **scales
    )
    assert abs(float(loss) - wanted) < 1e-6 * abs(wanted)
    alpha = float(metrics.accept[0] / metrics.judged[0])
    assert alpha < 0.9 * float(objective_alpha_without_norm(draft, objective, one_document))


def objective_alpha_without_norm(draft, objective, batch):
    _, metrics = value(draft, objective, batch.replace(log_norm=None))
    return metrics.accept[0] / metrics.judged[0]


def test_eagle1_is_the_official_loss():
    config = draft_config(
        version=1, draft_vocab_size=VOCAB, num_aux=0, aux=(), head_norm=False, own_head=False
    )
    params = EagleParams(init_eagle(config, jax.random.key(2)), embed=EMBED, head=jnp.asarray(TARGET_HEAD))
    batch = packed(20, capacity=20)
    loss, _ = value(
        (config, params), Objective(algorithm="eagle1", steps=1), batch, Head(jnp.asarray(TARGET_HEAD))
    )
    (state,) = unroll(params, config, batch.hidden[:, :, None], shift(batch.tokens, 1), 1)
    mask = np.asarray(row_mask(batch, 0)).astype(float)
    wanted = oracles.eagle1(np.asarray(batch.hidden), np.asarray(state), TARGET_HEAD, mask)
    assert abs(float(loss) - wanted) < 1e-6 * abs(wanted)


def test_dpace_weighs_guesses_by_how_far_a_draft_gets():
    """By its formula, with weights that no gradient passes; three guesses of confidence 1, 1/2, 1/4 by
    hand."""
    hand = dpace_weights(-jnp.log(jnp.asarray([1.0, 0.5, 0.25])), jnp.ones(3, bool), 0.5)
    np.testing.assert_allclose(hand, [1 + 0.75 + 0.46875, 0.75 + 0.46875, 0.46875], rtol=1e-6)
    gap = dpace_weights(-jnp.log(jnp.asarray([1.0, 0.5, 0.25])), jnp.asarray([True, False, True]), 0.5)
    np.testing.assert_allclose(gap, [1 + 0.625, 0, 0.625], rtol=1e-6)

    objective = Objective(
        algorithm="dflash", steps=STEPS, loss="hard_ce", position_weights="dpace", dpace_alpha=0.3
    )
    head, batch = Head(jnp.asarray(TARGET_HEAD)), packed(9, 7, capacity=20)
    states = jnp.asarray(RNG.normal(size=(STEPS, 1, 20, VOCAB)) * 3, jnp.float32)
    rows = trained_rows(objective, head, batch)

    @jax.jit
    def loss(states):
        return chain_loss(objective, head, batch, rows, None, list(states), lambda _, s, k: s)

    (found, metrics), grad = jax.value_and_grad(loss, has_aux=True)(states)
    labels = np.stack([shift(batch.tokens, 2 + k) for k in range(STEPS)])
    masks = np.stack([row_mask(batch, k) for k in range(STEPS)])
    want, weights = oracles.dpace(np.asarray(states), labels, masks, 0.3)
    assert masks.sum() > 10
    np.testing.assert_allclose(found, want, rtol=1e-5)
    q = np.exp(oracles.log_softmax(np.asarray(states, np.float64)))
    q[np.arange(STEPS)[:, None], 0, np.arange(20)[None], labels[:, 0]] -= 1
    counts = np.maximum(masks.sum((1, 2)), 1)[:, None, None, None]
    np.testing.assert_allclose(grad, weights[..., None] * q / counts, rtol=1e-4, atol=1e-6)
    plain = dataclasses.replace(objective, position_weights="steps", dpace_alpha=0.5)
    other = chain_loss(plain, head, batch, rows, None, list(states), lambda _, s, k: s)[1]
    np.testing.assert_array_equal(metrics.loss, other.loss)


def test_hass_feeds_states_back_without_their_gradient_and_adds_the_top_tokens():
    config = draft_config(
        version=1, draft_vocab_size=VOCAB, num_aux=0, aux=(), head_norm=False, own_head=False
    )
    params = EagleParams(init_eagle(config, jax.random.key(2)), embed=EMBED, head=jnp.asarray(TARGET_HEAD))
    batch, head = packed(20, capacity=20), Head(jnp.asarray(TARGET_HEAD))

    def loss(weights, objective):
        return value((config, params.replace(weights=weights)), objective, batch, head)[0]

    second_only = Objective(
        algorithm="hass", steps=2, step_weights=(0.0, 1.0), top_weight=0.0, token_weight=0.0
    )
    states = unroll(params, config, batch.hidden[:, :, None], shift(batch.tokens, 1), 2)
    mask = np.asarray(row_mask(batch, 1)).astype(float)
    d = np.abs(np.asarray(states[1], np.float64) - oracles.left(np.asarray(batch.hidden, np.float64), 2))
    wanted = (np.where(d < 1, 0.5 * d * d, d - 0.5).mean(-1) * mask).sum() / mask.sum()
    assert abs(float(loss(params.weights, second_only)) - wanted) < 1e-5 * wanted
    more = dataclasses.replace(second_only, top_weight=1.0, top_tokens=VOCAB)
    everything = dataclasses.replace(second_only, token_weight=1.0)
    # All tokens being "top", the third term is the whole cross entropy.
    assert float(loss(params.weights, more)) == pytest.approx(
        float(loss(params.weights, everything)), rel=1e-5
    )


def test_rows_of_the_tight_alignment_read_and_guess_answers():
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    documents = jnp.asarray([[1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0]])
    supervised = jnp.asarray([[0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 0]], bool)
    batch = Batch(tokens, documents, jnp.zeros_like(tokens), supervised)
    # Document 1 answers at 3..5: its first draft is row 2 (input 3, label 4), its last row 3 (input 4, label
    # 5).
    assert np.flatnonzero(row_mask(batch, 0)[0]).tolist() == [2, 3, 6, 7]
    assert np.flatnonzero(row_mask(batch, 1)[0]).tolist() == [1, 2, 6]
    assert np.flatnonzero(row_mask(batch, 0, "inputs")[0]).tolist() == [2, 3, 4, 6, 7, 8]
    assert np.flatnonzero(row_mask(batch, 0, "unshifted")[0]).tolist() == [3, 4, 7, 8]
    with pytest.raises(ConfigError, match="unshifted"):
        row_mask(batch, 0, "tighter")


def test_packed_documents_train_as_separate_ones(draft):
    """Loss and gradient of two documents in one row, with padding, are those of two rows, and of more
    padding."""
    config, params = draft
    together = with_summary(packed(13, 9, capacity=26))
    objective = Objective(steps=4, out_of_vocabulary="keep")

    def cut(begin, end, capacity):
        def part(x):
            if x is None:
                return None
            piece = np.asarray(x)[:, begin:end]
            return jnp.asarray(
                np.pad(piece, [(0, 0), (0, capacity - (end - begin)), *[(0, 0)] * (piece.ndim - 2)])
            )

        return jax.tree.map(part, together)

    separate = jax.tree.map(lambda *x: jnp.concatenate(x), cut(0, 13, 16), cut(13, 22, 16))
    separate = separate.replace(documents=jnp.minimum(separate.documents, 1))
    empty = jax.tree.map(lambda x: jnp.zeros_like(x)[:1], separate)
    padded = jax.tree.map(lambda *x: jnp.concatenate(x), separate, empty)

    @jax.jit
    def gradient(batch):
        rows = trained_rows(objective, HEAD, batch)
        return jax.value_and_grad(
            lambda w: objective_loss(params.replace(weights=w), config, objective, HEAD, batch, rows)[0]
        )(params.weights)

    wanted = gradient(together)
    for other in (separate, padded):
        found = gradient(other)
        for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_logits_computed_again_give_the_gradient_of_logits_that_were_kept(draft, one_document, monkeypatch):
    config, params = draft
    objective = Objective(steps=2, out_of_vocabulary="keep")
    rows = trained_rows(objective, HEAD, one_document)

    def loss(weights):
        found = params.replace(weights=weights)
        return objective_loss(found, config, objective, HEAD, one_document, rows)[0]

    remade = []
    real = jax.checkpoint
    monkeypatch.setattr(module.jax, "checkpoint", lambda f: remade.append(f) or real(f))
    kept = jax.jit(jax.grad(loss))(params.weights)
    assert not remade
    monkeypatch.setattr(module, "_KEPT_LOGITS", 0)
    again = jax.jit(jax.grad(lambda w: loss(w)))(params.weights)
    assert len(remade) == objective.steps
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_wrong_prediction_does_not_change_what_later_steps_are_fed(draft, one_document):
    """Teacher forcing: the states of all steps are a function of the data's tokens, not of the draft's
    choices."""
    config, params = draft
    other = params.replace(weights={**params.weights, "head": -params.weights["head"]})
    found = [draft_logits((config, p), one_document) for p in (params, other)]
    assert all(np.array_equal(a, -b) for a, b in zip(*found, strict=True))


def test_tokens_that_the_draft_does_not_know_are_misses_and_leave_the_loss(draft, one_document):
    drop, keep = (Objective(steps=1, out_of_vocabulary=o) for o in ("drop", "keep"))
    known = MEMBER[np.asarray(one_document.top)]
    mask = np.asarray(row_mask(one_document, 0))
    wanted = int((mask & oracles.left(known, 1)).sum())
    assert 0 < wanted < mask.sum()
    assert int(value(draft, drop, one_document)[1].rows[0]) == wanted
    metrics = value(draft, keep, one_document)[1]
    assert int(metrics.rows[0]) == int(metrics.judged[0]) == mask.sum()
    assert int(metrics.hits[0]) <= wanted


def test_noise_lies_on_the_features_within_its_bounds_in_training_alone(draft, one_document, monkeypatch):
    config, params = draft
    noisy, rows = Objective(steps=1, noise=0.1), jnp.ones((1,))
    seen = []

    def spy(params, config, features, *args, **options):
        seen.append(features)
        raise InterruptedError

    monkeypatch.setattr("eaglejax.train.eagle.objective.unroll", spy)
    for key in (jax.random.key(0), jax.random.key(1), None):
        with pytest.raises(InterruptedError):
            objective_loss(params, config, noisy, HEAD, one_document, rows, key)
    first, second, none = (np.asarray(f - one_document.aux) for f in seen)
    assert not none.any()
    for noise in (first, second):
        assert 0.09 < np.abs(noise).max() <= 0.1 + 1e-6
        assert abs(noise.mean()) < 0.01
        assert noise.std() == pytest.approx(0.2 / 12**0.5, rel=0.05)
    assert np.abs(first - second).max() > 0.05


def test_objectives_that_cannot_be_are_refused():
    for changes, words in (
        ({"algorithm": "eagle1", "steps": 3}, "hass"),
        ({"steps": 0}, "at least one"),
        ({"steps": 3, "step_weights": (1.0,)}, "1 step_weights for 3"),
        ({"loss": "l2"}, "soft_ce"),
        ({"step_weights": (0.0, 0.0), "steps": 2}, "all zero"),
    ):
        with pytest.raises(ConfigError, match=words):
            Objective(**changes)
