"""Several continuations as one tree, against a trie written out; n-gram trees, suffix decoding, its store."""

from __future__ import annotations

import collections

import jax.numpy as jnp
import numpy as np
import pytest
from draft_tools import first_proposal, predicting

from eaglejax.drafts.base import Request
from eaglejax.drafts.continuations import best_places, merged, offers
from eaglejax.drafts.ngram import NGram
from eaglejax.drafts.suffix.proposer import Suffix
from eaglejax.drafts.suffix.store import Store
from eaglejax.errors import ConfigError
from eaglejax.sampling import Sampling

CAPACITY = 48


def paths(draft, row=0):
    """The valid nodes' paths of tokens -> their scores."""
    tokens, parent, valid, score = (
        np.asarray(x)[row] for x in (draft.tokens, draft.parent, draft.valid, draft.cut_score)
    )
    found = {0: ()}
    for i in range(1, len(tokens)):
        if valid[i]:
            found[i] = (*found[parent[i]], int(tokens[i]))
            assert np.asarray(draft.depth)[row, i] == len(found[i])
    assert len(set(found.values())) == len(found), "siblings say the same"
    return {found[i]: float(score[i]) for i in found if i}


def trie(texts, agreed):
    """Every prefix of a continuation -> its chance and the share of the weights that goes through it."""
    longest = max(agreed, default=0)
    weight, chance = collections.Counter(), {(): 1.0}
    for text, n in zip(texts, agreed, strict=True):
        for size in range(len(text) + 1):
            weight[tuple(text[:size])] += 2.0 ** (n - longest)
    for path in sorted(weight, key=len)[1:]:
        chance[path] = chance[path[:-1]] * weight[path] / (weight[path[:-1]] + 1 / (1 + longest))
    return {path: (chance[path], weight[path] / weight[()]) for path in chance if path}


def test_a_tree_equals_the_trie_of_its_continuations() -> None:
    rng = np.random.default_rng(0)
    many, length, nodes, rows = 5, 4, 5, 40
    tokens = rng.integers(0, 2, (rows, many, length))
    offered = rng.integers(0, length + 1, (rows, many))
    agreed = -np.sort(-rng.integers(0, 4, (rows, many)))
    draft = merged(
        jnp.full(rows, 7), *map(jnp.asarray, (tokens, offered, agreed)), nodes=nodes, min_probability=0.1
    )
    cut = 0
    for row in range(rows):
        texts = [tokens[row, i, : offered[row, i]].tolist() for i in range(many) if agreed[row, i]]
        everything = trie(texts, [int(n) for n in agreed[row] if n])
        likely = {p: c for p, (c, share) in everything.items() if share >= 0.1 - 1e-6}
        got = paths(draft, row)
        assert len(got) == min(len(likely), nodes - 1)
        cut += len(likely) > nodes - 1
        best = sorted(likely.values(), reverse=True)[: nodes - 1]
        np.testing.assert_allclose(sorted(got.values(), reverse=True), best, rtol=1e-5)
        for path, score in got.items():
            np.testing.assert_allclose(score, likely[path], rtol=1e-5)
            assert path[:-1] in got or len(path) == 1
    assert cut > 5


def test_places_are_the_longest_then_those_with_most_to_offer_then_the_latest() -> None:
    overlap = jnp.asarray([[1, 3, 0, 3, 3, 2, 3]])
    left = jnp.asarray([[9, 1, 9, 4, 4, 9, 0]])
    place, agreed = best_places(overlap, left, count=5, length=4, least=2)
    assert place[0, :4].tolist() == [4, 3, 1, 5]
    assert agreed.tolist() == [[3, 3, 3, 2, 0]]
    assert best_places(overlap, left, count=9, length=4)[1].tolist() == [[3, 3, 3, 2, 1, 0, 0, 0, 0]]


def test_an_ngram_tree_holds_what_followed_each_occurrence() -> None:
    text = [1, 2, 5, 6, 1, 2, 5, 7, 1, 2, 8, 1, 2]
    proposer = NGram(length=2, max_ngram=3, candidates=3)
    got = paths(first_proposal(proposer, None, [text], CAPACITY))
    # The latest two occurrences are longer by nothing, so that all three weigh the same.
    assert set(got) == {(5,), (5, 7), (8,), (8, 1)} or set(got) == {(5,), (5, 6), (5, 7), (8,)}
    assert got[5,] == pytest.approx(2 / (3 + 1 / 3))
    none = first_proposal(NGram(length=2, max_ngram=3, min_ngram=3, candidates=3), None, [text], CAPACITY)
    assert np.asarray(none.valid).tolist() == [[True] + [False] * 4]


