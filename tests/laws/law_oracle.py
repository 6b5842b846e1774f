"""Verification and the sampling transform once more, in float64 NumPy and one row at a time, and the
statistics that compare distributions. Nothing here shares code with what it checks."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from scipy.stats import chi2

SIGNIFICANCE = 1e-6
"""Chance that a right distribution fails one chi-square test; a wrong one fails surely at the sample sizes
used."""


def transform(logits: np.ndarray, temperature: float, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Temperature, top-k, top-p, min-p, softmax of one row of logits, with ties kept, by sorting."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    weights = np.exp((logits - logits.max()) / temperature)
    if top_k:
        weights[logits < np.sort(logits)[::-1][min(top_k, len(logits)) - 1]] = 0
    weights = weights / weights.sum()
    if top_p < 1:
        above = np.array([weights[logits > z].sum() for z in logits])
        weights[above >= top_p] = 0
    weights[weights < min_p * weights.max()] = 0
    return weights / weights.sum()


def sibling_plan(p, q, tokens: Sequence[int], replacement: bool) -> tuple[list[float], np.ndarray]:
    """Acceptance probability of each child in turn, given that the earlier ones were refused, and the
    distribution of the next token once all are. ``q`` None: one-hot proposals."""
    left, chances = np.array(p, np.float64), []
    q = None if q is None else np.array(q, np.float64)
    for x in tokens:
        if q is None:
            chances.append(left[x])
            rest = np.where(np.arange(len(left)) == x, 0.0, left)
        else:
            chances.append(min(1.0, left[x] / q[x]) if q[x] > 0 else 0.0)
            rest = np.maximum(left - q, 0.0)
            if not replacement:
                q[x] = 0.0
                q = q / q.sum() if q.sum() > 0 else q
        left = rest / rest.sum() if rest.sum() > 1e-12 else left
    return chances, left


Outcome = tuple[tuple[int, ...], np.ndarray]
"""Nodes kept after the root, and the distribution of the token that follows."""


def token_outcomes(p, q, tokens, parent, valid, replacement=False, node=0) -> Iterator[tuple[float, Outcome]]:
    """Every outcome of token verification with its probability; ``p`` and ``q`` [N, V] are distributions at
    the nodes."""
    children = [i for i in range(1, len(parent)) if parent[i] == node and valid[i]]
    chances, rest = sibling_plan(p[node], None if q is None else q[node], tokens[children], replacement)
    reach = 1.0
    for child, chance in zip(children, chances, strict=True):
        for weight, (nodes, probs) in token_outcomes(p, q, tokens, parent, valid, replacement, child):
            yield reach * chance * weight, ((child, *nodes), probs)
        reach *= 1.0 - chance
    yield reach, ((), rest)


def token_decision(p, q, tokens, parent, valid, luck, replacement=False) -> Outcome:
    """What token verification decides when node i draws the uniform ``luck[i]``."""
    node, nodes = 0, []
    while True:
        children = [i for i in range(1, len(parent)) if parent[i] == node and valid[i]]
        chances, rest = sibling_plan(p[node], None if q is None else q[node], tokens[children], replacement)
        passed = [i for i, chance in zip(children, chances, strict=True) if luck[i] < chance]
        if not passed:
            return tuple(nodes), rest
        node = passed[0]
        nodes.append(node)


def drawn_decision(p, tokens, parent, valid, luck) -> Outcome:
    """What is decided of drafts that are a function of the text: at depth d the token is drawn from p by
    inversion of the uniform ``luck[d]``, and the first child that equals it is kept."""
    node, nodes = 0, []
    while True:
        token = int(np.argmax(np.cumsum(p[node]) > luck[len(nodes)] * p[node].sum()))
        same = [i for i in range(1, len(parent)) if parent[i] == node and valid[i] and tokens[i] == token]
        if not same:
            return tuple(nodes), np.eye(p.shape[1])[token]
        node = same[0]
        nodes.append(node)


def block_plan(p, q, tokens) -> tuple[list[float], list[np.ndarray]]:
    """Sun et al., Algorithm 2, on a chain whose root is ``tokens[0]``: the chance of each prefix (by
    length) and the distribution that follows it."""
    hot = np.eye(p.shape[1])
    joint, chances, following = 1.0, [1.0], []
    length = len(tokens) - 1
    for i in range(length + 1):
        if i:
            probs = hot[tokens[i]] if q is None else q[i - 1]
            joint = min(joint * p[i - 1][tokens[i]] / probs[tokens[i]], 1.0) if probs[tokens[i]] > 0 else 0.0
        if i == length:
            following.append(p[i])
            surplus = None
        else:
            rest = np.maximum(joint * p[i] - (hot[tokens[i + 1]] if q is None else q[i]), 0.0)
            surplus = rest.sum()
            following.append(rest / surplus if surplus > 1e-12 else p[i])
        if i:
            if surplus is None:
                chances.append(joint)
            else:
                whole = surplus + 1.0 - joint
                chances.append(surplus / whole if whole > 1e-12 else 1.0)
    return chances, following


def block_outcomes(p, q, tokens) -> Iterator[tuple[float, Outcome]]:
    """Every outcome of block verification with its probability: the longest prefix that passes is kept."""
    chances, following = block_plan(p, q, tokens)
    longer_failed = 1.0
    for length in range(len(tokens) - 1, -1, -1):
        yield longer_failed * chances[length], (tuple(range(1, length + 1)), following[length])
        longer_failed *= 1.0 - chances[length]


def block_decision(p, q, tokens, luck) -> Outcome:
    """What block verification decides when node i draws the uniform ``luck[i]``."""
    chances, following = block_plan(p, q, tokens)
    length = max(i for i in range(len(tokens)) if i == 0 or luck[i] < chances[i])
    return tuple(range(1, length + 1)), following[length]


Target = Callable[[tuple[int, ...]], np.ndarray]


def draft_distribution(draft_q: Target | None, parent, vocab: int, replacement: bool, fixed: np.ndarray):
    """Every drafted tree (tokens [N], tokens[0] unused) with its probability. ``draft_q``: distribution of a
    node's children given the path to it; None: the tree ``fixed`` is certain."""
    if draft_q is None:
        yield 1.0, fixed
        return
    for guess in itertools.product(range(vocab), repeat=len(parent) - 1):
        tokens, chance = np.array([0, *guess]), 1.0
        for i in range(1, len(parent)):
            probs = np.array(draft_q(path_tokens(tokens, parent, parent[i])))
            for earlier in range(1, i):
                if not replacement and parent[earlier] == parent[i]:
                    probs[tokens[earlier]] = 0.0
            # Once q has no token left, the sampler still fills the node: 0 stands for what it puts there.
            chance *= probs[tokens[i]] / probs.sum() if probs.sum() > 0 else float(tokens[i] == 0)
        if chance > 0:
            yield chance, tokens


