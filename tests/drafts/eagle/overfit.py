"""A draft that learns one text by heart, as the trainer would train it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eaglejax as ej
from eaglejax.drafts.base import Bound
from eaglejax.models.target import Target
from eaglejax.train.features import with_features
from eaglejax.train.packing import assemble
from eaglejax.train.registry import training_by
from eaglejax.train.samples import Sample
from eaglejax.train.settings import TrainSettings

PROMPT = [3, 1, 4, 1, 5]


def learnt(
    target: Target, settings: TrainSettings, folder: Path, *, tokens: int = 30, updates: int = 400
) -> tuple[Bound, list[int], list[int]]:
    """(draft, prompt, what ``target`` greedily writes behind it): a new draft as ``settings`` say, trained by
    ``updates`` of Adam on that one text, written to ``folder`` and read again. In every row that is judged it
    guesses right."""
    family, objective = training_by(settings.objective), settings.objective
    text = ej.generate(target, PROMPT, max_new_tokens=tokens, ignore_eos=True).token_ids
    ids = np.asarray([*PROMPT, *text], np.int32)
    config = family.planned(settings, target)
    made = family.prepare(config, settings, target, [], None, lambda key, make: make())
    sample = Sample(ids, np.arange(len(ids)) >= len(PROMPT), "t")
    batch = with_features(target, assemble([sample], len(ids)), family.taps(config))

    def loss(weights: Any) -> Any:
        rows = family.trained_rows(objective, made.head, batch)
        return family.loss(
            weights, config, objective, made.frozen, made.head, batch, rows, compute_dtype=jnp.float32
        )

    @jax.jit
    def learn(weights: Any) -> Any:
        def one(n: jax.Array, carry: Any) -> Any:
            weights, m, v = carry
            grads = jax.grad(lambda w: loss(w)[0])(weights)
            m = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, m, grads)
            v = jax.tree.map(lambda a, g: 0.98 * a + 0.02 * g * g, v, grads)
            scale = 4e-3 * jnp.sqrt(1 - 0.98 ** (n + 1)) / (1 - 0.9 ** (n + 1))
            weights = jax.tree.map(lambda w, a, b: w - scale * a / (jnp.sqrt(b) + 1e-8), weights, m, v)
            return weights, m, v

        zero = jax.tree.map(jnp.zeros_like, weights)
        weights = jax.lax.fori_loop(0, updates, one, (weights, zero, zero))[0]
        return weights, loss(weights)[1]

    weights, metrics = learn(made.weights)
    np.testing.assert_array_equal(metrics.hits, metrics.judged)
    family.write(folder, config, made.complete(weights), made.ids, dtype=jnp.float32)
    tree = ej.chain(objective.steps)
    return ej.load_draft(folder, target, tree=tree), list(PROMPT), list(text)
