"""Perfect EAGLE drafts are accepted whole. The laws that hold for any draft are in ``tests/conformance``."""

from __future__ import annotations

import pytest
from eagle_cases import make
from eagle_loop import (
    decode,
    draft_config,
    join,
    last_token_pair,
    make_target,
    own_layer_pair,
    target_config,
)
from width_tools import Turns

from eaglejax.drafts.autoregressive import Autoregressive
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.tree import DynamicTree, chain, from_choices
from eaglejax.sampling import Sampling
from eaglejax.speculate.state import UNREAD

PROMPTS = ([5], [1, 2, 3, 4, 5, 6, 7], [(7 * i) % 24 for i in range(19)])


@pytest.mark.slow
def test_rounds_of_every_width_and_none_give_the_targets_text():
    target, tree = make_target(target_config()), DynamicTree(3, 2, 6)
    plain = [r.token_ids for r in decode(target, Autoregressive(), None, PROMPTS)]
    config = draft_config(target.config, 3)
    params = join(make(config, seed=1), config, target)
    results = decode(target, Eagle(config, tree), params, PROMPTS, widths=(1, 3, 6), policy=Turns(rest=5))
    assert [r.token_ids for r in results] == plain
    for result in results:
        assert {width for width, _ in result.stats.widths} == {1, 3, 6}


def test_features_left_unread_are_read_before_the_next_draft():
    """More rounds without a draft than may be left unread; the target's own layer then drafts as if it had
    read every round."""
    target, draft, params = own_layer_pair()
    prompts = ([1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4, 3, 2, 1])
    how = {"widths": (1, 3, 5), "policy": Turns(rest=UNREAD + 1)}
    for r in decode(target, Eagle(draft, chain(4)), params, prompts, tokens=UNREAD + 10, **how):
        assert dict(r.stats.widths) == {1: UNREAD + 1, 3: 1, 5: 1}
        assert r.stats.num_accepted_tokens == r.stats.num_draft_tokens == 4 + 2


def test_the_targets_own_layer_as_eagle1_draft_is_accepted_whole():
    """O3 with attention. Any slip of one position, mask or refill costs acceptance."""
    depth = 5
    target, draft, params = own_layer_pair()
    prompts = ([1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4, 3, 2, 1])
    # Every node's best child is in the tree, beside others that the walk has to leave out.
    tree = from_choices([[1], [0, 1], *([0] * n for n in range(1, depth + 1))])
    for r in decode(target, Eagle(draft, tree), params, prompts, tokens=25):
        assert r.stats.mean_acceptance_length == depth + 1
        assert len({*r.token_ids}) >= 3, "a constant text would prove little"


def test_a_perfect_eagle3_draft_is_accepted_whole_sampled_too():
    """O3 for the 2H layer: chains are accepted whole at any temperature."""
    target, draft, params = last_token_pair()
    prompts = ([1, 2, 3], [9, 8, 7, 6])
    heat = Sampling(1.0, seed=3)
    for r in decode(target, Eagle(draft, chain(4), sample=True), params, prompts, tokens=41, sampling=heat):
        assert len({*r.token_ids}) > 5
        # Rounding of p / q can refuse a draft once in a long while.
        assert r.stats.mean_acceptance_length >= 4.8
