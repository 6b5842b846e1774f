"""Medusa heads trained on one text come to accept the whole block of it, and so do those that are written."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from eagle_loop import make_target, target_config
from rotated_tools import check_rotated

import eaglejax as ej
from eaglejax.drafts.registry import load_draft
from eaglejax.drafts.tree import chain
from eaglejax.errors import ConfigError
from eaglejax.train.features import with_features
from eaglejax.train.medusa.family import MedusaTraining
from eaglejax.train.objective import Objective
from eaglejax.train.packing import assemble
from eaglejax.train.samples import Sample
from eaglejax.train.settings import DraftSettings, RunSettings, TrainSettings

TARGET = make_target(target_config(), seed=6)
FAMILY = MedusaTraining()
PROMPT, TOKENS, HEADS = [3, 1, 4, 1, 5], 24, 3


def settings(draft=None, **objective):
    return TrainSettings(
        draft=draft or DraftSettings(start="layer", train_head=True),
        objective=Objective(algorithm="medusa", steps=HEADS, **objective),
        run=RunSettings(compute_dtype="float32"),
    )


def trained(how, updates):
    """(answer, draft, weights, their metrics) of an overfit to the target's own answer. The rate falls to
    nothing: at a constant one the last step still turns what the target itself is nearly undecided about."""
    answer = ej.generate(TARGET, PROMPT, max_new_tokens=TOKENS, ignore_eos=True).token_ids
    ids = np.asarray([*PROMPT, *answer], np.int32)
    sample = Sample(ids, np.arange(len(ids)) >= len(PROMPT), "one")
    config = FAMILY.planned(how, TARGET)
    draft = FAMILY.prepare(config, how, TARGET, [sample], None, lambda key, make: make())
    batch = with_features(TARGET, assemble([sample], 32), ())
    rows = FAMILY.trained_rows(how.objective, draft.head, batch)
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-2, updates))

    def loss(weights):
        return FAMILY.loss(
            weights, config, how.objective, draft.frozen, draft.head, batch, rows, compute_dtype=jnp.float32
        )

    @jax.jit
    def run(weights):
        def step(carry, _):
            weights, state = carry
            value, slope = jax.value_and_grad(lambda w: loss(w)[0])(weights)
            change, state = optimizer.update(slope, state)
            return (optax.apply_updates(weights, change), state), value

        start = (weights, optimizer.init(weights))
        (weights, _), values = jax.lax.scan(step, start, None, length=updates)
        return weights, values, *loss(weights)

    weights, values, last, metrics = run(draft.weights)
    assert last < values[0]
    return answer, draft, weights, metrics


@pytest.mark.parametrize("loss", ["soft_ce", "hard_ce"])
def test_one_text_is_learnt_to_the_whole_block(loss, tmp_path):
    how = settings(loss=loss)
    answer, draft, weights, metrics = trained(how, 800)
    np.testing.assert_array_equal(metrics.hits, metrics.judged)
    assert float(metrics.judged.min()) > 15
    whole = draft.complete(weights)
    bound = FAMILY.bound(draft.config, whole, TARGET, None, chain(5))
    assert bound.proposer.depth == HEADS, "a chain beyond the last head is cut"
    FAMILY.write(tmp_path / "out", draft.config, whole, None, dtype=np.float32)
    for proposer in (bound, load_draft(tmp_path / "out", TARGET, tree=chain(HEADS))):
        got = ej.generate(TARGET, PROMPT, proposer=proposer, max_new_tokens=TOKENS - 3, ignore_eos=True)
        assert got.token_ids == answer[: TOKENS - 3]
        assert got.stats.mean_acceptance_length == HEADS + 1
    if loss == "soft_ce":
        check_rotated(TARGET, PROMPT, answer, tmp_path / "out", tmp_path / "aligned", "eaglejax")


def test_the_loss_is_that_of_a_plain_form():
    """Soft cross entropy of head k at row t with the target's own word on token t + 2 + k, weighed."""
    how = settings(step_decay=0.5)
    ids = np.random.default_rng(0).integers(0, 24, 20).astype(np.int32)
    sample = Sample(ids, np.arange(20) >= 4, "one")
    config = FAMILY.planned(how, TARGET)
    draft = FAMILY.prepare(config, how, TARGET, [sample], None, lambda key, make: make())
    weights = jax.tree.map(
        lambda w: w + 0.3 * jax.random.normal(jax.random.key(w.size), w.shape), draft.weights
    )
    batch = with_features(TARGET, assemble([sample], 24), ())
    rows = FAMILY.trained_rows(how.objective, draft.head, batch)
    value, metrics = FAMILY.loss(
        weights, config, how.objective, draft.frozen, draft.head, batch, rows, compute_dtype=jnp.float32
    )
    hidden = np.asarray(batch.hidden[0], np.float64)
    said = hidden @ np.asarray(TARGET.params["head"], np.float64)
    p = np.exp(said - said.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    total = 0.0
    for k, head in enumerate(weights["heads"]):
        layer = head["layers"][0]
        y = hidden @ np.asarray(layer["w"]) + np.asarray(layer["b"])
        z = (hidden + y / (1 + np.exp(-y))) @ np.asarray(head["out"])
        log_q = z - z.max(-1, keepdims=True)
        log_q -= np.log(np.exp(log_q).sum(-1, keepdims=True))
        at = [t for t in range(20) if t + 2 + k < 20 and t + 1 + k >= 4]
        one = [-(p[t + 1 + k] * log_q[t]).sum() for t in at]
        assert float(metrics.rows[k]) == len(at)
        total += 0.5**k * np.mean(one)
    np.testing.assert_allclose(float(value), total, rtol=1e-4)


def test_a_new_head_says_what_the_target_says():
    """The published start: blocks of zero, the target's matrix."""
    for train_head in (True, False):
        how = settings(DraftSettings(start="layer", train_head=train_head))
        config = FAMILY.planned(how, TARGET)
        assert config.output == ("each" if train_head else "target")
        sample = Sample(np.arange(8, dtype=np.int32), np.ones(8, bool), "one")
        draft = FAMILY.prepare(config, how, TARGET, [sample], None, lambda key, make: make())
        bound = FAMILY.bound(config, draft.complete(draft.weights), TARGET, None, chain(1))
        got = ej.generate(TARGET, PROMPT, proposer=bound, max_new_tokens=6, ignore_eos=True)
        assert got.stats.num_draft_tokens > 0
        size = FAMILY.size(config, how)
        assert size.trained == sum(x.size for x in jax.tree.leaves(draft.weights))
        assert size.shipped == size.trained
        assert FAMILY.cost(config, np.float32).parameters == size.shipped


def test_settings_that_heads_do_not_have_are_refused():
    for draft, match in (
        (DraftSettings(start="fit"), "'fit' is a closed form for EAGLE"),
        (DraftSettings(start="layer", num_heads=2), "no draft.num_heads"),
        (DraftSettings(start="layer", aux=(1, 2)), "no draft.aux"),
        (DraftSettings(start="layer", target_rows=True), "no draft.target_rows"),
    ):
        with pytest.raises(ConfigError, match=match):
            FAMILY.planned(dataclasses.replace(settings(), draft=draft), TARGET)
