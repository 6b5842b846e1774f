"""Drafts that are accepted far less than chance are said once, over all calls, with the command."""

from __future__ import annotations

import dataclasses
import warnings
from types import SimpleNamespace

import pytest

from eaglejax.drafts.base import Bound
from eaglejax.drafts.ngram import NGram
from eaglejax.drafts.registry import families
from eaglejax.models.target import Target
from eaglejax.speculate.books import Generation
from eaglejax.speculate.chance import watch
from eaglejax.speculate.metrics import Stats

TARGET = Target(config=None, params={}, dtype=None, context=8, source=SimpleNamespace(spec="some model"))
ENGLISH = [1, 2, 3, 1, 4, 5, 1, 6, 7, 8] * 4
"""Three in ten are the same token."""


def made_by_eagle() -> object:
    return object.__new__(next(family.proposer for family in families() if family.name == "EAGLE"))


def answer(rounds: int, accepted: int) -> Generation:
    stats = Stats(num_drafts=rounds, accepted_at=(accepted, 0))
    return Generation("", ENGLISH, "length", None, stats, 1)


def said(bound, results) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        watch(bound, TARGET, results)
    return [str(w.message) for w in found]


def test_it_is_said_once_with_the_command():
    bound = Bound(made_by_eagle(), {}, source="a draft")
    (text,) = said(bound, [answer(40, 0)])
    assert "eaglejax diagnose --target 'some model' --draft 'a draft'" in text
    assert "--original-target" in text
    assert said(bound, [answer(400, 0)]) == []


def test_rounds_of_several_calls_add_up():
    bound = Bound(made_by_eagle(), {}, source="d")
    assert said(bound, [answer(16, 0)]) == [], "sixteen rounds prove little"
    assert len(said(bound, [answer(16, 0)])) == 1


def test_a_text_of_many_different_tokens_takes_more_rounds_or_fewer_right_drafts():
    """One in twenty is the same token: none right in 80 rounds is 1 chance in 50, one right takes 120."""

    def of(rounds, accepted):
        stats = Stats(num_drafts=rounds, accepted_at=(accepted, 0))
        made = Generation("", [1, 1, *range(2, 40)], "length", None, stats, 1)
        return said(Bound(made_by_eagle(), {}, source="d"), [made])

    assert of(70, 0) == []
    assert len(of(80, 0)) == 1
    assert of(80, 1) == []
    assert len(of(120, 1)) == 1
    assert len(of(20_000, 400)) == 1


@pytest.mark.parametrize(("rounds", "accepted"), [(40, 8), (40, 30), (10, 0)])
def test_chance_or_better_and_few_rounds_say_nothing(rounds, accepted):
    assert said(Bound(made_by_eagle(), {}), [answer(rounds, accepted)]) == []


def test_what_has_no_files_is_not_watched():
    assert said(Bound(NGram()), [answer(400, 0)]) == []
    assert said(None, [answer(400, 0)]) == []
    assert said(NGram(), [answer(400, 0)]) == []


def test_the_evidence_is_of_one_draft():
    first, second = (Bound(made_by_eagle(), {}, source="d") for _ in range(2))
    assert dataclasses.replace(first) is not first
    assert said(first, [answer(20, 0)]) == said(second, [answer(20, 0)]) == []
