"""What the books say is what the rounds did, for every proposer: counts, rates and tau, trimmed as the text
is."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from cases import Case, every
from loop_tools import (
    CONTEXT,
    GREEDY,
    NO_EOS,
    decode,
    empty_state,
    greedy_texts,
    one_round,
    prefill,
    prompts,
    split,
)

from eaglejax.speculate import metrics, rounds


@every("metrics")
def test_the_books_are_those_of_the_rounds(case: Case) -> None:
    """A25, A86: one row ends by a limit in the middle of a block, one by an end of text, one by the
    context."""
    texts, depth = greedy_texts(prompts(), case.layers), case.proposer.depth
    sizes = [len(p) for p in prompts()]
    begin = {text[n] for text, n in zip(texts, sizes, strict=True)}
    eos = (next(t for t in texts[1][sizes[1] + depth + 2 :] if t not in begin), NO_EOS[0])
    limits = [depth + 3, CONTEXT, CONTEXT]
    params = case.params(texts, turn=2)
    results = decode(
        case.proposer, params, prompts(), target=case.target, limits=limits, eos=eos, **case.judged
    )

    program = case.program()
    weights, inputs = split(case.proposer, params)
    both = rounds.Params(case.target.params, weights)
    budget = [min(a, CONTEXT - n) for a, n in zip(limits, sizes, strict=True)]
    state = empty_state(program, both, case.target, [GREEDY] * 3, prompts(), budget, eos, inputs)
    state, first = prefill(program, both, state, prompts(), sizes)
    found, played = [[int(t)] for t in first], [[], [], []]
    while not np.asarray(state.done).all():
        state, record = one_round(program, both, state)
        for row in range(3):
            n = int(record.count[row])
            found[row] += record.tokens[row, :n].tolist()
            if n:
                played[row].append(
                    (n, *(int(x[row]) for x in (record.accepted, record.drafted, record.reach, record.width)))
                )
    for result, tokens, turns in zip(results, found, played, strict=True):
        stats = result.stats
        assert result.token_ids == tokens
        counts, accepted, drafted, reach, width = zip(*turns, strict=True)
        assert (stats.num_tokens, stats.round_tokens) == (len(tokens), len(tokens) - 1)
        assert (stats.target_forwards, stats.round_tokens) == (len(turns), sum(counts))
        assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (sum(drafted), sum(accepted))
        assert stats.num_drafts == sum(n > 0 for n in drafted)
        assert dict(stats.widths) == collections.Counter(width)
        assert all(n < w for n, w in zip(drafted, width, strict=True))
        assert stats.mean_acceptance_length == sum(counts) / len(counts)
        # A round emits one token more than it accepts, but for a last one that was cut.
        assert all(n == a + 1 for n, a in zip(counts[:-1], accepted[:-1], strict=True))
        assert accepted[-1] <= counts[-1] <= accepted[-1] + 1
        assert all(a <= r <= min(d, depth) for a, d, r in zip(accepted, drafted, reach, strict=True))
        assert len(stats.accepted_at) == len(stats.n_alpha) == depth
        assert list(stats.accepted_at) == [sum(a > i for a in accepted) for i in range(depth)]
        assert sum(stats.per_position_acceptance_rate) == pytest.approx(sum(accepted) / len(turns))
        assert all(a <= b for a, b in zip(stats.accepted_at, stats.reached_at, strict=True))
        assert all(0 <= rate <= 1 for rate in stats.n_alpha)
    # The sum over rows is the sum of every count; ratios follow from it.
    both_rows = metrics.total([r.stats for r in results])
    assert both_rows.num_tokens == sum(len(t) for t in found)
    assert both_rows.target_forwards == sum(len(t) for t in played)
    if depth == 0:
        assert both_rows.mean_acceptance_length == 1
        assert both_rows.num_draft_tokens == 0
