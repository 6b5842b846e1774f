"""Which part of a draft is judged: the pruned tree, and what may decide about a drawn token."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from law_tools import begin, tile, tree
from scipy import stats
from width_tools import Likely

from eaglejax.sampling import Sampling
from eaglejax.speculate import widths
from eaglejax.speculate.verify import verify
from eaglejax.speculate.widths import Widest, WidthPolicy

OPTIMISED = True

V = 4
TRIALS = 40_000


@pytest.mark.parametrize(
    ("wanted", "nodes", "menu"),
    [((), 6, (6,)), ((1, 4, 8, 16), 6, (1, 4, 6)), ((16,), 6, (6,)), ((4, 2), 6, (2, 4)), ((1, 8), 1, (1,))],
)
def test_a_menu_fits_its_draft(wanted: tuple[int, ...], nodes: int, menu: tuple[int, ...]) -> None:
    assert widths.menu(wanted, nodes) == menu


def random_trees(batch: int, nodes: int) -> tuple[np.ndarray, ...]:
    """Parents, depths, validity and scores, with ties, orphans' descendants and scores that rise."""
    rng = np.random.default_rng(nodes)
    parent, depth = np.zeros((2, batch, nodes), np.int32)
    valid, score = np.ones((batch, nodes), bool), np.ones((batch, nodes), np.float32)
    for b in range(batch):
        for i in range(1, nodes):
            parent[b, i] = above = rng.integers(0, i)
            depth[b, i] = depth[b, above] + 1
            valid[b, i] = valid[b, above] and rng.random() < 0.85
            score[b, i] = score[b, above] * rng.choice([1.0, 0.5, 0.25, 1.5])
    return parent, depth, valid, score


@pytest.mark.parametrize("width", [1, 4, 9])
def test_a_pruned_draft_is_the_best_part_of_the_whole(width: int) -> None:
    batch, nodes = 40, 9
    parent, depth, valid, score = random_trees(batch, nodes)
    tokens = np.arange(batch * nodes, dtype=np.int32).reshape(batch, nodes)
    q = np.random.default_rng(0).random((batch, nodes, 3), np.float32)
    draft = tree(tokens, [0] * nodes, q=jnp.asarray(q), valid=valid)
    draft = draft.replace(
        parent=jnp.asarray(parent),
        depth=jnp.asarray(depth),
        max_depth=int(depth.max()),
        cut_score=jnp.asarray(score),
    )
    order, scores = (np.asarray(x) for x in widths.rank(draft))
    pruned, kept = jax.tree.map(np.asarray, widths.prune(draft, width))
    assert pruned.max_depth == min(int(depth.max()), width - 1)
    for b in range(batch):
        real = [-1.0] * nodes
        for i in range(nodes):
            if valid[b, i]:
                real[i] = 1.0 if i == 0 else min(score[b, i], real[parent[b, i]])
        best = sorted(range(nodes), key=lambda i: (-real[i], i))
        assert order[b].tolist() == best
        np.testing.assert_allclose(scores[b], np.maximum(np.take(real, best), 0))
        want = sorted(best[:width])
        assert kept[b].tolist() == want
        assert pruned.tokens[b].tolist() == tokens[b, want].tolist()
        assert pruned.valid[b].tolist() == valid[b, want].tolist()
        assert pruned.depth[b].tolist() == depth[b, want].tolist()
        np.testing.assert_array_equal(pruned.proposal.q[b], q[b, want])
        for i, node in enumerate(want[1:], 1):
            if valid[b, node]:
                assert want[pruned.parent[b, i]] == parent[b, node]
            assert pruned.parent[b, i] < i


def test_a_draft_without_scores_loses_its_last_nodes() -> None:
    draft = tree([[5, 6, 7, 8]], [0, 0, 1, 2])
    pruned, kept = widths.prune(draft, 3)
    assert np.asarray(kept).tolist() == [[0, 1, 2]]
    assert np.asarray(pruned.tokens).tolist() == [[5, 6, 7]]
    assert np.asarray(pruned.parent).tolist() == [[0, 0, 1]]
    line, _ = widths.prune(tree([[5, 6, 7, 8]], [0, 0, 1, 2]), 2)
    assert (line.chain, line.max_depth) == (True, 1)


