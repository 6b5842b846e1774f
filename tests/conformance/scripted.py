"""Proposers that do as they are told: simulated acceptance, and known draft distributions for tests of
losslessness.

:class:`Scripted` is given the text that greedy decoding will produce and how much of it to guess right in
each round, which makes any acceptance behaviour repeatable (and lets one measure what a draft of a given
quality would be worth). :class:`FromTables` draws from fixed tables, so that what it proposes is distributed
in a way that is known exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import pytree, sampling
from eaglejax.drafts.base import Draft, Observation, Proposal, Request
from eaglejax.drafts.limits import check_count
from eaglejax.drafts.static import OnTree, static_draft
from eaglejax.drafts.tree import StaticTree
from eaglejax.errors import ConfigError, MismatchError
from eaglejax.sampling import RowSampling, Sampling

WIDTH = 64
"""Tokens that a script holds."""


class Predicted(list[Any]):
    """Stands for the params of a proposer whose requests bring predictions: token ids a row, or None."""

    def requests(self) -> list[Request]:
        """Requests that bring them."""
        return [Request((0,), Sampling(), 1, (), None if p is None else tuple(p)) for p in self]


@pytree.dataclass
class Script:
    """``reference`` [B, T] int32: the token at each position of the row (prompt and continuation).
    ``goal`` [B, R] int32: the node that round r guesses right up to (0: none); after R rounds it starts
    again. ``turn`` [B] int32: rounds so far."""

    reference: jax.Array
    goal: jax.Array
    turn: jax.Array


@dataclasses.dataclass(frozen=True)
class Scripted(OnTree[None, Script]):
    """Guesses the path to the scripted node right and everything else wrong.

    ``tree``: any fixed shape. ``vocab_size``: wrong tokens are the right one plus ``rank + 1``, modulo this;
    it must exceed the most children of a node by one at least, so that siblings differ (ConfigError). Made
    for rows that decode greedily: a sampled row may well accept a token that is not in the reference. State:
    the script, which the requests bring.
    """

    tree: StaticTree
    vocab_size: int

    def __post_init__(self) -> None:
        check_count("Scripted: vocab_size", self.vocab_size, 2**31 - 1)
        if self.vocab_size <= max(self.tree.rank) + 1:
            raise ConfigError(
                f"Scripted: a vocabulary of {self.vocab_size} has too few wrong tokens for "
                f"{max(self.tree.rank) + 1} siblings; it must exceed their number by one"
            )

    def script(
        self,
        reference: Sequence[Sequence[int]],
        accept: Sequence[int] | Sequence[Sequence[int]],
        sibling: Literal["first", "last", "alternate"] = "first",
    ) -> Predicted:
        """The script of each row, as what its request brings.

        ``reference``: all tokens of each row, prompt included. ``accept``: drafts to accept in round 0, 1,
        ..., for all rows or one list a row (of one length). ``sibling``: which node of that depth the right
        path leads to: the first, the last, or by turns. Raises ConfigError for a count beyond the tree's
        depth.
        """
        rows = len(reference)
        counts = np.broadcast_to(np.atleast_2d(np.asarray(accept, np.int64)), (rows, np.shape(accept)[-1]))
        if counts.min() < 0 or counts.max() > self.depth:
            raise ConfigError(
                f"Scripted: accept counts {counts.min()}..{counts.max()} are not within "
                f"the tree's depths 0..{self.depth}"
            )
        depths = np.asarray(self.tree.depths)
        ends = [np.flatnonzero(depths == d)[[0, -1]].tolist() for d in range(self.depth + 1)]
        brought = []
        for text, row in zip(reference, counts.tolist(), strict=True):
            late = [
                sibling == "last" or (sibling == "alternate" and turn % 2 == 1) for turn in range(len(row))
            ]
            goal = [ends[count][last] for count, last in zip(row, late, strict=True)]
            brought.append([len(goal), *goal, *text])
        return Predicted(brought)

    def inputs(self, requests: Sequence[Request], slots: int) -> Script:
        """The scripts that ``script`` put into the requests; other rows do as the first one is told, or guess
        nothing right."""
        brought = [list(r.prediction or (1, 0)) for r in requests]
        brought += brought[:1] * (slots - len(brought))
        return Script(
            reference=jnp.asarray([(b[1 + b[0] :] + [0] * WIDTH)[:WIDTH] for b in brought], jnp.int32),
            goal=jnp.asarray([b[1 : 1 + b[0]] for b in brought], jnp.int32),
            turn=jnp.zeros((slots,), jnp.int32),
        )

    def init(self, params: None, *, batch: int, capacity: int, inputs: Any = ()) -> Script:
        """Round 0 for every row."""
        del params, capacity
        if inputs.reference.shape[0] != batch:
            raise MismatchError(
                f"a script for {inputs.reference.shape[0]} rows does not fit a batch of {batch}"
            )
        return inputs

    def observe(self, params: None, state: Script, seen: Observation) -> Script:
        """Nothing to remember."""
        del params, seen
        return state

    def propose(
        self,
        params: None,
        state: Script,
        root: jax.Array,
        lengths: jax.Array,
        rows: RowSampling,
        keys: jax.Array,
    ) -> tuple[Draft, Script]:
        """The tree with one right path."""
        del params, rows, keys
        turn = (state.turn % state.goal.shape[1])[:, None]
        goal = jnp.take_along_axis(state.goal, turn, axis=1)[:, 0]
        right_path = jnp.asarray(_paths(self.tree))[goal]
        place = lengths[:, None] + jnp.asarray(self.tree.depths, jnp.int32)
        right = jnp.take_along_axis(state.reference, jnp.minimum(place, state.reference.shape[1] - 1), axis=1)
        wrong = (right + 1 + jnp.asarray(self.tree.rank, jnp.int32)) % self.vocab_size
        tokens = jnp.where(right_path, right, wrong).at[:, 0].set(root)
        return static_draft(self.tree, tokens, jnp.ones_like(tokens, bool), Proposal()), state.replace(
            turn=state.turn + 1
        )


def _paths(tree: StaticTree) -> np.ndarray:
    """[N, N] bool: row i marks the nodes on the way from the root to i, both included."""
    paths = np.eye(tree.nodes, dtype=bool)
    for i, p in enumerate(tree.parent[1:], 1):
        paths[i] |= paths[p]
    return paths


@dataclasses.dataclass(frozen=True)
class FromTables(OnTree[jax.Array, tuple[()]]):
    """Draws the children of a node from a table that depends on the node's position alone.

    ``params``: logits [T, Vd] f32; the children of a node at position t are drawn from ``softmax(params[t %
    T])``, or are its largest entries where no row of the batch is sampled. ``ids``: the target id of each of
    the Vd entries, strictly increasing (None: the same ids). ``replacement``: siblings are independent
    draws, or each is drawn without the earlier ones. Stateless.
    """

    tree: StaticTree
    ids: tuple[int, ...] | None = None
    replacement: bool = False

    def __post_init__(self) -> None:
        if self.ids is not None and any(a >= b for a, b in zip(self.ids, self.ids[1:], strict=False)):
            raise ConfigError("FromTables: ids must be strictly increasing")

    def init(self, params: jax.Array, *, batch: int, capacity: int, inputs: Any = ()) -> tuple[()]:
        """No state."""
        del params, batch, capacity, inputs
        return ()

    def observe(self, params: jax.Array, state: tuple[()], seen: Observation) -> tuple[()]:
        """Nothing to remember."""
        del params, seen
        return state

    def propose(
        self,
        params: jax.Array,
        state: tuple[()],
        root: jax.Array,
        lengths: jax.Array,
        rows: RowSampling,
        keys: jax.Array,
    ) -> tuple[Draft, tuple[()]]:
        """A tree drawn from the tables; siblings beyond the table's support are not valid."""
        tree, batch = self.tree, root.shape[0]
        place = (lengths[:, None] + jnp.asarray(tree.depths, jnp.int32)) % params.shape[0]
        logits = params[place]
        likeliest = jax.nn.one_hot(jnp.argmax(logits, axis=-1), params.shape[1], dtype=jnp.float32)
        q = jnp.where((rows.temperature > 0)[:, None, None], jax.nn.softmax(logits, axis=-1), likeliest)
        tokens, valid = [root], [jnp.ones((batch,), bool)]
        for node in range(1, tree.nodes):
            parent = tree.parent[node]
            siblings = [i for i in range(1, node) if tree.parent[i] == parent]
            weight = q[:, parent] if rows.sampled else jax.nn.softmax(logits[:, parent], axis=-1)
            if not (self.replacement and rows.sampled):
                for i in siblings:
                    weight = jnp.where(jnp.arange(params.shape[1]) == tokens[i][:, None], 0.0, weight)
            if rows.sampled:
                drawn = sampling.draw(weight, sampling.fold(keys, node))
            else:
                drawn = jnp.argmax(weight, axis=-1)
            tokens.append(drawn.astype(jnp.int32))
            valid.append(valid[parent] & (weight > 0).any(-1))
        drafted = jnp.stack(tokens, axis=1)
        ids = None if self.ids is None else jnp.asarray(self.ids, jnp.int32)
        if ids is not None:
            drafted = jnp.take(ids, drafted, mode="clip").at[:, 0].set(root)
        proposal = Proposal(q=q, ids=ids, replacement=self.replacement) if rows.sampled else Proposal()
        return static_draft(tree, drafted, jnp.stack(valid, axis=1), proposal), state
