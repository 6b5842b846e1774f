"""Law 1: greedy speculative tokens are the tokens of plain decoding, whatever is guessed and wherever the
text ends."""

from __future__ import annotations

import numpy as np
import pytest
from loop_tools import CASES, CONTEXT, NO_EOS, VOCAB, decode, expected, greedy_texts, prompts

pytestmark = pytest.mark.parametrize("name", CASES)


def check(name: str, starts: tuple[tuple[int, ...], ...], *, turn: int = 0, **options: object) -> list:
    case, texts = CASES[name], greedy_texts(starts)
    results = decode(case.proposer, case.params(texts, turn=turn), starts, **options)
    limits = options.get("limits", CONTEXT)
    for row, result in enumerate(results):
        limit = limits if isinstance(limits, int) else limits[row]
        tokens, reason = expected(starts[row], texts[row], limit, options.get("eos", NO_EOS))
        assert (result.token_ids, result.finish_reason) == (tokens, reason), (row, turn)
    return results


def test_to_the_end_of_the_context(name: str) -> None:
    for turn in range(4):
        check(name, prompts(), turn=turn)


def test_end_of_text_at_every_place_of_a_block(name: str) -> None:
    texts = greedy_texts(prompts())
    for place in range(2 * CASES[name].proposer.nodes + 1):
        row = place % len(texts)
        answer = texts[row][len(prompts()[row]) :]
        other = next(t for t in range(VOCAB) if t != answer[place])
        check(name, prompts(), turn=place, eos=(answer[place], other if place % 2 else NO_EOS[0]))


def test_every_length_limit(name: str) -> None:
    depth = CASES[name].proposer.depth
    check(name, prompts(), limits=[CONTEXT, 0, 1], turn=1)
    check(name, prompts(), limits=[CONTEXT, 2, depth], turn=2)
    check(name, prompts(), limits=[CONTEXT, depth + 1, depth + 2], turn=3)


def test_prompts_at_the_limit_of_the_context(name: str) -> None:
    depth = CASES[name].proposer.depth
    rng = np.random.default_rng(9)
    starts = tuple(tuple(rng.integers(0, VOCAB, CONTEXT - left).tolist()) for left in (0, 1, max(depth, 2)))
    results = check(name, starts, turn=3)
    assert [len(r.token_ids) for r in results] == [0, 1, max(depth, 2)]


def test_a_row_alone_in_its_batch(name: str) -> None:
    texts = greedy_texts(prompts())
    for row, start in enumerate(prompts()):
        case = CASES[name]
        params = case.params([texts[row]])
        assert decode(case.proposer, params, [start])[0].token_ids == list(texts[row][len(start) :])
