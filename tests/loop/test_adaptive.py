"""Widths by expected tokens a second: what the policy chooses, what it costs to know, and the tokens."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from loop_tools import decode, greedy_texts, prompts

from eaglejax.errors import ConfigError
from eaglejax.speculate import costs
from eaglejax.speculate.adaptive import Adaptive, AdaptiveMemory, expected
from eaglejax.speculate.costs import Costs
from eaglejax.speculate.options import DecodeOptions
from eaglejax.speculate.widths import Judged

MENU = (1, 4, 8)
POLICY = Adaptive(memory=20, patience=4, most_patience=16)


@functools.partial(jax.jit, static_argnums=1)
def step(memory: AdaptiveMemory, accepted: int, scores: jax.Array) -> tuple[AdaptiveMemory, jax.Array]:
    """A round of a draft whose first ``accepted`` nodes would be: memory and width."""
    index = jnp.where(POLICY.drafts(memory, MENU), jnp.maximum(POLICY.choose(memory, MENU, scores), 1), 0)
    width = jnp.asarray(MENU)[index]
    place = jnp.arange(scores.shape[1])
    judged = (place > 0) & (place < width) & (scores > 0)
    shown = jnp.where(width > 1, scores, 0.0)
    return POLICY.update(memory, MENU, Judged(width, shown, judged, judged & (place <= accepted))), width


def play(
    memory: AdaptiveMemory, accepted: int, rounds: int, scores: jax.Array
) -> tuple[AdaptiveMemory, list]:
    widths = []
    for _ in range(rounds):
        memory, width = step(memory, accepted, scores)
        widths.append(int(width))
    return memory, widths


def with_costs(*seconds: float) -> AdaptiveMemory:
    return dataclasses.replace(POLICY.init(MENU), costs=jnp.asarray(seconds, jnp.float32))


EVEN = jnp.ones((1, 8))


def test_what_is_accepted_and_what_it_costs_decide_the_width() -> None:
    flat, steep = with_costs(1.0, 1.1, 1.2), with_costs(1.0, 1.3, 4.0)
    assert set(play(flat, 7, 30, EVEN)[1][10:]) == {8}
    assert set(play(steep, 3, 30, EVEN)[1][10:]) == {4}
    few = play(flat, 2, 60, EVEN)[1][20:]
    assert few.count(4) > 30, "wider ones are tried now and then"
    dear = with_costs(1.0, 5.0, 9.0)
    widths = play(dear, 3, 60, EVEN)[1]
    assert widths[0] > 1, "nothing is known yet"
    assert widths[20:].count(1) >= 36, "four tokens for the time of five"


def test_a_pause_grows_while_drafts_do_not_pay_and_ends_when_they_do() -> None:
    memory, widths = play(with_costs(1.0, 1.5, 2.0), 0, 120, EVEN)
    tries = np.flatnonzero(np.asarray(widths) > 1)
    assert np.diff(tries)[-3:].tolist() == [17, 17, 17]
    assert (np.asarray(widths) > 1).sum() < 20
    memory, widths = play(memory, 7, 200, EVEN)
    assert set(widths[-20:]) == {8}
    assert int(memory.patience) == 4


def test_likely_nodes_are_told_from_unlikely_ones() -> None:
    memory = with_costs(1.0, 1.3, 1.6)
    sure = jnp.asarray([[1.0] * 8])
    doubtful = jnp.asarray([[1.0, *[0.02] * 7]])
    for _ in range(20):
        memory, _ = step(memory, 7, sure)
        memory = dataclasses.replace(memory, worth=jnp.float32(2.0))
        memory, _ = step(memory, 0, doubtful)
    assert float(expected(memory, sure)[0, 3]) > 0.8
    assert float(expected(memory, doubtful)[0, 3]) < 0.1
    assert int(POLICY.choose(memory, MENU, sure)) == 2
    assert int(POLICY.choose(memory, MENU, doubtful)) == 0
    gone = jnp.zeros((1, 8))
    both = POLICY.choose(memory, MENU, jnp.concatenate([sure, gone]))
    assert int(both) == 2, "a row that is done has no say"


def test_a_table_is_kept_read_and_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "costs" / "a.json"
    assert costs._read(file, 3) is None
    costs._write(file, MENU, (0.1, 0.2, 0.3))
    assert costs._read(file, 3) == (0.1, 0.2, 0.3)
    assert costs._read(file, 2) is None
    for text in ("", "{}", '{"seconds": [1, 2, "x"]}', '{"seconds": [1, 2, 0]}', '{"seconds": 3}'):
        (tmp_path / "b.json").write_text(text)
        assert costs._read(tmp_path / "b.json", 3) is None, text
    table = Costs((0.1, 0.2, 0.3), file)
    assert not table.forget_if_stale({1: 20, 4: 20}, MENU, 7.0)
    assert not table.forget_if_stale({1: 10}, MENU, 70.0), "too few rounds to tell"
    assert file.exists()
    assert table.forget_if_stale({1: 20, 4: 20}, MENU, 13.0)
    assert not file.exists()


def test_adaptive_speculation_gives_the_tokens_of_plain_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLEJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(costs, "_TRIES", 2)
    monkeypatch.setattr(costs, "_ENOUGH", 1 << 30)  # a busy machine would have the table taken again
    case, texts = CASES["ngram"], greedy_texts(prompts())
    for _ in range(2):
        results = decode(case.proposer, None, prompts(), speculation="adaptive", widths=(1, 5))
        for prompt, text, result in zip(prompts(), texts, results, strict=True):
            assert result.token_ids == list(text[len(prompt) :])
            assert set(dict(result.stats.widths)) <= {1, 5}
        assert len(list((tmp_path / "costs").iterdir())) == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"speculation": "auto"}, "'fixed' or 'adaptive'"),
        ({"speculation": "adaptive", "policy": Adaptive()}, "policy of its own"),
    ],
)
def test_speculation_that_cannot_be_is_refused(options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        DecodeOptions(**options)  # type: ignore[arg-type]
