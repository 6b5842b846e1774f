"""What MTP modules draft is what training unrolls, for one module asked again and for several, over any kind
of layer; trained on one text they are accepted whole on it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mtp_tools import GROUPED, LATENT, modules_for
from rotated_tools import check_rotated

import eaglejax as ej
from eaglejax import sampling
from eaglejax.drafts.base import Observation
from eaglejax.drafts.mtp.probe import guesses
from eaglejax.drafts.mtp.proposer import Mtp
from eaglejax.measure.quality import Features, Texts
from eaglejax.models.config import FINAL
from eaglejax.sampling import Sampling
from eaglejax.train.features import with_features
from eaglejax.train.objective import Objective
from eaglejax.train.objectives import Head
from eaglejax.train.packing import assemble
from eaglejax.train.registry import training_by
from eaglejax.train.samples import Sample
from eaglejax.train.settings import DraftSettings, RunSettings, TrainSettings

TEXTS = np.random.default_rng(0).integers(0, 24, (2, 9)).astype(np.int32)


@pytest.mark.parametrize(
    ("target", "modules", "recycle", "length"),
    [(GROUPED, 1, "post_norm", 4), (GROUPED, 3, "pre_norm", 6), (LATENT, 2, "post_norm", 4)],
    ids=["one", "three", "latent"],
)
def test_drafting_is_what_training_unrolls(target, modules, recycle, length):
    """Whatever the chunks the text came in: each draft is the guess of that step on the text with the drafts
    before it, every row at its own length."""
    config, params = modules_for(target, modules, recycle=recycle)
    proposer = Mtp(config, ej.chain(length))
    last = Features.of(target, Texts(TEXTS, np.asarray([9, 9]), np.asarray([1, 1]))).read((FINAL,))
    lengths, width = np.asarray([8, 6]), 4
    rows = sampling.rows([Sampling()] * 2, 24, [[1]] * 2)
    keys = jax.vmap(jax.random.key)(jnp.arange(2))

    @jax.jit
    def drafted(last):
        state = proposer.init(params, batch=2, capacity=16)
        for at in range(0, 8, width):
            part = slice(at, at + width)
            seen = Observation(
                tokens=jnp.asarray(TEXTS[:, part]),
                following=jnp.asarray(TEXTS[:, at + 1 : at + width + 1]),
                start=jnp.full(2, at, jnp.int32),
                count=jnp.asarray(np.clip(lengths - at, 0, width), jnp.int32),
                features=last[:, part],
            )
            state = proposer.observe(params, state, seen)
        root = jnp.asarray(TEXTS[np.arange(2), lengths])
        draft, state = proposer.propose(params, state, root, jnp.asarray(lengths), rows, keys)
        return draft.tokens, [cache.lengths for cache in state.caches]

    tokens, held = jax.tree.map(np.asarray, drafted(last))
    assert [list(x) for x in held] == [list(lengths - m) for m in range(modules)]
    whole = np.zeros((2, 16), np.int32)
    for row, size in enumerate(lengths):
        whole[row, : size + 1] = TEXTS[row, : size + 1]
        whole[row, size + 1 : size + 1 + length] = tokens[row, 1:]
    features = jnp.pad(last, ((0, 0), (0, 16 - 9), (0, 0), (0, 0)))
    unrolled = guesses(config, params, features, jnp.asarray(whole), length)
    for row, size in enumerate(lengths):
        np.testing.assert_array_equal(tokens[row, 1:], unrolled[:, row, size - 1])
    assert len(set(tokens[:, 1:].ravel().tolist())) > 2, "a constant draft would prove little"


@pytest.mark.parametrize(("target", "modules"), [(GROUPED, 1), (LATENT, 2)], ids=["one", "latent"])
def test_modules_that_learnt_a_text_are_accepted_whole_on_it(target, modules, tmp_path):
    """From the trainer's loss to decoding, through a file: every block of the text it saw."""
    steps = 2 if modules == 2 else 3
    objective = Objective(algorithm="mtp", steps=steps, loss="hard_ce", step_decay=1.0)
    family = training_by(objective)
    settings = TrainSettings(
        out="x",
        objective=objective,
        draft=DraftSettings(start="layer", num_layers=modules),
        run=RunSettings(compute_dtype="float32"),
    )
    prompt = [3, 1, 4, 1, 5]
    text = ej.generate(target, prompt, max_new_tokens=30, ignore_eos=True).token_ids
    ids = np.asarray([*prompt, *text], np.int32)
    config = family.planned(settings, target)
    draft = family.prepare(config, settings, target, [], None, lambda key, make: make())
    head = Head(target.params["head"])
    batch = with_features(target, assemble([Sample(ids, np.arange(len(ids)) >= 5, "t")], len(ids)), ())

    def loss(weights):
        rows = family.trained_rows(objective, head, batch)
        return family.loss(
            weights, config, objective, draft.frozen, head, batch, rows, compute_dtype=jnp.float32
        )

    @jax.jit
    def learn(weights):
        def one(n, carry):
            weights, m, v = carry
            grads = jax.grad(lambda w: loss(w)[0])(weights)
            m = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, m, grads)
            v = jax.tree.map(lambda a, g: 0.98 * a + 0.02 * g * g, v, grads)
            scale = 4e-3 * jnp.sqrt(1 - 0.98 ** (n + 1)) / (1 - 0.9 ** (n + 1))
            weights = jax.tree.map(lambda w, a, b: w - scale * a / (jnp.sqrt(b) + 1e-8), weights, m, v)
            return weights, m, v

        zero = jax.tree.map(jnp.zeros_like, weights)
        weights = jax.lax.fori_loop(0, 400, one, (weights, zero, zero))[0]
        return weights, loss(weights)[1]

    weights, metrics = learn(draft.weights)
    np.testing.assert_array_equal(metrics.hits, metrics.judged)
    family.write(tmp_path / "it", config, draft.complete(weights), None, dtype=jnp.float32)
    bound = ej.load_draft(tmp_path / "it", target, tree=ej.chain(steps))
    out = ej.generate(target, prompt, proposer=bound, max_new_tokens=30, ignore_eos=True)
    assert out.token_ids == text
    # The prompt's forward gave the first token; every round the whole block and one more.
    assert out.stats.num_drafts == -(-29 // (steps + 1))
    if modules == 1:
        check_rotated(target, prompt, text, tmp_path / "it", tmp_path / "aligned", "eaglejax")
