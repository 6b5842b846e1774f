"""Dynamic and static trees: connectedness under ties, chains, limits, confidence, sampled siblings."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_cases import CONFIGS, EAGLE1, EAGLE3, REDUCED, features_of, greedy_rows, make, observation

from eaglejax import sampling
from eaglejax.drafts import grow as eagle_tree
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.tree import DynamicTree, chain, from_choices
from eaglejax.errors import ConfigError
from eaglejax.sampling import Sampling

DYNAMIC = DynamicTree(depth=4, branching=3, nodes=15)
CHOICES = from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]])


@functools.cache
def program(proposer, batch):
    """Observe a prompt, then propose; compiled once a proposer."""

    @jax.jit
    def run(params, seen, rows):
        state = proposer.observe(params, proposer.init(params, batch=batch, capacity=32), seen)
        roots = jnp.full((batch,), 9, jnp.int32)
        return proposer.propose(params, state, roots, state.cache.lengths, rows, rows.keys)[0]

    return run


def drafted(proposer, params, rows=None):
    """The first draft of two rows behind a short ragged prompt; the root is 9."""
    config = proposer.config
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, 6)
    features = features_of(config, prompt, 0, 0)
    seen = observation(config, [(prompt[:n], [*prompt[1:n], 9], features[:n]) for n in (6, 3)], [0, 0], 6)
    return program(proposer, 2)(params, seen, greedy_rows(2, config.vocab_size) if rows is None else rows)


def check_tree(draft, limit: int) -> None:
    """What the protocol asks of every tree."""
    tokens, parent, depth, valid = (
        np.asarray(x) for x in (draft.tokens, draft.parent, draft.depth, draft.valid)
    )
    assert (parent[:, 0] == 0).all()
    assert valid[:, 0].all()
    assert ((tokens >= 0) & (tokens < limit)).all()
    for b in range(tokens.shape[0]):
        for i in range(1, tokens.shape[1]):
            assert parent[b, i] < i
            assert depth[b, i] == depth[b, parent[b, i]] + 1 <= draft.max_depth
            assert not valid[b, i] or valid[b, parent[b, i]], "an orphan"
        for p in range(tokens.shape[1]):
            children = [i for i in range(1, tokens.shape[1]) if parent[b, i] == p and valid[b, i]]
            assert len({tokens[b, i] for i in children}) == len(children)


@pytest.mark.parametrize("rounding", ["float32", "bfloat16", "float16"])
def test_no_orphans_whatever_the_scores_round_to(rounding):
    """300 peaked trees whose scores are rounded to half precision, full of ties, stay connected."""
    k, depth, nodes = 4, 5, 20
    rng = np.random.default_rng(0)
    trees = 300
    level, places, first = np.zeros((trees, 1)), np.zeros((trees, 1), int), 1
    pool, parents = [], []
    for _ in range(depth):
        shape = (trees, level.shape[1], k)
        logp = -np.sort(rng.exponential(rng.choice([1e-4, 0.1, 2.0], (*shape[:2], 1)), shape), -1)
        scores = jnp.asarray(level[:, :, None] + logp, rounding).astype(jnp.float32).reshape(trees, -1)
        pool.append(scores)
        parents.append(np.repeat(places, k, 1))
        kept = np.asarray(eagle_tree.best(scores, k))
        level, places = np.take_along_axis(np.asarray(scores), kept, 1), first + kept
        first += scores.shape[1]
    scores, above = jnp.concatenate(pool, 1), jnp.asarray(np.concatenate(parents, 1), jnp.int32)
    chosen, parent = map(np.asarray, jax.jit(eagle_tree.rerank, static_argnums=2)(scores, above, nodes))
    ties = sum(len(np.unique(row)) < row.size for row in np.asarray(scores))
    assert rounding == "float32" or ties > trees / 2, "the test needs ties"
    for b in range(trees):
        members = {0, *(chosen[b] + 1)}
        wanted = np.asarray(above)[b, chosen[b]]
        assert members.issuperset(wanted), "an orphan"
        numbers = np.array([0, *(chosen[b] + 1)])
        np.testing.assert_array_equal(numbers[parent[b]], wanted)


def test_ties_go_to_the_shallower_and_the_lower():
    """All logits equal: the tree is the first pool entries, tokens the lowest ids (A17)."""
    params = make(EAGLE3)
    params = params.replace(weights={**params.weights, "head": jnp.zeros_like(params.weights["head"])})
    draft = drafted(Eagle(EAGLE3, DYNAMIC), params)
    assert np.asarray(draft.tokens[0, 1:]).tolist() == [0, 1, 2] * 4 + [0, 1]
    assert np.asarray(draft.parent[0]).tolist() == [0] * 4 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 2


@pytest.mark.parametrize("config", [EAGLE1], ids=["eagle1"])
def test_width_one_is_the_chain(config):
    """A dynamic tree of width 1 drafts the tokens of the static chain, with the same confidence (A34)."""
    params = make(config, seed=2)
    tree = drafted(Eagle(config, DynamicTree(depth=4, branching=1, nodes=5)), params)
    line = drafted(Eagle(config, chain(4)), params)
    assert tree.chain
    assert line.chain
    for name in ("tokens", "parent", "depth", "valid"):
        np.testing.assert_array_equal(getattr(tree, name), getattr(line, name))
    np.testing.assert_allclose(tree.cut_score, line.cut_score, rtol=1e-5)


@pytest.mark.parametrize("name", ["reduced"])
def test_a_static_tree_is_the_part_of_a_dynamic_one_that_it_names(name):
    """Ranks mean what they say: each static node carries the token of that rank below its parent."""
    config = CONFIGS[name]
    params = make(config, seed=3)
    static = drafted(Eagle(config, CHOICES), params)
    check_tree(static, config.vocab_size)
    full = drafted(Eagle(config, DynamicTree(depth=3, branching=3, nodes=22)), params)
    check_tree(full, config.vocab_size)
    for b in range(2):

        def paths(draft, b=b):
            out = {(): 1.0}
            for i in range(1, draft.tokens.shape[1]):
                path, node = [], i
                while node:
                    path.insert(0, int(draft.tokens[b, node]))
                    node = int(draft.parent[b, node])
                out[tuple(path)] = float(draft.cut_score[b, i])
            return out

        ours, theirs = paths(static), paths(full)
        assert len(ours) == CHOICES.nodes
        for path, confidence in ours.items():
            if path in theirs:
                np.testing.assert_allclose(confidence, theirs[path], rtol=1e-4)
        # Both levels that the dynamic tree expands for sure are all there.
        assert {p for p in ours if len(p) == 1} <= set(theirs)


@pytest.mark.parametrize("tree", [DYNAMIC, CHOICES], ids=["dynamic", "static"])
def test_low_confidence_is_not_proposed(tree):
    """Nodes below the threshold are cut, the others are untouched; a threshold nobody reaches leaves the
    root."""
    params = make(EAGLE3, seed=4)
    whole = drafted(Eagle(EAGLE3, tree), params)
    threshold = float(np.quantile(np.asarray(whole.cut_score)[:, 1:], 0.6))
    cut = drafted(Eagle(EAGLE3, tree, min_confidence=threshold), params)
    check_tree(cut, EAGLE3.vocab_size)
    keep = np.asarray(whole.cut_score) >= threshold
    np.testing.assert_array_equal(cut.valid, keep)
    assert 0 < (~keep).sum() < keep.size
    np.testing.assert_array_equal(np.where(keep, cut.tokens, 0), np.where(keep, whole.tokens, 0))
    np.testing.assert_array_equal(np.where(keep, cut.parent, 0), np.where(keep, whole.parent, 0))


def test_a_threshold_that_nobody_reaches_leaves_the_root():
    """Every level but the first is skipped, in the same compiled round."""
    none = drafted(Eagle(EAGLE3, CHOICES, min_confidence=0.9999999), make(EAGLE3, seed=4))
    np.testing.assert_array_equal(np.asarray(none.valid).sum(1), [1, 1])


def greedy_and_sampled() -> sampling.RowSampling:
    settings = [Sampling(temperature=t, top_p=0.9, seed=0) for t in (0.0, 1.0)]
    return sampling.rows(settings, REDUCED.vocab_size)


def test_a_draft_of_nan_proposes_nothing_and_breaks_nothing():
    """Law 5: NaN weights cost speed alone."""
    params = make(REDUCED, seed=5)
    params = params.replace(weights={**params.weights, "fc": params.weights["fc"] * jnp.nan})
    mixed = greedy_and_sampled()
    dynamic = Eagle(REDUCED, DynamicTree(depth=3, branching=3, nodes=22))
    for proposer, rows in ((dynamic, None), (Eagle(REDUCED, CHOICES, sample=True), mixed)):
        draft = drafted(proposer, params, rows)
        check_tree(draft, REDUCED.vocab_size)
        assert np.asarray(draft.valid).sum() == 2
        if draft.proposal.q is not None:
            assert np.isfinite(draft.proposal.q).all()


def test_infinite_logits_leave_something_to_draw_from():
    """A head that overflows for some tokens proposes the others, and q is a distribution or nothing."""
    for value in (np.inf, np.nan):
        clean, normaliser = eagle_tree.with_normaliser(
            jnp.asarray([[0.0, value, 1.0], [np.nan, value, -np.inf]])
        )
        np.testing.assert_array_equal(clean, [[0.0, -np.inf, 1.0], [-np.inf] * 3])
        np.testing.assert_allclose(normaliser[0], np.log(1 + np.e), rtol=1e-6)
        np.testing.assert_array_equal(eagle_tree.log_prob(clean, normaliser[:, None])[1], [-np.inf] * 3)
    params = make(REDUCED, seed=5)
    head = params.weights["head"].at[:, jnp.array([3, 5])].set(jnp.array([3e38, -3e38]))
    params = params.replace(weights={**params.weights, "head": head, "norm": params.weights["norm"] * 1e3})
    draft = drafted(Eagle(REDUCED, CHOICES, sample=True), params, greedy_and_sampled())
    check_tree(draft, REDUCED.vocab_size)
    assert np.isfinite(draft.proposal.q).all()
    assert np.isfinite(draft.cut_score).all()


def test_sampled_siblings_come_from_q_without_replacement():
    """4096 rows: first and second children of the root follow q and q without the first; q is what is
    kept."""
    config, batch = dataclasses.replace(EAGLE3, vocab_size=6, draft_vocab_size=6), 4096
    params = make(config, seed=6, scale=0.3)
    proposer = Eagle(config, from_choices([[0], [1], [0, 0]]), sample=True)
    rows = sampling.rows([Sampling(temperature=0.8, seed=s) for s in range(batch)], 6)
    prompt = np.array([1, 2, 3])
    one = observation(config, [(prompt, [2, 3, 4], features_of(config, prompt, 0, 0))], [0], 3)

    @jax.jit
    def run(rows):
        state = proposer.observe(params, proposer.init(params, batch=1, capacity=8), one)
        many = jax.tree.map(lambda x: jnp.repeat(x, batch, 0), state)
        # Row-by-row cache writes would unroll; the root's children need none.
        one_row = jax.vmap(
            lambda s, r: proposer.propose(params, s, jnp.array([4]), jnp.array([3]), r, r.keys)[0],
            in_axes=(0, 0),
        )
        return one_row(jax.tree.map(lambda x: x[:, None], many), jax.tree.map(lambda x: x[:, None], rows))

    draft = run(rows)
    q = np.asarray(draft.proposal.q[0, 0, 0], np.float64)
    np.testing.assert_allclose(q.sum(), 1, rtol=1e-5)
    tokens = np.asarray(draft.tokens)[:, 0]
    pairs = np.zeros((6, 6))
    np.add.at(pairs, (tokens[:, 1], tokens[:, 2]), 1)
    want = np.outer(q, q) / (1 - q[:, None]) * (1 - np.eye(6)) * batch
    live = want > 0
    assert pairs[~live].sum() == 0
    chi = ((pairs - want)[live] ** 2 / want[live]).sum()
    assert chi < 65, f"chi-square {chi:.1f} on 29 degrees of freedom"


def test_temperatures_of_sampled_drafts():
    """q follows the row's temperature and filters, or the draft's own temperature; greedy rows take the best
    tokens."""
    params = make(REDUCED, seed=7)
    settings = [Sampling(temperature=0.0, seed=0), Sampling(temperature=0.5, top_p=0.6, seed=1)]
    rows = sampling.rows(settings, REDUCED.vocab_size)
    own = drafted(Eagle(REDUCED, CHOICES, sample=True), params, rows)
    best = drafted(Eagle(REDUCED, CHOICES), params)
    np.testing.assert_array_equal(own.tokens[0], best.tokens[0])
    assert bool(own.valid[0].all())
    hot = drafted(Eagle(REDUCED, CHOICES, sample=True, temperature=2.0), params, rows)
    assert (np.asarray(own.proposal.q[1, 0]) > 0).sum() < (np.asarray(hot.proposal.q[1, 0]) > 0).sum()
    np.testing.assert_array_equal(own.proposal.ids, params.ids)
    for draft in (own, hot):
        check_tree(draft, REDUCED.vocab_size)
        q, ids = np.asarray(draft.proposal.q[1]), np.asarray(params.ids)
        for i in range(1, CHOICES.nodes):
            if draft.valid[1, i]:
                slot = int(np.searchsorted(ids, int(draft.tokens[1, i])))
                assert q[int(draft.parent[1, i]), slot] > 0


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: DynamicTree(depth=0), "depth is 0"),
        (lambda: DynamicTree(branching=0), "branching is 0"),
        (lambda: DynamicTree(depth=2, branching=2, nodes=8), "scores 6 nodes"),
        (lambda: DynamicTree(nodes=1), "counts the root"),
        (lambda: Eagle(EAGLE3, chain(0)), "depth 0"),
        (lambda: Eagle(EAGLE3, DynamicTree(branching=41)), "wants 41 children"),
        (lambda: Eagle(REDUCED, from_choices([[30]])), "wants 31 children"),
        (lambda: Eagle(EAGLE3, DynamicTree(), sample=True), "static tree"),
        (lambda: Eagle(EAGLE3, chain(2), temperature=1.0), "sample=True"),
        (lambda: Eagle(EAGLE3, chain(2), sample=True, temperature=0.0), "positive"),
        (lambda: Eagle(EAGLE3, chain(2), min_confidence=1.0), "min_confidence"),
        (lambda: Eagle(dataclasses.replace(EAGLE3, aux=()), chain(2)), "boundaries"),
    ],
)
def test_trees_that_cannot_be_are_refused(build, text):
    with pytest.raises(ConfigError, match=text):
        build()


def test_a_tree_cut_by_its_node_budget_keeps_its_depth_within_it():
    """Three drafts can make no path of six: the levels beyond are not run, and the tree is what it would
    be."""
    proposer = Eagle(EAGLE3, DynamicTree(depth=6, branching=2, nodes=4))
    assert (proposer.depth, proposer.scratch, proposer.nodes) == (3, 4, 4)
    check_tree(drafted(proposer, make(EAGLE3, seed=8)), EAGLE3.vocab_size)


def test_the_round_is_one_program_and_keeps_the_committed_cache():
    """Proposing changes nothing that is committed (O4), for whatever the text is, without a new
    compilation."""
    config = EAGLE3
    params = make(config, seed=9)
    proposer = Eagle(config, DynamicTree(depth=3, branching=3, nodes=9))
    rows = greedy_rows(2, config.vocab_size)
    propose = jax.jit(functools.partial(proposer.propose, params))
    state = proposer.init(params, batch=2, capacity=16)
    observe = jax.jit(functools.partial(proposer.observe, params))
    start = np.zeros(2, int)
    for accepted in ((4, 1), (2, 3), (0, 4)):
        tokens = np.arange(4)
        features = features_of(config, tokens, 0, 0)
        seen = [(tokens[:n], tokens[:n] + 1, features[:n]) for n in accepted]
        state = observe(state, observation(config, seen, start, 4))
        start = start + np.array(accepted)
        _, after = propose(state, jnp.zeros(2, jnp.int32), jnp.asarray(start), rows, rows.keys)
        np.testing.assert_array_equal(after.cache.lengths, start)
        np.testing.assert_array_equal(after.feature, state.feature)
        for before, now in zip(
            jax.tree.leaves(state.cache.layers), jax.tree.leaves(after.cache.layers), strict=True
        ):
            for b in range(2):
                np.testing.assert_array_equal(before[b, :, : start[b]], now[b, :, : start[b]])
        state = after
    assert propose._cache_size() == 1
    assert observe._cache_size() == 1