P1 = np.asarray([0.4, 0.3, 0.2, 0.1])
P2 = np.asarray([[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1], [0.4, 0.1, 0.1, 0.4]])
Q1 = np.asarray([0.5, 0.15, 0.2, 0.15])
Q2 = np.asarray([[0.5, 0.3, 0.1, 0.1], [0.2, 0.3, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25], [0.1, 0.2, 0.3, 0.4]])


@functools.partial(jax.jit, static_argnames=("policy", "own", "drawn"))
def two_tokens(key: jax.Array, policy: WidthPolicy, own: bool, drawn: bool) -> tuple[jax.Array, jax.Array]:
    """(first two tokens [T, 2], index of the width judged [T]) of rows that each judge a part of a chain of
    two drawn drafts. ``own``: scores hold the drawn tokens' own probabilities."""
    p1, p2, q1, q2 = (jnp.asarray(x, jnp.float32) for x in (P1, P2, Q1, Q2))
    a, b, c = jax.random.split(key, 3)
    x1 = jax.random.categorical(a, jnp.log(q1), shape=(TRIALS,))
    x2 = jax.random.categorical(b, jnp.log(q2[x1]))
    tokens = jnp.stack([jnp.zeros_like(x1), x1, x2], axis=1)
    q = jnp.stack([jnp.broadcast_to(q1, (TRIALS, V)), q2[x1], jnp.zeros((TRIALS, V))], axis=1)
    one = jnp.ones((TRIALS,))
    here = q1[x1], q1[x1] * q2[x1, x2]
    score = jnp.stack([one, *here] if own else [one, one, here[0]], axis=1)
    draft = tree(tokens, [0, 0, 1], q=q).replace(cut_score=score)
    order, scores = widths.rank(draft)
    menu = (1, 2, 3)
    depths = jnp.take_along_axis(draft.depth, order, axis=1)
    level = jax.vmap(lambda s, d: widths.decide(policy, (), menu, s[None], d[None], drawn=drawn))(
        scores, depths
    )
    rows = tile([Sampling(temperature=1.0, seed=0)], TRIALS, V, 5)
    p = jnp.stack([jnp.broadcast_to(p1, (TRIALS, V)), p2[x1], jnp.ones((TRIALS, V))], axis=1)
    answers = []
    for width in menu:
        pruned, _ = widths.prune(draft, width, order)
        verdict = verify(jnp.log(p[:, :width]), pruned, rows, begin(rows))
        first = jnp.where(verdict.accepted > 0, x1, verdict.next_token)
        second = jnp.where(verdict.accepted > 1, x2, verdict.next_token)
        later = jax.random.categorical(c, jnp.log(p2[first]))
        answers.append(jnp.stack([first, jnp.where(verdict.accepted > 0, second, later)], axis=1))
    return jnp.take_along_axis(jnp.stack(answers), level[None, :, None], axis=0)[0], level


def chance(policy: WidthPolicy, *, own: bool = False, drawn: bool = True) -> float:
    """p-value of the joint distribution of the two tokens."""
    answers, level = map(np.asarray, two_tokens(jax.random.key(3), policy, own, drawn))
    assert len(set(level.tolist())) > 1 or isinstance(policy, Widest)
    counts = np.bincount(answers[:, 0] * V + answers[:, 1], minlength=V * V)
    return float(stats.chisquare(counts, (P1[:, None] * P2).ravel() * TRIALS).pvalue)


def test_the_prefix_above_a_drawn_token_may_decide() -> None:
    assert chance(Likely()) > 1e-3


def test_a_policy_that_looks_ahead_is_not_shown_what_would_bias_it() -> None:
    assert chance(Likely(ahead=True)) > 1e-3


@pytest.mark.parametrize(
    "wrong", [lambda: chance(Likely(), own=True), lambda: chance(Likely(ahead=True), drawn=False)]
)
def test_a_drawn_token_that_decides_about_itself_bends_the_law(wrong: Callable[[], float]) -> None:
    """The two rules above can be broken: by the token's own score, and by all scores at one time."""
    assert wrong() < 1e-9
