"""Law 3: a row's tokens depend on its own prompt, settings and seed, and on nothing beside it."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from loop_tools import BATCH, CASES, GREEDY, MIXED, VOCAB, decode, greedy_texts, prompts

from eaglejax.drafts.scripted import ScriptedLaw
from eaglejax.sampling import Sampling

HOT = Sampling(temperature=0.9, top_p=0.9, frequency_penalty=0.3, seed=7)
WARM = Sampling(temperature=0.6, top_k=9, repetition_penalty=1.2, seed=7)
LIMIT = 29
"""Fits behind the longest prompt, and is long enough for every call to pad its caches alike."""


def proposers() -> dict[str, tuple[Any, Any]]:
    """One with weights and state, one with a sampled tree."""
    texts = greedy_texts(prompts())
    table = 2.0 * jax.random.normal(jax.random.key(1), (3, VOCAB))
    model = CASES["draft_model"]
    return {"draft_model": (model.proposer, model.params(texts, turn=1)), "tree": (ScriptedLaw(MIXED), table)}


def run(name: str, order: list[int], settings: list[Sampling], **options: Any) -> list[list[int]]:
    """Tokens of the prompts named by ``order``, each with its own of ``settings``."""
    proposer, params = proposers()[name]
    starts = [prompts()[i] for i in order]
    results = decode(
        proposer, params, starts, samplings=[settings[i] for i in order], limits=LIMIT, **options
    )
    return [r.token_ids for r in results]


@pytest.mark.parametrize("name", ["draft_model", "tree"])
def test_batch_mates_slots_and_padding_change_nothing(name: str) -> None:
    settings = [HOT, GREEDY, WARM]
    together = run(name, [0, 1, 2], settings)
    assert all(len(tokens) == LIMIT for tokens in together)
    assert run(name, [0, 1, 2], settings) == together
    assert run(name, [2, 0, 1], settings) == [together[2], together[0], together[1]]
    for row in (0, 2):
        # In the other slots: rows without a request.
        assert run(name, [row], settings) == [together[row]]
        # Beside two copies of itself, which share its seed and so all its draws.
        assert run(name, [row] * BATCH, settings) == [together[row]] * BATCH
    # A greedy row beside sampled ones is the row among greedy ones, whose program draws nothing.
    assert together[1] == list(greedy_texts(prompts())[1][len(prompts()[1]) :])[:LIMIT]


@pytest.mark.slow
def test_a_batch_of_one() -> None:
    settings = [HOT, GREEDY, WARM]
    together = run("draft_model", [0, 1, 2], settings)
    assert [run("draft_model", [row], settings, batch=1)[0] for row in (0, 2)] == [together[0], together[2]]


def test_seeds() -> None:
    other = Sampling(temperature=0.9, top_p=0.9, frequency_penalty=0.3, seed=8)
    fresh = Sampling(temperature=0.9, top_p=0.9, frequency_penalty=0.3, seed=None)
    seeded = run("draft_model", [0], [HOT])[0]
    assert run("draft_model", [0], [other])[0] != seeded
    # A seeded row between rows with seeds of their own making.
    starts = [prompts()[0]] * 3
    proposer, params = proposers()["draft_model"]
    mixed = [
        r.token_ids for r in decode(proposer, params, starts, samplings=[fresh, HOT, fresh], limits=LIMIT)
    ]
    assert mixed[1] == seeded
    assert mixed[0] != mixed[2]
    assert all(len(set(tokens)) > 1 for tokens in mixed)
