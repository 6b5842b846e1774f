"""Topology of a draft tree: which shape a fixed one has, how large a dynamic one is, who is whose ancestor.

Shapes are checked before anything is loaded, so that jax is imported where arrays are made alone.

Nodes are numbered so that a parent comes before its children; node 0 is the root (the last committed token)
and its own parent. Siblings are tried in the order of their numbers.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eaglejax.drafts.limits import MOST_BRANCHING, MOST_DEPTH, MOST_NODES, MOST_POOL, check_count, check_paths
from eaglejax.errors import ConfigError

if TYPE_CHECKING:
    import jax


def ancestors(parent: jax.Array, valid: jax.Array, depth: int) -> jax.Array:
    """Ancestor-or-self matrix [B, N, N] bool of trees given by ``parent`` [B, N] int32.

    ``[b, i, j]`` says that j lies on the path from the root to i (both ends included). An invalid node sees
    itself alone, so that its softmax is never empty, and nobody sees it. ``depth`` bounds the tree's depth.
    """
    import jax.numpy as jnp

    n = parent.shape[1]
    eye = jnp.eye(n, dtype=bool)
    reach = jnp.broadcast_to(eye, (parent.shape[0], n, n))
    # Each step doubles how far up a node sees: what it sees, and what the node at the end of that sees.
    for _ in range(depth.bit_length()):
        reach |= jnp.take_along_axis(reach, parent[:, :, None], axis=1)
        parent = jnp.take_along_axis(parent, parent, axis=1)
    both = valid[:, :, None] & valid[:, None, :]
    return jnp.where(both, reach, eye)


@dataclasses.dataclass(frozen=True)
class StaticTree:
    """A fixed tree shape: ``parent[i]`` and ``rank[i]`` (which child of its parent) of every node.

    Node 0 is the root. Built by :func:`chain` or :func:`from_choices`. Hashable, so it can be a static
    argument.
    """

    parent: tuple[int, ...]
    rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parent or self.parent[0] != 0:
            raise ConfigError("a tree starts with its root: parent[0] must be 0")
        check_count("tree nodes, which counts the root,", len(self.parent), MOST_NODES)
        if len(self.rank) != len(self.parent):
            raise ConfigError(f"rank has {len(self.rank)} entries for {len(self.parent)} nodes")
        for i, p in enumerate(self.parent[1:], 1):
            if not 0 <= p < i:
                raise ConfigError(f"node {i} has parent {p}; a parent must come before its child")
        check_count("tree depth", self.depth, MOST_DEPTH, least=0)
        check_count("the largest rank of a child", max(self.rank), MOST_BRANCHING - 1, least=0)

    @property
    def nodes(self) -> int:
        """N, root included."""
        return len(self.parent)

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of every node; the root's is 0."""
        out = [0]
        for p in self.parent[1:]:
            out.append(out[p] + 1)
        return tuple(out)

    @property
    def depth(self) -> int:
        """D: most drafts that can be accepted in a round."""
        return max(self.depths)

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The path of child ranks to every node but the root, as :func:`from_choices` takes them."""
        out: list[tuple[int, ...]] = [()]
        for p, r in zip(self.parent[1:], self.rank[1:], strict=True):
            out.append((*out[p], r))
        return tuple(out[1:])

    @property
    def branching(self) -> int:
        """Most children of one node (0 for a lone root)."""
        return max(Counter(self.parent[1:]).values(), default=0)

    @property
    def is_chain(self) -> bool:
        """Every node has one child at the most, so node i sits at depth i."""
        return self.depth == self.nodes - 1


@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """Size of a dynamic tree.

    ``depth`` D: most drafts that one round can accept, which takes D - 1 draft forwards over K nodes besides
    the one over the accepted tokens (the official code's ``depth`` option is D - 1; its default 7 is depth 8
    of the EAGLE-3 paper). ``branching`` K: nodes expanded a level and children of each. ``nodes`` N: tokens
    that the target scores a round, root included, like the official ``total_token``.
    """

    depth: int = 6
    branching: int = 10
    nodes: int = 60

    def __post_init__(self) -> None:
        check_count("tree depth", self.depth, MOST_DEPTH)
        check_count("tree branching", self.branching, MOST_BRANCHING)
        check_count("tree nodes, which counts the root,", self.nodes, MOST_NODES, least=2)
        if self.pool > MOST_POOL:
            raise ConfigError(
                f"a tree of depth {self.depth} and branching {self.branching} scores {self.pool} nodes; at "
                f"most {MOST_POOL} are scored a round: take fewer levels or branches"
            )
        if self.nodes - 1 > self.pool:
            raise ConfigError(
                f"a tree of depth {self.depth} and branching {self.branching} scores {self.pool} nodes; "
                f"nodes={self.nodes} asks for {self.nodes - 1} of them besides the root"
            )

    @property
    def pool(self) -> int:
        """Nodes that are scored: K + (D - 1) K^2."""
        return self.branching + (self.depth - 1) * self.branching**2

    @property
    def reach(self) -> int:
        """Deepest level that can be in the tree: with N - 1 drafts no path is longer than that."""
        return min(self.depth, self.nodes - 1)

    @property
    def is_chain(self) -> bool:
        """Width 1: node i sits at depth i."""
        return self.branching == 1


def chain(length: int) -> StaticTree:
    """A chain of ``length`` drafts behind the root (``length`` 0: the root alone)."""
    check_count("chain length", length, MOST_DEPTH, least=0)
    return StaticTree(parent=(0, *range(length)), rank=(0,) * (length + 1))


def from_choices(choices: Sequence[Sequence[int]]) -> StaticTree:
    """A tree from Medusa/EAGLE-1 style choices: each entry is a path of child ranks, e.g. ``[0, 1]`` = second
    child of the root's first child. Every prefix of a path must be listed too; order does not matter.

    Raises ConfigError for an empty, repeated or disconnected path or a negative rank.
    """
    check_paths(choices)
    paths = sorted((tuple(int(r) for r in c) for c in choices), key=lambda c: (len(c), c))
    index: dict[tuple[int, ...], int] = {(): 0}
    parent, rank = [0], [0]
    for path in paths:
        if not path:
            raise ConfigError("an empty path is the root, which is always there; leave it out")
        if min(path) < 0:
            raise ConfigError(f"tree choice {list(path)} has a negative rank; ranks count from 0")
        if path in index:
            raise ConfigError(f"tree choice {list(path)} is listed twice")
        if path[:-1] not in index:
            raise ConfigError(f"tree choice {list(path)} hangs in the air: {list(path[:-1])} is not listed")
        index[path] = len(parent)
        parent.append(index[path[:-1]])
        rank.append(path[-1])
    return StaticTree(parent=tuple(parent), rank=tuple(rank))
