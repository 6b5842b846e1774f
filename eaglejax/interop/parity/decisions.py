"""Where two runs decided differently, and how close the decision was.

A tree, an accepted path and the emitted tokens are choices of the largest of several numbers. Two runs whose
numbers agree up to rounding still choose differently where two of them are almost equal: a near tie. The gap
between the two candidates, in logits or in cumulative log-probabilities, tells it from a fault.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from eaglejax.interop.parity.compare import Recorded, Stage
from eaglejax.interop.parity.names import Place

_TREE = ("tokens", "parent", "depth", "valid")


@dataclasses.dataclass(frozen=True)
class Decision:
    """The first choice of a stage that differs.

    ``name``: the tensor. ``place``: of what was chosen (a node's number, or the position among the tokens).
    ``expected``, ``found``: the token ids chosen. ``gap``: how far apart the two candidates were, in the JAX
    run's logits, or log-probabilities for a tree; infinite where no closeness explains the difference.
    """

    name: str
    place: int
    expected: int
    found: int
    gap: float


def first_decision(stage: Stage, found: Mapping[str, np.ndarray]) -> Decision | None:
    """The first choice of ``stage`` that the run whose tensors are ``found`` (by name) made otherwise."""

    def other(part: str, operation: str) -> np.ndarray:
        return found[str(Place(stage.stage, stage.index, part, operation))][0]

    if stage.stage == "round":
        for operation in _TREE:
            if not np.array_equal(stage.value("tree", operation), other("tree", operation)):
                return _tree_decision(stage, {x: other("tree", x) for x in (*_TREE, "scores")})
    count = int(stage.value("verify", "count"))
    chosen, instead = stage.value("verify", "tokens"), other("verify", "tokens")
    name = str(Place(stage.stage, stage.index, "verify", "tokens"))
    for i in range(min(count, len(instead))):
        if chosen[i] != instead[i]:
            node = int(stage.value("verify", "path")[i]) if stage.stage == "round" else 0
            logits = stage.tensors[str(Place(stage.stage, stage.index, "target", "logits"))]
            gap = abs(_logit(logits, node, chosen[i]) - _logit(logits, node, instead[i]))
            return Decision(name, i, int(chosen[i]), int(instead[i]), gap)
    for operation in ("count", "path", "accepted") if stage.stage == "round" else ("count",):
        a, b = stage.value("verify", operation), other("verify", operation)
        if operation == "path":
            # Entries past the accepted ones repeat the last.
            a, b = a[:count], b[:count]
        if not np.array_equal(a, b):
            # The same tokens, yet another number of them or another way through the tree: no tie does that.
            at = int(np.argmax(np.atleast_1d(a != b))) if np.shape(a) == np.shape(b) else 0
            name = str(Place(stage.stage, stage.index, "verify", operation))
            return Decision(name, at, int(np.atleast_1d(a)[at]), int(np.atleast_1d(b)[at]), math.inf)
    return None


def _logit(logits: Recorded, node: int, token: int) -> float:
    """Logit of ``token`` at ``node``; -inf where only larger ones were kept."""
    row = logits.values[0, node]
    if logits.top is None:
        return float(row[token])
    at = np.flatnonzero(logits.top[0, node] == token)
    return float(row[at[0]]) if len(at) else -math.inf


def _tree_decision(stage: Stage, found: Mapping[str, np.ndarray]) -> Decision:
    """The first node at which two trees of the same shape differ."""
    expected = {x: stage.value("tree", x) for x in (*_TREE, "scores")}
    name = str(Place(stage.stage, stage.index, "tree", "tokens"))
    if any(expected[x].shape != found[x].shape for x in _TREE):
        return Decision(name, 0, -1, -1, math.inf)
    differs = np.zeros(len(expected["tokens"]), bool)
    for x in _TREE:
        differs |= expected[x] != found[x]
    node = int(np.argmax(differs))
    tokens = int(expected["tokens"][node]), int(found["tokens"][node])
    above = int(expected["parent"][node]), int(found["parent"][node])
    gaps = []
    if node and above[0] == above[1]:
        # Two children of one node that changed places, or of which each run kept one.
        gaps.append(abs(expected["scores"][node] - found["scores"][node]))
    elif node:
        # Their parents changed places among the nodes that were expanded.
        gaps.append(abs(expected["scores"][above[0]] - found["scores"][above[1]]))
    paths = _paths(expected), _paths(found)
    lost = [expected["scores"][i] for path, i in paths[0].items() if path not in paths[1]]
    won = [found["scores"][i] for path, i in paths[1].items() if path not in paths[0]]
    if lost and won:
        # The tree had room for one of the two.
        gaps.append(abs(max(lost) - max(won)))
    return Decision(name, node, *tokens, float(min(gaps, default=math.inf)))


def _paths(tree: Mapping[str, np.ndarray]) -> dict[tuple[int, ...], int]:
    """Number of every proposed node by the tokens that lead to it."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for i in range(1, len(tree["tokens"])):
        above = paths.get(int(tree["parent"][i]))
        if tree["valid"][i] and above is not None:
            paths[i] = (*above, int(tree["tokens"][i]))
    return {path: i for i, path in paths.items()}
