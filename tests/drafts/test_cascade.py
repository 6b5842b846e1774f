"""A cascade's tree against one written out, what it counts, and that it is worth its best part."""

from __future__ import annotations

import collections
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from draft_tools import first_proposal, observation, pad, predicting, propose
from test_continuations import paths

import eaglejax as ej
from eaglejax.drafts.base import Draft, Needs, Proposal
from eaglejax.drafts.cascade.extend import extended, open_branches
from eaglejax.drafts.cascade.extend import paths as text_of
from eaglejax.drafts.cascade.merge import distinct, merge, pooled, right
from eaglejax.drafts.cascade.proposer import Cascade, cascade
from eaglejax.drafts.draft_model.proposer import DraftModel
from eaglejax.drafts.ngram import NGram
from eaglejax.drafts.prediction import Prediction
from eaglejax.drafts.suffix.proposer import Suffix
from eaglejax.errors import ConfigError
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import random_target
from eaglejax.nn.rope import RopeConfig

CAPACITY = 48
CONFIG = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position=128,
    rope=RopeConfig(),
    query_scale=8**-0.5,
)


def random_draft(rng, rows, nodes, vocab):
    """A tree whose siblings differ, and its scores."""
    tokens, parent, depth = (np.zeros((rows, nodes), np.int32) for _ in range(3))
    valid, score = np.ones((rows, nodes), bool), np.ones((rows, nodes), np.float32)
    for b in range(rows):
        for i in range(1, nodes):
            free = [
                (p, t)
                for p in range(i)
                for t in range(vocab)
                if t not in [tokens[b, j] for j in range(1, i) if parent[b, j] == p]
            ]
            above, token = free[rng.integers(len(free))]
            parent[b, i], tokens[b, i], depth[b, i] = above, token, depth[b, above] + 1
            valid[b, i] = valid[b, above] and rng.random() < 0.9
            score[b, i] = score[b, above] * rng.uniform(0.2, 1)
    fields = map(jnp.asarray, (tokens, parent, depth, valid))
    return Draft(*fields, Proposal(), jnp.asarray(score), max_depth=int(depth.max()))


def test_a_merged_tree_has_every_path_once_at_its_best_chance() -> None:
    rng = np.random.default_rng(0)
    rows, sizes, vocab = 20, (7, 5, 6), 3
    drafts = [random_draft(rng, rows, n, vocab) for n in sizes]
    pool = pooled(drafts)
    deepest = max(d.max_depth for d in drafts)
    root = jnp.full(rows, 9)
    whole = merge(root, pool, pool.chance, nodes=sum(sizes) - 2, depth=deepest)
    small = merge(root, pool, pool.chance, nodes=6, depth=min(deepest, 5))
    shared = 0
    for row in range(rows):
        best: dict[tuple[int, ...], float] = collections.defaultdict(float)
        found = [paths(d, row) for d in drafts]
        for path in sorted({p for one in found for p in one}, key=len):
            for one in found:
                if path in one:
                    above = one[path[:-1]] if len(path) > 1 else 1.0
                    # Behind what any part thinks best of the text above.
                    higher = best[path[:-1]] if len(path) > 1 else 1.0
                    best[path] = max(best[path], one[path] / above * higher)
        shared += sum(map(len, found)) > len(best)
        got = paths(whole, row)
        assert got.keys() == best.keys()
        for path, chance in got.items():
            np.testing.assert_allclose(chance, best[path], rtol=1e-5)
        few = paths(small, row)
        assert len(few) == min(5, len(best))
        chosen = sorted(few.values(), reverse=True)
        np.testing.assert_allclose(chosen, sorted(best.values(), reverse=True)[:5], rtol=1e-5)
        assert all(path[:-1] in few or len(path) == 1 for path in few)
    assert shared > 5


