"""Topology: ancestors against a walk up the tree, shapes from choices, and the shapes that cannot be."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax.drafts.tree import StaticTree, ancestors, chain, from_choices
from eaglejax.errors import ConfigError


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
    depth is that of the deepest node, so that every step of the climb is needed."""
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
    assert (np.asarray(ancestors(jnp.asarray(parent), jnp.asarray(valid), depth - 1)) != want).any()


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
    with pytest.raises(ConfigError, match="negative"):
        chain(-1)
