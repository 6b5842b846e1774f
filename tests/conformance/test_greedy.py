"""Law 1: greedy speculative tokens are the tokens of plain decoding, whatever is guessed and wherever the
text ends. Every proposer, every kind of target."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from cases import Case, every, few
from loop_tools import (
    BATCH,
    CONTEXT,
    GREEDY,
    NO_EOS,
    VOCAB,
    WORDS,
    PieceTokenizer,
    decode,
    empty_state,
    expected,
    greedy_texts,
    one_round,
    prefill,
    prompts,
    split,
)

from eaglejax.speculate import rounds

Starts = tuple[tuple[int, ...], ...]


def check(case: Case, starts: Starts, *, turn: int = 0, **options: Any) -> list[Any]:
    texts = greedy_texts(starts, case.layers)
    options = {**case.judged, **options}
    results = decode(case.proposer, case.params(texts, turn=turn), starts, target=case.target, **options)
    limits = options.get("limits", CONTEXT)
    for row, result in enumerate(results):
        limit = limits if isinstance(limits, int) else limits[row]
        tokens, reason = expected(starts[row], texts[row], limit, options.get("eos", NO_EOS))
        assert (result.token_ids, result.finish_reason) == (tokens, reason), (row, turn)
    return results


@every("greedy")
def test_to_the_end_of_the_context(case: Case) -> None:
    accepted = refused = 0
    for turn in range(4):
        for result in check(case, prompts(), turn=turn):
            stats = result.stats
            accepted += stats.num_accepted_tokens
            refused += stats.target_forwards - stats.accepted_at[-1] if stats.accepted_at else 0
    if case.proposer.depth:
        assert accepted > 20, "drafts that are never accepted prove little"
        assert refused > 20, "drafts that are never refused prove little"


@few("greedy")
def test_end_of_text_at_every_place_of_a_block(case: Case) -> None:
    texts = greedy_texts(prompts(), case.layers)
    for place in range(2 * case.proposer.depth + 3):
        row = place % len(texts)
        answer = texts[row][len(prompts()[row]) :]
        other = next(t for t in range(VOCAB) if t != answer[place])
        check(case, prompts(), turn=place, eos=(answer[place], other if place % 2 else NO_EOS[0]))


@few("greedy")
def test_every_length_limit(case: Case) -> None:
    depth = case.proposer.depth
    check(case, prompts(), limits=[CONTEXT, 0, 1], turn=1)
    check(case, prompts(), limits=[CONTEXT, 2, depth], turn=2)
    check(case, prompts(), limits=[CONTEXT, depth + 1, depth + 2], turn=3)


@few("greedy")
def test_prompts_at_the_limit_of_the_context(case: Case) -> None:
    """A27, A28: no draft stands past the context, and a full prompt is an answer of nothing."""
    depth = case.proposer.depth
    rng = np.random.default_rng(9)
    starts = tuple(tuple(rng.integers(0, VOCAB, CONTEXT - left).tolist()) for left in (0, 1, max(depth, 2)))
    results = check(case, starts, turn=3)
    assert [len(r.token_ids) for r in results] == [0, 1, max(depth, 2)]


@few("greedy")
def test_prompts_shorter_than_a_block(case: Case) -> None:
    """A44: prompts of every length up to a block's and one more, beside each other."""
    rng = np.random.default_rng(8)
    for sizes in ((2, 3, 4), (5, 6, 1)):
        check(case, tuple(tuple(rng.integers(0, VOCAB, size).tolist()) for size in sizes), turn=1)


@few("greedy")
def test_a_row_alone_in_its_batch(case: Case) -> None:
    texts = greedy_texts(prompts(), case.layers)
    for row, start in enumerate(prompts()):
        params = case.params([texts[row]])
        assert decode(case.proposer, params, [start], target=case.target, **case.judged)[0].token_ids == list(
            texts[row][len(start) :]
        )


@few("greedy")
def test_a_row_that_joins_others_in_the_middle_of_their_texts(case: Case) -> None:
    """Each row in turn comes last, two rounds after the others, over what has gone on in its slot since."""
    texts = greedy_texts(prompts(), case.layers)
    sizes = [len(p) for p in prompts()]
    program = case.program()
    for late in range(BATCH):
        weights, inputs = split(case.proposer, case.params(texts, turn=late))
        params = rounds.Params(case.target.params, weights)
        left = [CONTEXT - n for n in sizes]
        state = empty_state(program, params, case.target, [GREEDY] * BATCH, prompts(), left, inputs=inputs)
        state = dataclasses.replace(state, done=state.done.at[late].set(True))
        early = [0 if row == late else n for row, n in enumerate(sizes)]
        state, first = prefill(program, params, state, prompts(), early)
        found = [[] if row == late else [int(first[row])] for row in range(BATCH)]
        for turn in range(CONTEXT):
            if turn == 2:
                assert found[late] == []
                state = dataclasses.replace(state, done=state.done.at[late].set(False))
                here = [sizes[row] if row == late else 0 for row in range(BATCH)]
                state, first = prefill(program, params, state, prompts(), here)
                found[late] = [int(first[late])]
            state, record = one_round(program, params, state)
            for row in range(BATCH):
                found[row] += record.tokens[row, : record.count[row]].tolist()
            if np.asarray(state.done).all():
                break
        assert found == [list(t[n:]) for t, n in zip(texts, sizes, strict=True)], late


def stop_oracle(answer: list[int], stops: tuple[str, ...]) -> tuple[str, list[int], str]:
    """Token by token, looking at the whole text each time: text, tokens and reason."""
    text_of = PieceTokenizer(WORDS).decode
    for n in range(1, len(answer) + 1):
        text = text_of(answer[:n])
        found = [text.find(s) for s in stops if s in text]
        if found:
            kept = text[: min(found)]
            needed = next(m for m in range(n + 1) if len(text_of(answer[:m])) >= len(kept))
            return kept, answer[:needed], "stop"
    return text_of(answer), answer, "length"


@few("greedy")
def test_stop_strings_end_the_text_where_plain_decoding_would(case: Case) -> None:
    """A24: ids, text and books go as far as the text does, wherever in a block the string begins and ends."""
    texts = greedy_texts(prompts(), case.layers)
    answers = [list(text[len(p) :]) for text, p in zip(texts, prompts(), strict=True)]
    words = [PieceTokenizer(WORDS).decode(a) for a in answers]
    target, reasons = dataclasses.replace(case.target, tokenizer=PieceTokenizer(WORDS)), set()
    for begin in range(8):
        stop = (words[begin % BATCH][begin : begin + 1 + begin % 3], "never in any text")
        params = case.params(texts, turn=begin)
        results = decode(case.proposer, params, prompts(), target=target, stop=stop, **case.judged)
        for result, answer in zip(results, answers, strict=True):
            text, tokens, reason = stop_oracle(answer, stop)
            assert (result.text, result.token_ids, result.finish_reason) == (text, tokens, reason), stop
            assert result.stats.num_tokens == len(tokens)
            assert result.stats.round_tokens == max(len(tokens) - 1, 0)
            assert result.stats.num_accepted_tokens <= result.stats.round_tokens
            reasons.add(reason)
    assert reasons == {"stop", "length"}