def test_the_merged_tree_expects_no_fewer_tokens_than_its_best_part() -> None:
    """With chances that are right, at every size: of each part alone, cut to it, and of the first stage."""
    rng = np.random.default_rng(4)
    rows, vocab, most = 30, 3, 9
    drafts = [random_draft(rng, rows, n, vocab) for n in (9, 6, 7)]
    pool = pooled(drafts)
    deepest = max(d.max_depth for d in drafts)
    found = distinct(pool, pool.chance, deepest)
    nodes, open_ = open_branches(found, 4)
    # Behind every open branch a lookup that is right with known chances.
    behind = [random_draft(rng, rows * 4, 4, vocab)]
    longer = extended(pool, nodes, open_, behind, len(drafts))
    reach = deepest + behind[0].max_depth
    root, more = jnp.full(rows, 9), 0
    for size in (2, 5, most):
        expected = np.asarray(merge(root, pool, pool.chance, nodes=size, depth=deepest).cut_score).sum(1)
        for draft in drafts:
            score = np.where(np.asarray(draft.valid), np.asarray(draft.cut_score), 0.0)
            assert (expected >= np.sort(score, axis=1)[:, -size:].sum(1) - 1e-5).all()
        staged = np.asarray(merge(root, longer, longer.chance, nodes=size, depth=reach).cut_score).sum(1)
        assert (staged >= expected - 1e-5).all()
        more += int((staged > expected + 1e-3).sum())
    assert more > 10, "the second stage never helped"


def test_branches_are_gone_on_with_where_most_is_left_open() -> None:
    """Against the same written out: what a node's path is worth less what its children claim of it."""
    rng = np.random.default_rng(7)
    drafts = [random_draft(rng, 12, 7, 3), random_draft(rng, 12, 6, 3)]
    pool = pooled(drafts)
    deepest = max(d.max_depth for d in drafts)
    found = distinct(pool, pool.chance, deepest)
    nodes, chance = open_branches(found, 3)
    reached = np.asarray(text_of(pool, nodes, deepest))
    for row in range(12):
        whole = paths(merge(jnp.full(12, 9), pool, pool.chance, nodes=12, depth=deepest), row)
        left = {p: c - sum(d for q, d in whole.items() if q[:-1] == p) for p, c in whole.items()}
        best = sorted((max(x, 0.0) for x in left.values()), reverse=True)[:3]
        np.testing.assert_allclose(np.asarray(chance)[row], [*best, 0.0, 0.0][:3], atol=1e-5)
        for place, c in enumerate(np.asarray(chance)[row]):
            if c > 1e-6:
                size = int(np.asarray(pool.depth)[row, int(nodes[row, place])])
                path = tuple(reached[row, place, :size].tolist())
                np.testing.assert_allclose(c, left[path], atol=1e-5)
                assert not reached[row, place, size:].any()


def test_a_lookup_goes_on_behind_what_another_part_guessed() -> None:
    """The prediction says 7, 8, and the row has gone on from 7, 8 before: that is drafted behind it."""
    text = [7, 8, 4, 5, 1, 2, 3]
    for branches, want in ((0, (7, 8)), (2, (7, 8, 4, 5))):
        proposer = Cascade((Prediction(length=2), NGram(length=2, max_ngram=2)), branches=branches)
        brought = proposer.inputs(predicting([[1, 2, 3, 7, 8]]), 1)
        found = paths(first_proposal(proposer, None, [text], CAPACITY, brought))
        assert max(found, key=len) == want
        assert proposer.depth == 2 + 2 * bool(branches)
        assert proposer.nodes == 5 + 8 * bool(branches)


def test_what_came_is_judged_as_far_as_it_is_known() -> None:
    pool = pooled([random_draft(np.random.default_rng(1), 1, 9, 2)])
    tokens, parent, depth, valid = (
        np.asarray(x)[0] for x in (pool.tokens, pool.parent, pool.depth, pool.valid)
    )
    for truth in ([0, 1, 0], [1, 1, 1], [0, 0, 1]):
        for known in range(4):
            came, judged = right(pool, jnp.asarray([truth]), jnp.asarray([known]))
            for i in range(len(tokens)):
                line = [i]
                while parent[line[-1]] >= 0:
                    line.append(parent[line[-1]])
                line = line[::-1]
                above = all(tokens[n] == truth[k] for k, n in enumerate(line[:-1]) if k < 3)
                could = bool(valid[i]) and depth[i] <= known and above
                assert bool(judged[0, i]) == could
                assert bool(came[0, i]) == (could and tokens[i] == truth[depth[i] - 1])


