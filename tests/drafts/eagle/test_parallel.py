"""Drafts that guess in parallel (P-EAGLE): one pass over masks is what training scores, and what a single
forward over the text and the masks behind it gives; a draft that learnt a text is accepted whole on it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_cases import EAGLE3, features_of, make, observation
from eagle_loop import make_target, target_config
from overfit import learnt

import eaglejax as ej
from eaglejax import sampling
from eaglejax.cli import methods
from eaglejax.config import SpeculativeConfig
from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.eagle.unroll import unroll
from eaglejax.drafts.registry import read_draft
from eaglejax.errors import ConfigError
from eaglejax.nn.visible import Causal
from eaglejax.train.objective import Objective
from eaglejax.train.registry import training_by
from eaglejax.train.settings import DraftSettings, RunSettings, TrainSettings

CONFIG = dataclasses.replace(EAGLE3, num_layers=2, num_aux=2, aux=(1, 2), aux_norm="joined", mask_id=3)
DEPTH = 4


def test_a_pass_over_masks_is_what_training_scores_and_what_one_forward_gives():
    """Of vLLM's order: the pairs of the text and the masks behind them in one causal pass."""
    params = make(CONFIG)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CONFIG.vocab_size, 10).astype(np.int32)
    features = features_of(CONFIG, tokens[:-1], 0, before=1)
    row = (tokens[:-1], tokens[1:], features)
    proposer = Eagle(CONFIG, ej.chain(DEPTH), sample=True)
    rows = sampling.rows([sampling.Sampling(temperature=1.0, seed=1)], CONFIG.vocab_size)

    @jax.jit
    def drafted(params, seen):
        state = proposer.init(params, batch=1, capacity=20)
        state = proposer.observe(params, state, seen)
        root, lengths = seen.following[:, -1], seen.count
        return proposer.propose(params, state, root, lengths, rows, rows.keys)

    draft, state = drafted(params, observation(CONFIG, [row], [0], 9))
    np.testing.assert_array_equal(state.cache.lengths, [9])
    got = np.asarray(draft.proposal.q)[0, :DEPTH]

    @jax.jit
    def whole(params, features, tokens):
        fused = eagle_model.fuse(params, CONFIG, features)
        masks = DEPTH - 1
        feature = jnp.concatenate(
            [fused, jnp.tile(eagle_model.mask_feature(params, CONFIG), (1, masks, 1))], 1
        )
        ids = jnp.concatenate([tokens, jnp.full((1, masks), CONFIG.mask_id)], axis=1)
        positions = jnp.arange(ids.shape[1])[None]
        cache = eagle_model.init_cache(CONFIG, 1, ids.shape[1], "float32")
        out, _ = eagle_model.step(params, CONFIG, feature, ids, positions, cache, Causal(), positions)
        return jax.nn.softmax(eagle_model.logits(params, CONFIG, out[:, -DEPTH:])[0])

    want = np.asarray(whole(params, jnp.asarray(features)[None], jnp.asarray(tokens[1:])[None]))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)

    @jax.jit
    def scored(params, features, tokens):
        states = unroll(params, CONFIG, features, tokens, DEPTH)
        return jnp.stack([jax.nn.softmax(eagle_model.logits(params, CONFIG, s[0, -1])) for s in states])

    again = np.asarray(scored(params, jnp.asarray(features)[None], jnp.asarray(tokens[1:])[None]))
    np.testing.assert_allclose(again, want, rtol=1e-4, atol=1e-6)
    # Levels differ, so that a mask that stood at a wrong place would show.
    assert np.abs(want[1:] - want[:-1]).max(axis=1).min() > 1e-3


def test_a_draft_that_learnt_a_text_is_accepted_whole_on_it(tmp_path):
    """From the trainer's loss to decoding, through a file; by the names that vLLM's users write."""
    target = make_target(target_config(num_layers=2), seed=3)
    objective = Objective(algorithm="peagle", steps=3, loss="hard_ce", step_decay=1.0)
    settings = TrainSettings(
        out="x",
        objective=objective,
        draft=DraftSettings(start="random", aux=(0, 1, 2), num_layers=1),
        run=RunSettings(compute_dtype="float32"),
    )
    bound, prompt, text = learnt(target, settings, tmp_path / "it")
    assert bound.proposer.config.mask_id == 0
    out = ej.generate(target, prompt, proposer=bound, max_new_tokens=len(text), ignore_eos=True)
    assert out.token_ids == text
    # The prompt's forward gave the first token; every round three guesses and one more.
    assert out.stats.num_drafts == -(-(len(text) - 1) // 4)
    named = SpeculativeConfig("p-eagle", model=str(tmp_path / "it"), num_speculative_tokens=3)
    assert methods.proposer_from(target, named).proposer == bound.proposer


def test_drafts_of_the_other_kind_are_not_trained_on(tmp_path):
    target = make_target(target_config(num_layers=2))
    for algorithm, other in (("peagle", "eagle3"), ("eagle3", "peagle")):
        objective = Objective(algorithm=algorithm, steps=2)
        draft = DraftSettings(start="random", aux=(0, 1, 2))
        settings = TrainSettings(out="x", objective=objective, draft=draft)
        family = training_by(objective)
        config = family.planned(settings, target)
        assert config.parallel == (algorithm == "peagle")
        made = family.prepare(config, settings, target, [], None, lambda key, make: make())
        assert ("mask" in made.weights) == config.parallel
        family.write(tmp_path / algorithm, config, made.complete(made.weights), None, dtype=jnp.float32)
        wrong = dataclasses.replace(
            settings,
            objective=dataclasses.replace(objective, algorithm=other),
            draft=DraftSettings(start=str(tmp_path / algorithm)),
        )
        with pytest.raises(ConfigError, match=f"is not for it: use '{algorithm}'"):
            family.planned(wrong, target, read_draft(tmp_path / algorithm)[1])
