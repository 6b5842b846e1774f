"""The acceptance rules keep the target's distribution: exactly, by enumerating every draft and integrating
over uniforms."""

import numpy as np
import pytest
from law_oracle import (
    block_outcomes,
    draft_distribution,
    emitted_distribution,
    joint_distribution,
    path_tokens,
    token_outcomes,
    transform,
)

OPTIMISED = True

VOCAB = 3


def table(seed: int, sharp: float = 1.5, drop: float = 0.0):
    """A distribution that depends on the whole prefix; ``drop`` of its entries are zero."""

    def at(prefix):
        rng = np.random.default_rng([seed, *(t + 1 for t in prefix)])
        weights = np.exp(sharp * rng.normal(size=VOCAB)) * (rng.random(VOCAB) >= drop)
        weights[rng.integers(VOCAB)] += 0.1
        return weights / weights.sum()

    return at


SHAPES = {"chain": (0, 0, 1, 2), "siblings": (0, 0, 0, 0), "tree": (0, 0, 0, 1, 1)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["one_hot", "replacement", "without_replacement"])
def test_token_rule_is_lossless(shape, seed, kind):
    target, parent = table(seed, drop=0.3 * seed), SHAPES[shape]
    if kind == "one_hot":
        # Random tokens of three: some siblings are equal.
        for fixed in np.random.default_rng(seed).integers(VOCAB, size=(6, len(parent))):
            got = emitted_distribution(target, None, parent, VOCAB, 3, fixed=fixed)
            np.testing.assert_allclose(got, joint_distribution(target, VOCAB, 3), atol=1e-12)
        return
    draft = table(seed + 100, drop=0.2 * seed)
    got = emitted_distribution(target, draft, parent, VOCAB, 3, replacement=kind == "replacement")
    np.testing.assert_allclose(got, joint_distribution(target, VOCAB, 3), atol=1e-12)


@pytest.mark.parametrize("one_hot", [True, False])
def test_block_rule_is_lossless_and_never_shorter(one_hot):
    parent, gains = SHAPES["chain"], []
    everyone = np.ones(len(parent), bool)
    for seed in range(6):
        target, draft = table(seed, drop=0.1 * seed), table(seed + 100)
        fixed = np.random.default_rng(seed).integers(VOCAB, size=len(parent))
        draft_q = None if one_hot else draft
        got = emitted_distribution(target, draft_q, parent, VOCAB, 4, rule="block", fixed=fixed)
        np.testing.assert_allclose(got, joint_distribution(target, VOCAB, 4), atol=1e-12)
        gain = 0.0
        for chance, tokens in draft_distribution(draft_q, parent, VOCAB, True, fixed):
            paths = [path_tokens(tokens, parent, i) for i in range(len(parent))]
            p = np.array([target(path) for path in paths])
            q = None if draft_q is None else np.array([draft_q(path) for path in paths])
            gain += chance * sum(w * len(nodes) for w, (nodes, _) in block_outcomes(p, q, tokens))
            gain -= chance * sum(
                w * len(nodes) for w, (nodes, _) in token_outcomes(p, q, tokens, parent, everyone)
            )
        gains.append(gain)
    assert min(gains) >= -1e-12
    if not one_hot:
        assert max(gains) > 0.01  # some distributions leave the joint rule room to gain


def test_wrong_rules_are_caught():
    """The enumeration is sharp: the mistakes of A01 (argmax drafts judged by a softmax) and of a forgotten
    residual move the distribution by far more than the tolerance."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.35, 0.25])
    draft = int(q.argmax())
    accept = min(1.0, p[draft] / q[draft])
    rest = np.maximum(p - q, 0)
    a01 = accept * np.eye(3)[draft] + (1 - accept) * rest / rest.sum()
    no_residual = p[draft] * np.eye(3)[draft] + (1 - p[draft]) * p
    assert abs(a01 - p).max() > 0.1
    assert abs(no_residual - p).max() > 0.1


def test_oracle_transform_by_hand():
    probs = np.array([0.6, 0.3, 0.1])
    np.testing.assert_allclose(transform(np.log(probs), 1.0, top_p=0.5), [1, 0, 0])
    np.testing.assert_allclose(transform(np.log(probs), 1.0, top_k=2), [2 / 3, 1 / 3, 0])
    np.testing.assert_allclose(transform(np.log(probs), 0.5), probs**2 / (probs**2).sum())
    np.testing.assert_allclose(transform(np.log(probs), 1.0, min_p=0.4), [2 / 3, 1 / 3, 0])