def test_a_part_that_is_wrong_loses_its_place() -> None:
    """Two parts that never agree: the one whose guesses came is asked first, by whichever row."""
    good, bad = Prediction(length=3), NGram(length=3, max_ngram=2, min_ngram=1)
    proposer = Cascade((good, bad), size=4)
    # In the row 5 was followed by 6, in truth and in the prediction by 7.
    text, truth = [5, 6, 1, 2, 5, 6, 3], [5, 7, 5, 7, 5, 7, 5, 7, 5, 7, 5, 7]
    inputs = proposer.inputs(predicting([truth]), 1)
    state = proposer.init(None, batch=1, capacity=CAPACITY, inputs=inputs)
    state = proposer.observe(None, state, observation(pad([text], CAPACITY), [0], [len(text)]))
    whole, at, widths = text + truth, len(text), []
    for _ in range(6):
        draft, state = propose(proposer, None, state, jnp.asarray([whole[at]]), jnp.asarray([at]))
        widths.append(paths(draft))
        following = np.asarray([whole[at + 1 : at + 2]])
        seen = observation([whole[at : at + 1]], [at], [1])
        state = proposer.observe(None, state, seen.replace(following=jnp.asarray(following)))
        at += 1
    assert float(state.seen.sum()) > 0
    rate = np.asarray(state.hits.sum(2) / np.maximum(state.seen.sum(2), 1e-9))[0]
    assert rate[0] > rate[1]
    assert (7,) in widths[-1] or (5,) in widths[-1]


@pytest.mark.slow
def test_it_takes_no_fewer_tokens_a_round_than_its_parts() -> None:
    target = random_target(CONFIG, seed=3)
    rng = np.random.default_rng(2)
    block = rng.integers(0, target.config.vocab_size, 12).tolist()
    prompts = [block * 2, block[3:] + block[:7]]
    plain = [r.token_ids for r in ej.generate(target, prompts, max_new_tokens=48, ignore_eos=True)]
    store = Suffix(window=256)
    store.store.add(plain[0][:30])
    parts = [NGram(length=4, max_ngram=3), store]

    def forwards(proposer):
        found = ej.generate(target, prompts, proposer=proposer, max_new_tokens=48, ignore_eos=True)
        assert [r.token_ids for r in found] == plain
        return [r.stats.target_forwards for r in found]

    alone = [forwards(part) for part in (parts[0], Suffix(window=256, store=copy_of(store, plain[0][:30])))]
    together = forwards(cascade(*parts, size=24))
    assert sum(together) <= min(map(sum, alone))


@dataclasses.dataclass(frozen=True)
class Tapped(NGram):
    """A lookup that also reads the target."""

    @property
    def needs(self):
        return Needs((0,))


def copy_of(proposer, text):
    """Another store with the same text: what one run learns must not help the next."""
    other = Suffix(window=256)
    other.store.add(text)
    return other.store


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ((NGram(),), "two parts or more, not 1"),
        ((NGram(), Cascade((NGram(), Suffix()))), "Cascade cannot be part"),
        ((NGram(), ej.Autoregressive()), "Autoregressive cannot be part"),
    ],
)
def test_refuses(parts, match) -> None:
    with pytest.raises(ConfigError, match=match):
        Cascade(parts)


def test_refuses_parts_that_draw_or_take_all_for_their_own() -> None:
    target = random_target(CONFIG, seed=3)
    with pytest.raises(ConfigError, match="DraftModel cannot be part of a cascade"):
        Cascade((NGram(), DraftModel(target.config)))
    with pytest.raises(ConfigError, match="a part of a cascade is 'ngram'"):
        cascade("ngram", NGram())
    with pytest.raises(ConfigError, match="none can go on behind another's guesses"):
        Cascade((Tapped(), Tapped()), branches=2)
    with pytest.raises(ConfigError, match="branches is -1"):
        Cascade((NGram(), Suffix()), branches=-1)
    with pytest.raises(ConfigError, match="which counts the root, is 1"):
        Cascade((NGram(), Suffix()), size=1)
    with pytest.raises(ConfigError, match="predictions are given"):
        Cascade((NGram(), Suffix())).inputs(predicting([[1]]), 1)


def test_a_first_draft_holds_those_of_all_parts() -> None:
    text = [1, 2, 3, 4, 1, 2]
    proposer = Cascade((NGram(length=2), Prediction(length=2)))
    inputs = proposer.inputs(predicting([[9, 2, 8, 7]]), 1)
    assert set(paths(first_proposal(proposer, None, [text], CAPACITY, inputs))) == {
        (3,),
        (3, 4),
        (8,),
        (8, 7),
    }
