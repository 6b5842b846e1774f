"""Rounds of the proposer against the NumPy transcription of the official round."""

from __future__ import annotations

import functools

import eagle_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_cases import CONFIGS, features_of, greedy_rows, make, numpy_weights, observation

from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.tree import DynamicTree, ancestors
from eaglejax.speculate.verify import verify

WIDTH = 8

CASES = [
    ("eagle3", DynamicTree(depth=4, branching=3, nodes=14)),
    ("eagle1", DynamicTree(depth=3, branching=4, nodes=20)),
    ("reduced", DynamicTree(depth=6, branching=2, nodes=9)),
    ("modern", DynamicTree(depth=3, branching=5, nodes=56)),
    ("reduced", DynamicTree(depth=1, branching=6, nodes=7)),
]


@pytest.mark.parametrize(("name", "tree"), CASES, ids=lambda x: str(x))
def test_rounds_agree_node_for_node(name, tree):
    """Trees, masks, positions, walks and refills over five rounds of three rows that accept differently (A33,
    A41)."""
    config, batch, rounds = CONFIGS[name], 3, 5
    params = make(config, seed=tree.depth)
    proposer = Eagle(config, tree)
    rng = np.random.default_rng(5)
    rows = greedy_rows(batch, config.vocab_size)
    observe = jax.jit(proposer.observe)
    propose = jax.jit(proposer.propose)
    judge = jax.jit(functools.partial(verify, method="token"))

    prompts = [rng.integers(0, config.vocab_size, n).tolist() for n in (1, 5, 8)]
    roots = rng.integers(0, config.vocab_size, batch).tolist()
    drafts = [oracle.Draft(numpy_weights(params), config, params.ids) for _ in range(batch)]
    state = proposer.init(params, batch=batch, capacity=64)
    lengths = np.zeros(batch, int)
    fresh = [
        (p, [*p[1:], r], features_of(config, np.array(p), 0, 0)) for p, r in zip(prompts, roots, strict=True)
    ]
    texts = [[*p] for p in prompts]
    width = WIDTH
    accepted_in_all = set()
    for _ in range(rounds):
        state = observe(params, state, observation(config, fresh, lengths, width))
        width = proposer.depth + 1
        for draft, (_, following, features) in zip(drafts, fresh, strict=True):
            draft.refill(features.astype(np.float64), following)
        lengths = np.array([len(t) for t in texts])
        np.testing.assert_array_equal(state.cache.lengths, lengths)

        tree_jax, state = propose(params, state, jnp.array(roots), jnp.array(lengths), rows, rows.keys)
        want = [d.grow(r, tree.branching, tree.depth, tree.nodes) for d, r in zip(drafts, roots, strict=True)]
        for b, (tokens, parent, depth, visible, scores) in enumerate(want):
            np.testing.assert_array_equal(tree_jax.tokens[b], tokens)
            np.testing.assert_array_equal(tree_jax.parent[b], parent)
            np.testing.assert_array_equal(tree_jax.depth[b], depth)
            np.testing.assert_allclose(tree_jax.cut_score[b], np.exp(scores), rtol=2e-3, atol=1e-30)
            seen = ancestors(tree_jax.parent, tree_jax.valid, tree_jax.max_depth)[b]
            np.testing.assert_array_equal(seen, visible)
        assert bool(tree_jax.valid.all())

        # A target that follows a random child of most nodes, so that every depth and sibling is accepted
        # sometimes.
        best = rng.integers(0, config.vocab_size, (batch, tree.nodes))
        for b, (tokens, parent, *_) in enumerate(want):
            for node in range(tree.nodes):
                children = [j for j in range(1, tree.nodes) if parent[j] == node]
                if children and rng.random() < 0.8:
                    best[b, node] = tokens[rng.choice(children)]
        logits = jnp.asarray(np.eye(config.vocab_size, dtype=np.float32)[best])
        verdict = judge(logits, tree_jax, rows, jnp.array(lengths))
        fresh = []
        for b, (tokens, parent, *_) in enumerate(want):
            path = oracle.walk(tokens, parent, best[b])
            accepted = int(verdict.accepted[b])
            assert accepted == len(path) - 1
            assert np.asarray(verdict.path[b, : accepted + 1]).tolist() == path
            accepted_in_all.add(accepted)
            kept = [int(tokens[i]) for i in path]
            root = int(best[b, path[-1]])
            assert int(verdict.next_token[b]) == root
            before = texts[b][-1]
            features = features_of(config, np.array(kept), len(texts[b]), before)
            fresh.append((kept, [*kept[1:], root], features))
            texts[b] += kept
            roots[b] = root
    assert len(accepted_in_all) > 1, "the walks must differ for this test to mean something"
