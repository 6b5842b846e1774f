"""Topology: ancestors against a walk up the tree, shapes from choices, and the shapes that cannot be."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax.drafts.draft_model.proposer import DraftModel
from eaglejax.drafts.ngram import NGram
from eaglejax.drafts.prediction import Prediction
from eaglejax.drafts.tree import DynamicTree, StaticTree, ancestors, chain, from_choices
from eaglejax.errors import ConfigError
from eaglejax.speculate.options import DecodeOptions


def walked(parent: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, int]:
    """Ancestors-or-self by a walk to the root, and the depth of the deepest valid node."""
    want, deepest = np.zeros((*parent.shape, parent.shape[1]), bool), 0
    for row, i in np.ndindex(*parent.shape):
        want[row, i, i] = True
        node, depth = i, 0
        while valid[row, i] and node:
            node, depth = parent[row, node], depth + 1
            want[row, i, node] = True
        deepest = max(deepest, depth)
    return want, deepest


def test_ancestors_are_those_of_a_walk_to_the_root() -> None:
    """A36: trees of different size side by side; nobody sees an invalid node, which sees itself alone. The
    depth is that of the deepest node, and fewer doublings than it asks for do not reach it."""
    rng = np.random.default_rng(0)
    rows, nodes = 16, 9
    parent = np.array([[0, *(rng.integers(i) for i in range(1, nodes))] for _ in range(rows)])
    valid = np.ones((rows, nodes), bool)
    for row in range(rows):
        for i in range(1, nodes):
            valid[row, i] = valid[row, parent[row, i]] and rng.random() < 0.8
    want, depth = walked(parent, valid)
    assert depth < nodes - 1
    assert not valid.all()
    np.testing.assert_array_equal(ancestors(jnp.asarray(parent), jnp.asarray(valid), depth), want)
    assert (np.asarray(ancestors(jnp.asarray(parent), jnp.asarray(valid), depth // 2)) != want).any()


def test_a_chain_sees_all_of_itself() -> None:
    for nodes in (1, 2, 3, 9):
        parent = jnp.asarray([[0, *range(nodes - 1)]])
        got = ancestors(parent, jnp.ones((1, nodes), bool), nodes - 1)
        np.testing.assert_array_equal(got[0], np.tril(np.ones((nodes, nodes), bool)))


@pytest.mark.parametrize(
    ("choices", "parent", "depth", "is_chain"),
    [
        ([[0], [1], [2], [3]], (0, 0, 0, 0, 0), 1, False),
        ([[0], [0, 0], [0, 0, 0]], (0, 0, 1, 2), 3, True),
        ([[0]], (0, 0), 1, True),
        ([], (0,), 0, True),
        ([[0, 1], [1], [0], [0, 0]], (0, 0, 0, 1, 1), 2, False),
    ],
)
def test_shapes_from_choices(
    choices: Sequence[Sequence[int]], parent: tuple[int, ...], depth: int, is_chain: bool
) -> None:
    """A34: trees of depth one, chains, one draft, none at all; the order of the choices says nothing."""
    tree = from_choices(choices)
    assert (tree.parent, tree.depth, tree.is_chain, tree.nodes) == (parent, depth, is_chain, len(parent))
    assert tree == from_choices(list(reversed(choices)))
    assert chain(depth) == tree or not is_chain


@pytest.mark.parametrize(
    ("choices", "match"),
    [
        ([[0, 0]], "hangs in the air"),
        ([[0], [0]], "twice"),
        ([[]], "root"),
        ([[-1]], "negative rank"),
    ],
)
def test_choices_that_cannot_be(choices: Sequence[Sequence[int]], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        from_choices(choices)


def test_trees_that_cannot_be() -> None:
    for parent, rank in (((), ()), ((1, 0), (0, 0)), ((0, 1), (0, 0)), ((0, 0), (0,))):
        with pytest.raises(ConfigError):
            StaticTree(parent, rank)
    for length in (-1, 129, 2**40, True):
        with pytest.raises(ConfigError, match=r"chain length is .*; it must be an integer from 0 to 128"):
            chain(length)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NGram(length=600), "NGram: length is 600; it must be an integer from 1 to 128"),
        (lambda: NGram(max_ngram=600), "NGram: max_ngram is 600; it must be an integer from 1 to 64"),
        (lambda: Prediction(length=2**31), "Prediction: length is 2147483648"),
        (lambda: Prediction(memory=65), "Prediction: memory is 65"),
        (lambda: DraftModel(None, length=129), "DraftModel: length is 129"),
        (lambda: DynamicTree(depth=129), "tree depth is 129; it must be an integer from 1 to 128"),
        (lambda: DynamicTree(branching=2**40), "tree branching is 1099511627776"),
        (lambda: DynamicTree(nodes=1025, branching=40), "tree nodes, which counts the root, is 1025"),
        (lambda: DynamicTree(depth=100, branching=100), "scores 990100 nodes; at most 32768 are scored"),
        (lambda: from_choices([[0] * n for n in range(1, 200)]), "length of a tree's path is 129"),
        (lambda: from_choices([[n] for n in range(2000)]), "number of a tree's paths is 2000"),
        (lambda: from_choices([[10**9]]), "largest rank of a child is 1000000000"),
        (lambda: DecodeOptions(widths=(1, 2000)), "widths are .*they count nodes.*1 to 1024"),
        (lambda: DecodeOptions(widths=tuple(range(1, 99))), "give a tuple of at most 16"),
        (lambda: DecodeOptions(rounds_a_chunk=2**31), "rounds_a_chunk is 2147483648"),
        (lambda: DecodeOptions(prefill_width=2**31), "prefill_width is 2147483648"),
    ],
)
def test_sizes_beyond_the_limits(make, words) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
