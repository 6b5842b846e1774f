"""The near-tie protocol: small gaps are ties, large ones failures, on crafted logits and real forwards."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import eaglejax as ej
from eaglejax.cli.doctor import tiny_config
from eaglejax.measure import near_ties
from eaglejax.models import decoder
from eaglejax.nn.visible import Causal

BEST = np.array([5.0, 4.0, 3.0, 6.0], np.float32)


@pytest.fixture(scope="module")
def target():
    return ej.random_target(tiny_config(), seed=3)


@pytest.mark.parametrize(
    ("own", "rival", "gaps"),
    [
        # AR's token at the first difference, place 1, against the answer's.
        ([5.0, 3.9, 3.0, 6.0], 4.0, [0.1]),
        # The plain forward may itself prefer the answer's token: the distance is what counts.
        ([5.0, 4.0, 3.0, 6.0], 3.75, [0.25]),
        # Later places are held against their own best, the exact tie there is no flip.
        ([5.0, 3.9, 2.5, 6.0], 4.0, [0.1, 0.5]),
        # A difference before the first one cannot be: AR chose the same tokens there.
        ([1.0, 4.0, 3.0, 6.0], 4.0, [0.0]),
        ([5.0, 4.0, np.nan, 6.0], 4.0, [0.0, np.inf]),
        ([5.0, 4.0, 3.0, 6.0], np.nan, [np.inf]),
    ],
)
def test_gaps_of_crafted_logits(own, rival, gaps):
    assert near_ties.gaps_from(BEST, np.array(own, np.float32), rival, 1) == pytest.approx(gaps)


def test_a_flip_within_the_tolerance_passes_and_a_wider_one_fails():
    narrow = near_ties.Comparison(0.25, answers=3, differing=1, gaps=(0.25, 0.1))
    wide = dataclasses.replace(narrow, gaps=(0.1, 0.26))
    assert narrow.to_json() == {
        "identical_to_ar": True,
        "compared": 3,
        "differing": 1,
        "flips": 2,
        "largest_flip_gap": 0.25,
        "tie_tolerance": 0.25,
    }
    assert not wide.identical


def test_scores_are_the_logits_of_one_plain_forward(target):
    rng = np.random.default_rng(0)
    # Longer than two parts, so that the cache is carried over and the last part is padded.
    prompt, answer = rng.integers(0, 48, 70).tolist(), rng.integers(0, 48, 75).tolist()
    tokens = jnp.asarray([prompt + answer])
    n = tokens.shape[1]
    out = decoder.forward(
        target.params,
        target.config,
        tokens,
        jnp.arange(n)[None],
        decoder.init_cache(target.config, 1, n),
        Causal(),
    )
    logits = np.asarray(decoder.unembed(target.params, target.config, out.hidden))[0, len(prompt) - 1 : -1]
    best, own, rival = near_ties.score(target, prompt, answer, 5)
    np.testing.assert_allclose(best, logits.max(-1), rtol=1e-5)
    np.testing.assert_allclose(own, logits[np.arange(75), answer], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rival, logits[:, 5], rtol=1e-4, atol=1e-5)


def test_a_planted_tie_is_a_near_tie_and_a_wrong_token_is_not(target):
    prompt = [1, 2, 3, 4]
    plain = ej.generate(target, prompt, max_new_tokens=12).token_ids
    free = near_ties.Comparison(near_ties.TOLERANCE["float32"])
    same = near_ties.compare(free, target, prompt, plain, plain)
    assert (same.answers, same.differing, same.gaps) == (1, 0, ())

    wrong = [*plain[:6], (plain[6] + 1) % 48, *plain[7:]]
    failed = near_ties.compare(same, target, prompt, plain, wrong)
    assert (failed.answers, failed.differing) == (2, 1)
    assert not failed.identical

    # Make another token tie exactly with the one that was chosen, by giving it the same head column.
    twin = next(t for t in range(47, 0, -1) if t not in plain and t not in prompt)
    head = target.params["head"].at[:, twin].set(target.params["head"][:, plain[6]])
    tied = dataclasses.replace(target, params={**target.params, "head": head})
    flipped = [*plain[:6], twin]
    near = near_ties.compare(free, tied, prompt, plain[:7], flipped)
    assert near.identical
    assert near.gaps == pytest.approx([0.0], abs=1e-6)


def test_an_answer_that_ends_early_is_no_tie(target):
    assert near_ties.flip_gaps(target, [1], [2, 3, 4], [2, 3]) == [float("inf")]


def test_every_weight_dtype_has_a_tolerance():
    assert set(near_ties.TOLERANCE) == {"bfloat16", "float32", "float16"}
