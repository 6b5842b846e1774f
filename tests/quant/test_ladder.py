"""What each piece of an alignment is worth, on drafts that are accepted almost whole before the rotation.

The text is plain decoding's on every rung: a wrong basis costs speed alone, which is why nobody notices.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import tiny_pair

from eaglejax.drafts.eagle.probe import guesses
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.tree import chain
from eaglejax.errors import RequestError
from eaglejax.measure.quality import Features, acceptance
from eaglejax.rotation.rotate import Rotation, rotate_target
from experiments.rotation.ladder import RUNGS, rung

H, LENGTH = 16, 3


@functools.cache
def rotated():
    return rotate_target(tiny_pair.target(), Rotation("hadamard", H, seed=4))


def accepted(trace: list[list[int]]) -> float:
    """Drafts accepted a round, the first token and the last round (which the context cuts) left out."""
    counts = [n - 1 for row in trace for n in row[1:-1]]
    return sum(counts) / len(counts)


@functools.cache
def climb(name: str, which: str) -> tuple[list[list[int]], list[list[int]]]:
    config, made = tiny_pair.draft(which)
    params = rung(name, config, made.weights, None, tiny_pair.target(), rotated())
    target = tiny_pair.target() if name == "original" else rotated()
    return tiny_pair.decode(target, Eagle(config, chain(LENGTH)), params)


@pytest.mark.parametrize(
    "which", [pytest.param(v, marks=[pytest.mark.slow] if v == "eagle1" else []) for v in tiny_pair.VERSIONS]
)
def test_the_ladder(which):
    plain = [list(t[len(p) :]) for p, t in zip(tiny_pair.PROMPTS, tiny_pair.texts(), strict=True)]
    rate = {}
    for name in RUNGS:
        tokens, trace = climb(name, which)
        assert tokens == plain, f"{name}: the text changed"
        rate[name] = accepted(trace)
    assert rate["original"] > 2, "the draft is too weak to show anything"
    assert climb("aligned", which)[1] == climb("original", which)[1], "not the original accept trace"
    for name in ("unaligned", "wrong orientation", "twice"):
        assert rate[name] < 0.25 * rate["original"], name
    for name in ("features only", "embedding only"):
        assert rate[name] < 0.5 * rate["original"], name
    if which == "eagle1":
        assert rate["gamma not divided"] < 0.8 * rate["original"]
    else:
        # Boundaries lie before any norm, and this draft has a head of its own: gamma is none of its business.
        assert climb("gamma not divided", which)[1] == climb("original", which)[1]


def test_measured_acceptance_is_what_decoding_accepts():
    """The rate at every place of the text against rounds of a chain that really ran."""
    config, params = tiny_pair.draft("eagle3")
    tokens, trace = climb("original", "eagle3")
    texts = tiny_pair.written()
    drafted = guesses(
        config, params, Features.of(tiny_pair.target(), texts).read(config.taps), texts.tokens, LENGTH
    )
    for row, (prompt, counts) in enumerate(zip(tiny_pair.PROMPTS, trace, strict=True)):
        root = len(prompt)  # the first answered token
        for count in counts[1:-1]:
            truth = texts.tokens[row, root + 1 : root + 4]
            right = (drafted[:, row, root - 1] == truth).cumprod().sum()
            assert right + 1 == count
            root += count
    assert tokens[0] == list(texts.tokens[0, len(tiny_pair.PROMPTS[0]) :])
    with pytest.raises(RequestError, match="no answer is longer"):
        acceptance(drafted, dataclasses.replace(texts, lengths=texts.prompts + 1), None)
