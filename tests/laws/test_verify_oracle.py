"""verify() against the NumPy oracle: the same decisions from the same uniforms, on random trees; and the
distribution of its outcomes for given drafts."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from law_oracle import (
    SIGNIFICANCE,
    block_decision,
    block_outcomes,
    drawn_decision,
    p_value,
    token_decision,
    token_outcomes,
    transform,
)
from law_tools import begin, tile, tree

from eaglejax import sampling
from eaglejax.sampling import Purpose, Sampling
from eaglejax.speculate.verify import verify

OPTIMISED = True

NODES, VOCAB, BATCH = 8, 5, 256
SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(),
    Sampling(temperature=0.7, top_p=0.8),
    Sampling(temperature=1.5, top_k=3, min_p=0.1),
]
IDS = np.array([0, 2, 3])


def random_case(kind: str, rng: np.random.Generator):
    """Processed logits, draft and the arrays the oracle reads, one random tree a row."""
    shape = (BATCH, NODES)
    logits = 2.0 * rng.normal(size=(*shape, VOCAB)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[..., 0] = np.where(np.isneginf(logits).all(-1), 0.0, logits[..., 0])
    tokens = rng.integers(VOCAB, size=shape)
    chain = kind.startswith(("chain", "block"))
    parent = np.zeros(shape, int)
    valid = np.ones(shape, bool)
    for row in range(BATCH):
        for i in range(1, NODES):
            parent[row, i] = i - 1 if chain else rng.integers(i)
            valid[row, i] = valid[row, parent[row, i]] and rng.random() < 0.9
    q = ids = None
    if not kind.endswith("one_hot"):
        ids = IDS if kind.endswith("reduced") else None
        q = rng.dirichlet(np.ones(VOCAB if ids is None else len(ids)), size=shape).astype(np.float32)
        q[rng.random(q.shape) < 0.15] = 0.0
        q[..., 0] += q.sum(-1) == 0
        q /= q.sum(-1, keepdims=True)
    draft = tree(tokens, list(range(-1, NODES - 1)) if chain else [0] * NODES)
    draft = draft.replace(
        parent=jnp.asarray(parent, jnp.int32),
        valid=jnp.asarray(valid),
        max_depth=NODES - 1,
        proposal=draft.proposal.replace(
            q=None if q is None else jnp.asarray(q),
            ids=None if ids is None else jnp.asarray(ids, jnp.int32),
            replacement=kind == "tree_replacement",
        ),
        chain=chain,
    )
    return logits, draft


KINDS = [
    "tree_one_hot",
    "tree_replacement",
    "tree_without",
    "tree_reduced",
    "chain_one_hot",
    "chain",
    "chain_reduced",
    "block_one_hot",
    "block",
    "block_reduced",
]


SLOW_KINDS = ("tree_reduced", "chain_one_hot", "chain_reduced", "block_one_hot")
"""Their distributions are measured in test_joint_law too."""


def some_slow(kinds, slow):
    return [pytest.param(kind, marks=pytest.mark.slow) if kind in slow else kind for kind in kinds]


@pytest.mark.parametrize("kind", some_slow(KINDS, SLOW_KINDS))
def test_decisions_equal_the_oracle(kind):
    rng = np.random.default_rng(KINDS.index(kind))
    logits, draft = random_case(kind, rng)
    rows = tile(SETTINGS, BATCH // len(SETTINGS), VOCAB, seed=3)
    lengths = jnp.arange(BATCH, dtype=jnp.int32)
    method = "block" if kind.startswith("block") else "token"
    verdict = jax.device_get(
        jax.jit(verify, static_argnames="method")(jnp.asarray(logits), draft, rows, lengths, method=method)
    )
    keys = sampling.round_keys(rows, lengths)
    luck = np.asarray(sampling.uniforms(sampling.fold(keys, Purpose.ACCEPT), NODES), np.float64)
    # So few tokens are one block, and the second uniform of a draw finds its lane.
    lanes = [
        sampling.uniforms(sampling.fold(sampling.round_keys(rows, lengths + d), Purpose.BONUS), 2)[:, 1]
        for d in range(NODES)
    ]
    lane = np.asarray(jnp.stack(lanes, 1), np.float64)
    tokens, parent, valid = (np.asarray(x) for x in (draft.tokens, draft.parent, draft.valid))
    accepted = 0
    for row in range(BATCH):
        s = SETTINGS[row // (BATCH // len(SETTINGS))]
        p = np.array([transform(z, s.temperature, s.top_k, s.top_p, s.min_p) for z in logits[row]])
        q = None
        if s.temperature > 0 and draft.proposal.q is not None:
            q = np.zeros((NODES, VOCAB))
            q[:, slice(None) if draft.proposal.ids is None else IDS] = draft.proposal.q[row]
        if q is None and s.temperature > 0:
            nodes, probs = drawn_decision(p, tokens[row], parent[row], valid[row], lane[row])
        elif method == "block" and s.temperature > 0:
            nodes, probs = block_decision(p, q, tokens[row][valid[row]], luck[row])
        else:
            nodes, probs = token_decision(
                p, q, tokens[row], parent[row], valid[row], luck[row], draft.proposal.replacement
            )
        assert verdict.accepted[row] == len(nodes)
        want = [0, *nodes, *[(0, *nodes)[-1]] * (NODES - 1 - len(nodes))]
        np.testing.assert_array_equal(verdict.path[row], want)
        assert probs[verdict.next_token[row]] > 0
        accepted += len(nodes)
    assert accepted > BATCH // 8  # the case exercises acceptance


OUTCOMES = {
    "one_hot": {"parent": (0, 0, 0, 0, 1, 1), "tokens": (0, 2, 1, 2, 3, 0)},
    "replacement": {"parent": (0, 0, 0, 0, 1, 1), "tokens": (0, 2, 1, 2, 3, 0), "replacement": True},
    "without": {"parent": (0, 0, 0, 0, 1, 1), "tokens": (0, 2, 1, 3, 3, 0)},
    "chain": {"parent": (0, 0, 1, 2), "tokens": (0, 2, 3, 1)},
    "block": {"parent": (0, 0, 1, 2), "tokens": (0, 2, 3, 1)},
    "block_one_hot": {"parent": (0, 0, 1, 2), "tokens": (0, 2, 3, 1)},
}


@pytest.mark.parametrize("kind", some_slow(OUTCOMES, ("one_hot", "replacement", "chain", "block_one_hot")))
def test_outcome_law_of_fixed_drafts(kind):
    """Path and next token jointly, 2e5 trials; p is mixed with q so that residuals are small and large."""
    case, trials, vocab = OUTCOMES[kind], 200_000, 4
    parent, tokens = case["parent"], np.array(case["tokens"])
    rng = np.random.default_rng(5)
    p = rng.dirichlet(np.ones(vocab), size=len(parent))
    q = None if "one_hot" in kind else 0.5 * p + 0.5 * rng.dirichlet(np.ones(vocab), size=len(parent))
    wide = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), (trials, *x.shape))  # noqa: E731
    draft = tree(
        np.broadcast_to(tokens, (trials, len(tokens))),
        parent,
        q=None if q is None else wide(q),
        replacement=case.get("replacement", False),
    )
    method = "block" if kind.startswith("block") else "token"
    rows = tile([Sampling(temperature=1.0)], trials, vocab, seed=11)
    verdict = jax.jit(verify, static_argnames="method")(
        wide(np.log(p)), draft, rows, begin(rows), method=method
    )
    last = jnp.take_along_axis(verdict.path, verdict.accepted[:, None], axis=1)[:, 0]
    seen = Counter(np.asarray(last * vocab + verdict.next_token).tolist())
    counts = np.array([seen[i] for i in range(len(parent) * vocab)])
    everyone = np.ones(len(parent), bool)
    outcomes = (
        block_outcomes(p, q, tokens)
        if method == "block"
        else token_outcomes(p, q, tokens, parent, everyone, case.get("replacement", False))
    )
    probs = np.zeros((len(parent), vocab))
    for weight, (nodes, rest) in outcomes:
        probs[nodes[-1] if nodes else 0] += weight * rest
    assert p_value(counts, probs) > SIGNIFICANCE
    # The same test tells the distribution from one whose largest cell is off by five parts in a hundred.
    wrong = probs * np.where(probs == probs.max(), 1.05, 1.0)
    assert p_value(counts, wrong) < SIGNIFICANCE


def test_verdict_ignores_padding_and_batch_mates():
    """Law 3: a row's verdict is the same alone, in a batch, and with invalid nodes behind its own."""
    rng = np.random.default_rng(9)
    logits, draft = random_case("tree_one_hot", rng)
    rows = tile(SETTINGS, BATCH // len(SETTINGS), VOCAB, seed=3)
    step = jax.jit(verify)
    whole = step(jnp.asarray(logits), draft, rows, begin(rows))
    for row in (0, 70, 130, 255):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], (jnp.asarray(logits), draft, rows))
        alone = step(*one, begin(one[2]))
        for name in ("path", "accepted", "next_token"):
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(whole, name)[row])
    pad = lambda x, fill: jnp.pad(x, [(0, 0), (0, 3)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)  # noqa: E731
    padded = draft.replace(
        tokens=pad(draft.tokens, 0),
        parent=pad(draft.parent, 0),
        depth=pad(draft.depth, 0),
        valid=pad(draft.valid, False),
    )
    wide = step(pad(jnp.asarray(logits), 7.0), padded, rows, begin(rows))
    np.testing.assert_array_equal(wide.accepted, whole.accepted)
    np.testing.assert_array_equal(wide.next_token, whole.next_token)


def test_width_one_tree_equals_chain():
    """A tree whose nodes have one child each is verified by another code path, and decides the same."""
    rng = np.random.default_rng(1)
    logits, chain = random_case("chain", rng)
    rows = tile(SETTINGS, BATCH // len(SETTINGS), VOCAB, seed=3)
    a = jax.jit(verify)(jnp.asarray(logits), chain, rows, begin(rows))
    b = jax.jit(verify)(jnp.asarray(logits), chain.replace(chain=False), rows, begin(rows))
    np.testing.assert_array_equal(a.path, b.path)
    np.testing.assert_array_equal(a.next_token, b.next_token)
