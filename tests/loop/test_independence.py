"""Law 3, what the conformance suite leaves out: batches of one, and rows without a seed."""

from __future__ import annotations

from typing import Any

import pytest
from cases import CASES
from loop_tools import GREEDY, HOT, WARM, decode, greedy_texts, prompts

from eaglejax.sampling import Sampling

LIMIT = 29
"""Fits behind the longest prompt, and is long enough for every call to pad its caches alike."""


def run(order: list[int], settings: list[Sampling], **options: Any) -> list[list[int]]:
    """Tokens of the prompts named by ``order``, each with its own of ``settings``, drafted by a model."""
    case = CASES["draft_model"]
    results = decode(
        case.proposer,
        case.params(greedy_texts(prompts()), turn=1),
        options.pop("starts", [prompts()[i] for i in order]),
        samplings=[settings[i] for i in order],
        limits=LIMIT,
        **options,
    )
    return [r.token_ids for r in results]


@pytest.mark.slow
def test_a_batch_of_one() -> None:
    settings = [HOT, GREEDY, WARM]
    together = run([0, 1, 2], settings)
    assert [run([row], settings, batch=1)[0] for row in (0, 2)] == [together[0], together[2]]


def test_seeds() -> None:
    other = Sampling(temperature=0.9, top_p=0.9, frequency_penalty=0.3, seed=8)
    fresh = Sampling(temperature=0.9, top_p=0.9, frequency_penalty=0.3, seed=None)
    seeded = run([0], [HOT])[0]
    assert run([0], [other])[0] != seeded
    # A seeded row between rows with seeds of their own making.
    mixed = run([0, 1, 2], [fresh, HOT, fresh], starts=[prompts()[0]] * 3)
    assert mixed[1] == seeded
    assert mixed[0] != mixed[2]
    assert all(len(set(tokens)) > 1 for tokens in mixed)
