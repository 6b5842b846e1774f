"""Law 3: a row's tokens depend on its own prompt, settings and seed, and on nothing beside it. Greedy,
sampled, filtered and penalised rows in one batch, every proposer, every kind of target."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cases import CASES, Case, every, few
from loop_tools import (
    BATCH,
    COLD,
    GREEDY,
    HOT,
    WARM,
    WORDS,
    PieceTokenizer,
    decode,
    expected,
    greedy_texts,
    logits_of,
    pad,
    prompts,
)

LIMIT = 29
"""Fits behind the longest prompt, and is long enough for every call to pad its caches alike."""


def run(case: Case, order: list[int], settings: list[Any], **options: Any) -> list[Any]:
    """Generations of the prompts named by ``order``, each with its own of ``settings``."""
    texts = [greedy_texts(prompts(), case.layers, s if s.temperature == 0 else GREEDY) for s in settings]
    params = case.params([texts[i][i] for i in order])
    return decode(
        case.proposer,
        params,
        [prompts()[i] for i in order],
        samplings=[settings[i] for i in order],
        target=options.pop("target", case.target),
        **{"limits": LIMIT, "logprobs": True, **case.judged, **options},
    )


def tokens(case: Case, order: list[int], settings: list[Any], **options: Any) -> list[list[int]]:
    return [r.token_ids for r in run(case, order, settings, **options)]


@every("rows")
def test_batch_mates_slots_and_padding_change_nothing(case: Case) -> None:
    settings = [HOT, COLD, WARM]
    together = tokens(case, [0, 1, 2], settings)
    assert all(len(t) == LIMIT for t in together)
    assert tokens(case, [0, 1, 2], settings) == together
    assert tokens(case, [2, 0, 1], settings) == [together[2], together[0], together[1]]
    for row in (0, 2):
        # In the other slots: rows without a request.
        assert tokens(case, [row], settings) == [together[row]]
        # Beside two copies of itself, which share its seed and so all its draws.
        assert tokens(case, [row] * BATCH, settings) == [together[row]] * BATCH
    # Greedy rows beside sampled ones: the texts of plain decoding, with penalties and without.
    for greedy in (COLD, GREEDY):
        answer = list(greedy_texts(prompts(), case.layers, greedy)[1][len(prompts()[1]) :])[:LIMIT]
        beside = together[1] if greedy is COLD else tokens(case, [0, 1, 2], [HOT, GREEDY, WARM])[1]
        assert beside == answer
    assert together[1] != beside, "the penalties must matter"


@few("rows")
def test_drafts_that_are_not_drawn_leave_every_draw_alone(case: Case) -> None:
    """Sampled rows write what plain decoding writes with their seeds, whatever is guessed."""
    if case.proposer.draws or not case.layers.exact:
        pytest.skip("its drafts are drawn, or widths differ by rounding")
    settings = [HOT, COLD, WARM]
    plain = tokens(CASES["ar"].over(case.layers), [0, 1, 2], settings)
    assert tokens(case, [0, 1, 2], settings) == plain


@few("rows")
def test_seeds_ends_and_stop_strings(case: Case) -> None:
    """Another seed gives another text; an end of text or a stop string cuts the text that it would have been,
    in sampled rows too."""
    settings = [HOT, COLD, WARM]
    together = tokens(case, [0, 1, 2], settings)
    other = tokens(case, [0, 1, 2], [dataclasses.replace(s, seed=99) for s in settings])
    assert [a == b for a, b in zip(together, other, strict=True)] == [False, True, False]
    eos = (together[0][6], together[2][9])
    for row, result in enumerate(run(case, [0, 1, 2], settings, eos=eos)):
        assert (result.token_ids, result.finish_reason) == expected((), together[row], LIMIT, eos)
    words = PieceTokenizer(WORDS)
    stop = (words.decode(together[0][5:8])[1:],)
    target = dataclasses.replace(case.target, tokenizer=words)
    for row, result in enumerate(run(case, [0, 1, 2], settings, target=target, stop=stop)):
        whole = words.decode(together[row])
        assert result.text == whole.partition(stop[0])[0]
        assert result.token_ids == together[row][: len(result.token_ids)]


@few("rows")
def test_log_probabilities_are_the_targets_for_every_token(case: Case) -> None:
    """A84: accepted, recovered and bonus tokens, before any transform."""
    written = others = 0
    results = run(case, [0, 1, 2], [HOT, COLD, WARM])
    texts = [[*p, *r.token_ids] for p, r in zip(prompts(), results, strict=True)]
    logits = logits_of(case.target, pad(texts)).astype(np.float64)
    whole = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    whole -= logits.max(-1, keepdims=True)
    for row, (result, prompt) in enumerate(zip(results, prompts(), strict=True)):
        at = np.arange(len(prompt), len(prompt) + LIMIT)
        wanted = whole[row, at - 1, np.asarray(texts[row])[at]]
        np.testing.assert_allclose(result.logprobs, wanted, atol=1e-4 if case.layers.exact else 0.1)
        written += result.stats.num_accepted_tokens
        others += result.stats.round_tokens - result.stats.num_accepted_tokens
    assert others > 20
    # A lookup is rarely right about what is written hot.
    assert written > (0 if case.proposer.depth else -1)