def test_behind_a_longer_agreement_more_is_drafted() -> None:
    """``max_spec_factor`` and ``max_tree_depth`` as vLLM has them."""
    assert offers(6, 1.0).tolist() == [0, 1, 2, 3, 3, 3, 3]
    assert offers(6, 2.0).tolist() == [0, 2, 4, 4, 4, 4, 4]
    assert offers(4, 0.5).tolist() == [0, 0, 1, 1, 1]
    text = [3, 4, 5, 6, 7, 8, 3, 4]
    for factor, size in ((1.0, 2), (1.5, 3), (0.5, 1)):
        proposer = Suffix(max_spec_factor=factor, max_cached_requests=0)
        got = paths(first_proposal(proposer, None, [text], CAPACITY))
        assert max(got, key=len) == (5, 6, 7)[:size]


def test_answers_of_earlier_requests_are_drafts() -> None:
    proposer = Suffix(window=64)
    answer = [11, 12, 13, 14, 15, 16]
    asked = Request((9, 9), Sampling(), 8)
    proposer.learn(asked, answer[:4])
    proposer.learn(asked, answer[4:])
    proposer.learn(Request((9, 9), Sampling(), 8), [20, 21])
    inputs = proposer.inputs(predicting([None, None]), 3)
    texts = [[1, 11, 12, 13], [1, 16], [1, 20]]
    draft = first_proposal(proposer, None, texts, CAPACITY, inputs)
    # What stands behind the end of an answer belongs to another.
    assert [set(paths(draft, row)) for row in range(3)] == [{(14,), (14, 15), (14, 15, 16)}, set(), set()]
    assert paths(first_proposal(proposer, None, texts[:1], CAPACITY)) == {}
    # An occurrence in two texts may not run over the border between them.
    draft = first_proposal(proposer, None, [[16, 20]], CAPACITY, proposer.inputs(predicting([None]), 1))
    assert set(paths(draft)) == {(21,)}


def test_a_store_keeps_within_its_bounds_and_knows_what_is_alike() -> None:
    store = Store(3, tokens=20)
    rows = [Request((i,), Sampling(), 8) for i in range(5)]
    for i, row in enumerate(rows):
        store.learn(row, [10 * i + n for n in range(5)])
    assert (len(store), store.size) == (3, 15)
    assert [t[0] for t in store.alike((1,), 100)] == [20, 30, 40]
    store.learn(rows[3], [35, 36])
    assert [t.tolist()[-1] for t in store.alike((1,), 100)] == [24, 36, 44]
    assert [t[0] for t in store.alike((1,), 5)] == [40], "of equals the latest"
    assert [t.tolist() for t in store.alike((1, 31, 32, 33), 7)] == [[30, 31, 32, 33, 34, 35, 36]]
    assert sum(map(len, store.alike((20, 21, 22), 8))) == 8
    store.add(range(100, 113))
    assert (len(store), store.size) == (2, 18), "tokens too are bounded"
    store.add(range(200, 300))
    assert (len(store), store.size) == (1, 20)
    store.learn(rows[0], [7])
    assert (len(store), store.size) == (1, 1)
    nothing = Store(0)
    nothing.learn(rows[0], [1, 2, 3])
    nothing.add([1])
    assert len(nothing) == 0


def test_two_that_remember_other_texts_are_one_program() -> None:
    one, other = Suffix(), Suffix()
    one.store.add([1, 2, 3])
    assert one == other
    assert hash(one) == hash(other)
    assert "store" not in repr(one)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"size": 1}, "size is 1; it must"),
        ({"max_cached_requests": -1}, "max_cached_requests is -1"),
        ({"max_spec_factor": 0.0}, "max_spec_factor is 0"),
        ({"max_spec_factor": 0.1, "max_tree_depth": 8}, "drafts nothing"),
        ({"min_token_prob": 1.5}, "min_token_prob is 1.5"),
        ({"places": 0}, "places is 0"),
    ],
)
def test_refuses(settings: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Suffix(**settings)  # type: ignore[arg-type]


def test_a_tree_of_one_candidate_has_no_size() -> None:
    with pytest.raises(ConfigError, match="one candidate is a chain"):
        NGram(size=4)
    with pytest.raises(ConfigError, match="from 2 to"):
        NGram(candidates=2, size=1)
