"""Predicted output: following the prediction, and finding the way back after every kind of edit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draft_tools import first_proposal, guesses, play, predicting

from eaglejax.drafts.ngram import NGram
from eaglejax.drafts.prediction import Prediction
from eaglejax.errors import ConfigError, MismatchError

CAPACITY = 128
K = 4
PROPOSER = Prediction(length=K)
PROMPT = [60, 61, 62]
TEXT = list(range(1, 41))  # every token once, so that each place is told by one token


def inputs(predictions: list[list[int] | None], slots: int = 0) -> Any:
    return PROPOSER.inputs(predicting(predictions), slots or len(predictions))


def rounds(prediction: list[int], answer: list[int], prompt: list[int] = PROMPT) -> list[list[int]]:
    return play(PROPOSER, prompt, answer, CAPACITY, inputs([prediction]))


def test_an_exact_prediction_is_followed_to_its_end() -> None:
    assert rounds(TEXT, TEXT) == [TEXT[i : i + K] for i in range(1, 40, K + 1)]


@pytest.mark.parametrize("at", [1, 2, 5, 17, 38])
@pytest.mark.parametrize("size", [1, 3])
def test_an_insertion_costs_its_own_tokens_and_no_more(at: int, size: int) -> None:
    answer = TEXT[:at] + list(range(50, 50 + size)) + TEXT[at:]
    assert len(rounds(TEXT, answer)) <= -(-40 // (K + 1)) + size + 2


@pytest.mark.parametrize("at", [1, 2, 17])
@pytest.mark.parametrize("size", [1, 7])
def test_a_deletion_costs_one_round(at: int, size: int) -> None:
    assert len(rounds(TEXT, TEXT[:at] + TEXT[at + size :])) <= -(-40 // (K + 1)) + 1


def test_a_replaced_token_is_assumed_to_stand_for_one() -> None:
    answer = [*TEXT[:10], 55, *TEXT[11:]]
    played = rounds(TEXT, answer)
    # Right after the new token, which nothing matches, the prediction goes on behind the replaced one.
    assert TEXT[11:15] in played
    assert len(played) <= -(-40 // (K + 1)) + 1


@pytest.mark.parametrize("size", [2, 5])
def test_a_replaced_stretch_is_left_behind(size: int) -> None:
    answer = TEXT[:10] + list(range(50, 50 + size + 1)) + TEXT[10 + size :]
    assert len(rounds(TEXT, answer)) <= -(-40 // (K + 1)) + size + 2


@pytest.mark.parametrize("start", [[50], [50, 51], [52, 2]])
def test_another_tokenisation_of_the_first_word(start: list[int]) -> None:
    assert len(rounds(TEXT, start + TEXT[1:])) <= -(-40 // (K + 1)) + len(start)
    assert len(rounds([*start, *TEXT[1:]], TEXT)) <= -(-40 // (K + 1)) + len(start)


def test_equal_stretches_are_told_apart_by_where_the_text_is() -> None:
    line = [1, 2, 3, 4]
    prediction = [t for n in range(6) for t in (*line, 20 + n)]
    # Each line agrees with six places; the followed one is right although the memory is too short to see it.
    short = Prediction(length=4, memory=3)
    played = play(short, PROMPT, prediction, CAPACITY, inputs([prediction]))
    assert len(played) == len(prediction) // 5
    # A line is deleted: the nearest equal place ahead is the one to go on from.
    deleted = prediction[:4] + prediction[9:]
    after = play(short, PROMPT, deleted, CAPACITY, inputs([prediction]))
    assert len(after) <= len(played) + 1


def test_the_longest_agreement_wins_over_the_nearest() -> None:
    prediction = [1, 2, 3, 9, 30, 31, 5, 9, 40, 41]
    proposer = Prediction(length=2)
    draft = first_proposal(proposer, None, [[60, 5, 9]], CAPACITY, inputs([prediction]))
    assert guesses(draft, 0) == [40, 41]


def test_rows_without_a_prediction_look_up_their_own_text() -> None:
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 4, size).tolist() for size in range(1, 33)]
    lookup = NGram(length=K, max_ngram=PROPOSER.memory)
    plain = first_proposal(lookup, None, texts, CAPACITY)
    with_none = first_proposal(PROPOSER, None, texts, CAPACITY, inputs([None, []] * 16))
    # Nothing in the prediction agrees with these rows either.
    strangers = first_proposal(PROPOSER, None, texts, CAPACITY, inputs([[50, 51]] * 32))
    found = 0
    for row in range(32):
        expected = guesses(plain, row)
        assert guesses(with_none, row) == expected
        if expected:
            found += 1
            assert guesses(strangers, row) == expected
    assert found > 20


def test_the_end_of_the_prediction_offers_nothing() -> None:
    assert rounds([1, 2, 3], [1, 2, 3, 50, 51]) == [[2, 3], []]
    assert rounds([1, 2, 3], [1, 9, 3, 50]) == [[2, 3], [3]]


def test_padding_is_never_a_match() -> None:
    proposer = Prediction(length=3)
    draft = first_proposal(proposer, None, [[60, 61, 0]], CAPACITY, inputs([[1, 2, 3]]))
    # The row's last token equals the padding's; only the place that is being followed may speak.
    assert guesses(draft, 0) == [2, 3]


def test_inputs_are_padded_to_powers_of_two_and_too_many_refused() -> None:
    given = inputs([[1] * 65, None], 4)
    assert given.tokens.shape == (4, 128)
    assert np.asarray(given.count).tolist() == [65, 0, 0, 0]
    assert inputs([], 2).tokens.shape == (2, 64)
    assert inputs([[1] * 64], 1).tokens.shape == (1, 64)
    with pytest.raises(MismatchError, match="3 requests do not fit 2 rows"):
        inputs([None] * 3, 2)
    with pytest.raises(MismatchError, match="do not fit a batch of 3"):
        PROPOSER.init(None, batch=3, capacity=8, inputs=given)


@pytest.mark.parametrize("settings", [{"length": 0}, {"memory": 0}, {"length": 1.5}])
def test_refuses(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="Prediction"):
        Prediction(**settings)  # type: ignore[arg-type]


def test_rows_do_not_depend_on_each_other() -> None:
    texts = [[60, 5, 9], [1, 2, 3], [7]]
    predictions: list[list[int] | None] = [[5, 9, 40, 41], None, [7, 8, 9]]
    together = first_proposal(PROPOSER, None, texts, CAPACITY, inputs(predictions))
    for row in range(3):
        alone = first_proposal(PROPOSER, None, [texts[row]], CAPACITY, inputs([predictions[row]]))
        assert guesses(together, row) == guesses(alone, 0)