def path_tokens(tokens, parent, node: int) -> tuple[int, ...]:
    """Drafted tokens from the root (left out) to ``node``."""
    path: list[int] = []
    while node:
        path.insert(0, int(tokens[node]))
        node = parent[node]
    return tuple(path)


def emitted_distribution(
    target: Target, draft_q, parent, vocab, length, *, rule="token", replacement=False, fixed=None
):
    """Distribution of the first ``length`` tokens: one verified round, continued by the target alone. [V] *
    length array."""
    out: dict[tuple[int, ...], float] = defaultdict(float)

    def extend(prefix: tuple[int, ...], weight: float) -> None:
        if weight == 0:
            return
        if len(prefix) >= length:
            out[prefix[:length]] += weight
            return
        for token, chance in enumerate(target(prefix)):
            extend((*prefix, token), weight * chance)

    everyone = np.ones(len(parent), bool)
    for chance, tokens in draft_distribution(draft_q, parent, vocab, replacement, fixed):
        paths = [path_tokens(tokens, parent, i) for i in range(len(parent))]
        p = np.array([target(path) for path in paths])
        q = None if draft_q is None else np.array([draft_q(path) for path in paths])
        if rule == "block":
            outcomes = block_outcomes(p, q, tokens)
        else:
            outcomes = token_outcomes(p, q, tokens, parent, everyone, replacement)
        for weight, (nodes, probs) in outcomes:
            kept = tuple(int(tokens[i]) for i in nodes)
            for token, last in enumerate(probs):
                extend((*kept, token), chance * weight * last)
    result = np.zeros((vocab,) * length)
    for tokens, weight in out.items():
        result[tokens] = weight
    return result


def joint_distribution(target: Target, vocab: int, length: int) -> np.ndarray:
    """Distribution of ``length`` tokens of the target alone."""
    result = np.zeros((vocab,) * length)
    for tokens in itertools.product(range(vocab), repeat=length):
        result[tokens] = np.prod([target(tokens[:i])[tokens[i]] for i in range(length)])
    return result


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Pearson's chi-square test of ``counts`` against ``probs`` (same shape). Cells that expect fewer than
    5 are merged; a count where nothing is expected is impossible: its p-value is 0."""
    counts, probs = counts.reshape(-1).astype(np.float64), probs.reshape(-1) / probs.sum()
    if counts[probs <= 1e-12].any():
        return 0.0
    expected = probs * counts.sum()
    big = expected >= 5
    observed, expected = ([*x[big], x[~big].sum()] for x in (counts, expected))
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) == 1:
        return 1.0
    observed, expected = np.array(observed), np.array(expected)
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))
