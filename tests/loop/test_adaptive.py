"""Widths by expected tokens a second: what the policy chooses, what it costs to know, and the tokens."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from loop_tools import decode, greedy_texts, prompts, tiny_config

from eaglejax.drafts.autoregressive import Autoregressive
from eaglejax.drafts.base import Proposer
from eaglejax.drafts.draft_model.proposer import DraftModel
from eaglejax.drafts.ngram import NGram
from eaglejax.errors import ConfigError
from eaglejax.speculate import costs
from eaglejax.speculate.adaptive import Adaptive, AdaptiveMemory, carried, expected
from eaglejax.speculate.options import DecodeOptions
from eaglejax.speculate.widths import Judged

MENU = (1, 4, 8)
POLICY = Adaptive(memory=20, patience=4, most_patience=16)
CHAIN = jnp.arange(8)[None]
"""Depths of a chain."""


@functools.partial(jax.jit, static_argnums=1)
def step(memory: AdaptiveMemory, accepted: int, scores: jax.Array) -> tuple[AdaptiveMemory, jax.Array]:
    """A round of a chain whose first ``accepted`` nodes would be: memory, and width (0: it did not draft)."""
    drafts = POLICY.drafts(memory, MENU)
    width = jnp.where(drafts, jnp.asarray(MENU)[POLICY.choose(memory, MENU, scores, CHAIN)], 1)
    place = jnp.arange(scores.shape[1])
    judged = (place > 0) & (place < width) & (scores > 0)
    shown = jnp.where(drafts, scores, 0.0)
    seen = Judged(drafts, width, shown, CHAIN, judged, judged & (place <= accepted))
    return POLICY.update(memory, MENU, seen), jnp.where(drafts, width, 0)


def play(
    memory: AdaptiveMemory, accepted: int, rounds: int, scores: jax.Array
) -> tuple[AdaptiveMemory, list]:
    widths = []
    for _ in range(rounds):
        memory, width = step(memory, accepted, scores)
        widths.append(int(width))
    return memory, widths


def with_costs(*seconds: float) -> AdaptiveMemory:
    """Of a round without a draft, and of one with a draft at each width."""
    return dataclasses.replace(POLICY.init(MENU), costs=jnp.asarray(seconds, jnp.float32))


EVEN = jnp.ones((1, 8))


def test_what_is_accepted_and_what_it_costs_decide_the_width() -> None:
    flat, steep = with_costs(1.0, 1.05, 1.1, 1.2), with_costs(1.0, 1.05, 1.3, 4.0)
    assert set(play(flat, 7, 30, EVEN)[1][10:]) == {8}
    assert set(play(steep, 3, 30, EVEN)[1][10:]) == {4}
    few = play(flat, 2, 60, EVEN)[1][20:]
    assert few.count(4) > 30
    dear = with_costs(1.0, 4.5, 5.0, 9.0)
    widths = play(dear, 3, 60, EVEN)[1]
    assert widths[0] > 1, "nothing is known yet"
    assert widths[20:].count(0) >= 34, "four tokens for the time of five"


def test_a_pause_grows_while_drafts_do_not_pay_and_ends_when_they_do() -> None:
    memory, widths = play(with_costs(1.0, 1.4, 1.5, 2.0), 0, 120, EVEN)
    tries = np.flatnonzero(np.asarray(widths) > 0)
    assert np.diff(tries)[-3:].tolist() == [17, 17, 17]
    assert (np.asarray(widths) > 0).sum() < 16
    memory, widths = play(memory, 7, 200, EVEN)
    assert set(widths[-20:]) == {8}
    assert int(memory.patience) == 4


def test_a_draft_that_costs_nothing_is_never_left_out() -> None:
    """Whether it pays would be decided by noise."""
    widths = play(with_costs(1.0, 1.01, 1.4, 2.0), 0, 60, EVEN)[1]
    assert widths.count(0) == 0
    assert widths[10:].count(1) > 40, "but it is not judged"


def test_likely_nodes_are_told_from_unlikely_ones() -> None:
    memory = with_costs(1.0, 1.05, 1.3, 1.6)
    sure = jnp.asarray([[1.0] * 8])
    doubtful = jnp.asarray([[1.0, *[0.02] * 7]])
    for _ in range(20):
        memory, _ = step(memory, 7, sure)
        memory = dataclasses.replace(memory, worth=jnp.float32(2.0))
        memory, _ = step(memory, 0, doubtful)
    assert float(expected(memory, sure, CHAIN)[0, 3]) > 0.8
    assert float(expected(memory, doubtful, CHAIN)[0, 3]) < 0.1
    assert int(POLICY.choose(memory, MENU, sure, CHAIN)) == 2
    assert int(POLICY.choose(memory, MENU, doubtful, CHAIN)) == 0
    gone = jnp.zeros((1, 8))
    both = POLICY.choose(memory, MENU, jnp.concatenate([sure, gone]), jnp.tile(CHAIN, (2, 1)))
    assert int(both) == 2, "a row that is done has no say"


def test_depths_are_told_apart() -> None:
    """Equal scores whose drafts are accepted at depth 1 and never below."""
    memory = with_costs(1.0, 1.05, 1.1, 1.2)
    for _ in range(20):
        memory = dataclasses.replace(memory, worth=jnp.float32(2.0))
        memory, _ = step(memory, 1, EVEN)
    chance = expected(memory, EVEN, CHAIN)[0]
    assert float(chance[1]) > 0.9
    assert float(chance[2]) < 0.3
    flat = expected(memory, EVEN, jnp.minimum(CHAIN, 1))[0]
    np.testing.assert_allclose(flat[1:], chance[1])


def test_the_next_batch_begins_with_what_the_last_has_learnt() -> None:
    costs_now = (1.0, 1.4, 1.5, 2.0)
    bad = play(with_costs(*costs_now), 0, 60, EVEN)[0]
    fresh = carried(with_costs(*costs_now), bad)
    assert float(fresh.seen[0].sum()) <= 20.0 + 1e-4
    widths = play(fresh, 0, 30, EVEN)[1]
    assert sum(w > 0 for w in widths) <= 3
    assert sum(w > 0 for w in play(with_costs(*costs_now), 0, 30, EVEN)[1]) > 4


def test_adaptive_speculation_gives_the_tokens_of_plain_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLEJAX_CACHE", str(tmp_path))
    laps = itertools.count()
    monkeypatch.setattr(costs, "CLOCK", costs.Clock(lambda: float(next(laps)), lambda: 0.0))
    case, texts = CASES["ngram"], greedy_texts(prompts())
    for _ in range(2):
        results = decode(case.proposer, None, prompts(), speculation="adaptive", widths=(1, 5))
        for prompt, text, result in zip(prompts(), texts, results, strict=True):
            assert result.token_ids == list(text[len(prompt) :])
            stats = result.stats
            assert set(dict(stats.widths)) <= {1, 5}
            # By this clock every round costs the same.
            assert stats.predicted_speedup == pytest.approx(stats.mean_acceptance_length)
        (file,) = (tmp_path / "costs").iterdir()
        assert json.loads(file.read_text())["seconds"] == [0.25] * 3
    assert next(laps) == 2 * (1 + 3 * 3), "measured once"


@pytest.mark.parametrize(
    ("proposer", "sampled", "widths"),
    [
        (NGram(length=7), True, (1, 4, 8, 16, 8)),
        (NGram(length=7), False, (1, 4, 8, 16, 8)),
        (DraftModel(tiny_config(), length=2), False, (1, 4, 8, 16, 3)),
        (DraftModel(tiny_config(), length=2), True, ()),
        (Autoregressive(), False, ()),
    ],
)
def test_who_adapts(proposer: Proposer, sampled: bool, widths: tuple[int, ...]) -> None:
    """Drawn drafts are all judged: their texts would follow the clock and the batch."""
    found, policy = DecodeOptions(speculation="adaptive").choices(proposer, sampled=sampled)
    assert found == widths
    assert isinstance(policy, Adaptive) == bool(widths)


def test_adaptive_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLEJAX_SPECULATION")
    assert DecodeOptions().adaptive
    assert not DecodeOptions(speculation="fixed").adaptive
    assert not DecodeOptions(policy=Adaptive(patience=3)).adaptive
    monkeypatch.setenv("EAGLEJAX_SPECULATION", "fixed")
    assert not DecodeOptions().adaptive
    monkeypatch.setenv("EAGLEJAX_SPECULATION", "sometimes")
    with pytest.raises(ConfigError, match="EAGLEJAX_SPECULATION is 'sometimes'"):
        _ = DecodeOptions().adaptive


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"speculation": "auto"}, "'adaptive' or 'fixed'"),
        ({"speculation": "adaptive", "policy": Adaptive()}, "policy of its own"),
    ],
)
def test_speculation_that_cannot_be_is_refused(options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        DecodeOptions(**options)  # type: ignore[arg-type]
