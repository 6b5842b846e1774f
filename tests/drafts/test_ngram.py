"""Prompt lookup against a brute-force search, and its edges."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from draft_tools import first_proposal, guesses, observation

from eaglejax.drafts.ngram import NGram, remember
from eaglejax.errors import ConfigError

CAPACITY = 48


def brute_force(text: list[int], length: int, max_ngram: int, min_ngram: int) -> list[int]:
    """Longest suffix first; of its earlier occurrences the one with most to offer, then the latest."""
    last = len(text) - 1
    for n in range(min(max_ngram, len(text)), min_ngram - 1, -1):
        suffix = text[len(text) - n :]
        ends = [e for e in range(n - 1, last) if text[e - n + 1 : e + 1] == suffix]
        if ends:
            end = max(ends, key=lambda e: (min(last - e, length), e))
            return text[end + 1 : end + 1 + length]
    return []


@pytest.mark.parametrize(("length", "max_ngram", "min_ngram"), [(1, 1, 1), (4, 3, 1), (5, 4, 2), (7, 3, 3)])
def test_equals_brute_force(length: int, max_ngram: int, min_ngram: int) -> None:
    rng = np.random.default_rng(0)
    texts = [
        rng.integers(0, alphabet, size).tolist()
        for alphabet in (1, 2, 3, 6)
        for size in range(1, CAPACITY - length)
    ]
    proposer = NGram(length=length, max_ngram=max_ngram, min_ngram=min_ngram)
    draft = first_proposal(proposer, None, texts, CAPACITY)
    matched = 0
    for row, text in enumerate(texts):
        expected = brute_force(text, length, max_ngram, min_ngram)
        assert guesses(draft, row) == expected, text
        matched += bool(expected)
    assert 0 < matched < len(texts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([5], []),  # a prompt of one token
        ([5, 6, 7, 8], []),  # no match
        ([0, 0], [0]),  # zeros are tokens like any other
        ([7, 7], [7]),  # the match touches the end: one token is known to follow
        ([7] * 6, [7, 7, 7]),  # an occurrence that can offer three wins over one that touches the end
        ([1, 2, 3, 1, 2, 3], [1, 2, 3]),  # the whole prompt but the repeated end
        ([9, 1, 2, 8, 1, 2, 7, 1, 2], [7, 1, 2]),  # the latest of equals
        ([4, 1, 2, 9, 5, 2, 8, 3, 4, 1, 2], [9, 5, 2]),  # the longest, although an older one
    ],
)
def test_edges(text: list[int], expected: list[int]) -> None:
    draft = first_proposal(NGram(length=3, max_ngram=3), None, [text], CAPACITY)
    assert guesses(draft, 0) == expected


def test_nothing_real_hides_in_invalid_nodes() -> None:
    draft = first_proposal(NGram(length=3, max_ngram=3), None, [[5, 6, 7], [7, 7]], CAPACITY)
    assert np.asarray(draft.valid).tolist() == [[True, False, False, False], [True, True, False, False]]
    # Legal ids all the same: they are looked up in the embedding.
    assert np.asarray(draft.tokens).tolist() == [[7, 7, 7, 7], [7, 7, 7, 7]]
    assert draft.chain
    assert draft.max_depth == 3


def test_min_ngram_is_inclusive() -> None:
    text = [[1, 2, 3, 1, 2]]
    assert guesses(first_proposal(NGram(length=1, max_ngram=3, min_ngram=2), None, text, CAPACITY), 0) == [3]
    assert guesses(first_proposal(NGram(length=1, max_ngram=3, min_ngram=3), None, text, CAPACITY), 0) == []


def test_observed_chunks_land_at_their_positions() -> None:
    history = jnp.zeros((3, 8), jnp.int32)
    history = remember(history, observation([[1, 2, 3], [4, 9, 9], [9, 9, 9]], [0, 0, 0], [3, 1, 0]))
    history = remember(history, observation([[5, 6, 7], [8, 9, 9], [9, 9, 9]], [3, 1, 0], [3, 1, 0]))
    # The chunk is wider than what is left: its real part is kept where it belongs, its padding nowhere.
    history = remember(history, observation([[1, 2, 9], [9, 9, 9], [9, 9, 9]], [6, 2, 0], [2, 0, 0]))
    assert np.asarray(history).tolist() == [[1, 2, 3, 5, 6, 7, 1, 2], [4, 8, 0, 0, 0, 0, 0, 0], [0] * 8]


@pytest.mark.parametrize(
    "settings",
    [
        {"length": 0},
        {"length": -1},
        {"max_ngram": 0},
        {"min_ngram": 0},
        {"min_ngram": 4, "max_ngram": 3},
        {"length": 2.0},
        {"length": True},
    ],
)
def test_refuses(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="NGram"):
        NGram(**settings)  # type: ignore[arg-type]
