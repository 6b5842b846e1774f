"""Where answers end, what is kept of the block that goes further, and what the books say about it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from cases import CASES
from loop_tools import (
    BATCH,
    CONTEXT,
    GREEDY,
    NO_EOS,
    VOCAB,
    WIDTH,
    WORDS,
    PieceTokenizer,
    decode,
    greedy_texts,
    pad,
    prompts,
    tiny_target,
)

from eaglejax.speculate import metrics
from eaglejax.speculate.generate import BatchDecoder, DecodeOptions, Generation, Piece, Request
from eaglejax.speculate.stops import TextStream

SHARDS = [
    *WORDS[:18],
    b" the",
    b"\n",
    b"ab",
    *(bytes([b]) for b in "\u00e9\u6f22\U0001f642".encode()),
    b"!",
    b"?",
]


def with_text(pieces: list[bytes], eos: tuple[int, ...] = NO_EOS) -> Any:
    assert len(pieces) == VOCAB
    return dataclasses.replace(tiny_target(), tokenizer=PieceTokenizer(tuple(pieces)), eos_ids=eos)


def answers() -> list[list[int]]:
    """What greedy decoding writes after each prompt, up to the context's end."""
    return [list(text[len(p) :]) for text, p in zip(greedy_texts(prompts()), prompts(), strict=True)]


def accept_all(name: str) -> tuple[Any, Any]:
    """A scripted proposer that is right throughout."""
    proposer = CASES[name].proposer
    texts = [pad([t])[0].tolist() for t in greedy_texts(prompts())]
    return proposer, proposer.script(texts, [proposer.depth] * 12)


def test_the_books_end_with_the_text() -> None:
    """Five drafts a round, all right; the third token of the second round ends the text."""
    proposer, params = accept_all("chain_5")
    answer = answers()[0]
    place = next(n for n in range(7, len(answer)) if answer[n] not in answer[:n])
    # The prompt's forward gives token 0, each round six more.
    rounds, within = divmod(place - 1, 6)
    result = decode(proposer, params, prompts()[:1], eos=(answer[place], NO_EOS[0]))[0]
    assert result.token_ids == answer[: place + 1]
    stats = result.stats
    assert (stats.num_tokens, stats.round_tokens, stats.target_forwards) == (place + 1, place, rounds + 1)
    assert stats.num_accepted_tokens == 5 * rounds + min(within + 1, 5)
    assert stats.num_draft_tokens == 5 * (rounds + 1)
    assert stats.accepted_at == tuple(rounds + (i <= within) for i in range(5))
    assert stats.mean_acceptance_length == place / (rounds + 1)


def test_acceptance_of_a_known_script() -> None:
    """Accepts 3, 0, 1, 2 by turns: every rate can be worked out on paper."""
    proposer = CASES["chain_3"].proposer
    texts = [pad([t])[0].tolist() for t in greedy_texts(prompts())]
    params = proposer.script(texts, [3, 0, 1, 2] * 3)
    # Twelve rounds emit three times 4 + 1 + 2 + 3 tokens, after the one of the prompt's forward.
    stats = decode(proposer, params, prompts()[:1], limits=1 + 30)[0].stats
    assert (stats.target_forwards, stats.round_tokens, stats.num_tokens) == (12, 30, 31)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (12, 36, 18)
    assert stats.mean_acceptance_length == 30 / 12
    assert stats.per_position_acceptance_rate == [9 / 12, 6 / 12, 3 / 12]
    assert stats.n_alpha == [9 / 12, 6 / 9, 3 / 6]


def test_a_drafter_that_always_says_end_of_text() -> None:
    proposer = CASES["chain_5"].proposer
    target, answer = tiny_target(), answers()
    eos = next(t for t in range(VOCAB) if all(t not in a[:15] for a in answer))
    params = proposer.script([[eos] * CONTEXT] * BATCH, [5] * 12)
    results = decode(proposer, params, prompts(), target=target, eos=(eos, NO_EOS[0]))
    for result, whole in zip(results, answer, strict=True):
        ended = whole[: whole.index(eos) + 1] if eos in whole else whole
        assert len(result.token_ids) > 14
        assert result.token_ids == ended


@pytest.mark.parametrize("stop", [(), ("!",)])
def test_pieces_join_to_the_text_although_characters_are_cut(stop: tuple[str, ...]) -> None:
    proposer, params = accept_all("chain_5")
    run = BatchDecoder(
        with_text(SHARDS),
        proposer,
        None,
        [
            Request(p, GREEDY, CONTEXT, stop, r.prediction)
            for p, r in zip(prompts(), params.requests(), strict=True)
        ],
        options=DecodeOptions(rounds_a_chunk=4, prefill_width=WIDTH),
    )
    pieces: list[Piece] = list(run)
    results: list[Generation] = run.results()
    assert len({p.row for p in pieces}) == BATCH
    assert len(pieces) > BATCH
    for row, result in enumerate(results):
        assert "".join(p.text for p in pieces if p.row == row) == result.text
        handed_out = [t for p in pieces if p.row == row for t in p.token_ids]
        assert handed_out[: len(result.token_ids)] == result.token_ids
        if not stop:
            assert result.text == PieceTokenizer(tuple(SHARDS)).decode(result.token_ids)
            assert handed_out == result.token_ids


def test_a_stop_string_before_an_unfinished_character_ends_the_text() -> None:
    """The token that completes it also begins a character, which may never come to its end."""
    face = "\U0001f642".encode()
    pieces = (b"ab", b"c!" + face[:2], face[2:], b"d")
    stream = TextStream(PieceTokenizer(pieces), ("!",))
    assert [stream.push(t) for t in (0, 1)] == [False, True]
    assert (stream.text, stream.safe_text, stream.kept_tokens()) == ("abc", "abc", 2)
    # Without the stop string the text goes on, and what is certain is shown early.
    stream = TextStream(PieceTokenizer(pieces), ("?",))
    shown = [(stream.push(t), stream.safe_text)[1] for t in (0, 1, 2, 3)]
    assert shown == ["ab", "abc!", "abc!\U0001f642", "abc!\U0001f642d"]
    # The stop string itself may be what is cut.
    stream = TextStream(PieceTokenizer(pieces), ("\U0001f642",))
    assert [stream.push(t) for t in (0, 1, 2)] == [False, False, True]
    assert (stream.text, stream.kept_tokens()) == ("abc!", 2)


MARKED = (b"ab", b"<|x|>", b"cd", b"<|y|>", "\u6f22".encode()[:1], "\u6f22".encode()[1:])


@pytest.mark.parametrize(
    ("stop", "tokens", "text", "kept"),
    [
        # The control token itself, in the middle and at the beginning of a stop string, and beside another.
        ("<|x|>", (0, 3, 2, 1), "abcd", 3),
        ("b<|x|>c", (0, 1, 2), "a", 1),
        ("<|x|>cd", (0, 1, 2), "ab", 1),
        ("<|y|><|x|>", (0, 3, 1), "ab", 1),
        ("<|x|>", (0, 4, 1), "ab\ufffd", 2),
        ("x|", (0, 2, 0), None, 3),
        ("<|x|>", (0, 3, 4, 5), None, 4),
    ],
)
def test_a_stop_string_may_spell_control_tokens(
    stop: str, tokens: tuple[int, ...], text: str | None, kept: int
) -> None:
    stream = TextStream(PieceTokenizer(MARKED, frozenset({1, 3})), (stop,))
    shown = ""
    for n, token in enumerate(tokens):
        ended = stream.push(token)
        assert ended == (text is not None and n == len(tokens) - 1)
        assert stream.safe_text.startswith(shown)
        shown = stream.safe_text
    words = PieceTokenizer(MARKED).decode([t for t in tokens if t not in (1, 3)])
    assert stream.text == (words if text is None else text)
    assert stream.text.startswith(shown)
    assert stream.kept_tokens() == kept


@pytest.mark.parametrize("name", ["ar", "chain_5"])
def test_stop_tokens_end_a_text_as_its_end_does(name: str) -> None:
    proposer, params = (CASES["ar"].proposer, None) if name == "ar" else accept_all(name)
    for place in (0, 3, 4):
        ends = (answers()[0][place], answers()[1][place + 2])
        results = decode(proposer, params, prompts(), target=with_text(WORDS), ends=ends)
        wanted = decode(proposer, params, prompts(), target=with_text(WORDS), eos=ends)
        for result, want in zip(results, wanted, strict=True):
            assert (result.text, result.token_ids) == (want.text, want.token_ids)
            assert result.finish_reason == want.finish_reason
            assert result.stats.num_tokens == want.stats.num_tokens


def test_of_stop_strings_that_overlap_the_first_in_the_text_counts() -> None:
    stream = TextStream(PieceTokenizer((b"xab", b"cd")), ("d", "bc", "abcde"))
    assert [stream.push(t) for t in (0, 1)] == [False, True]
    assert (stream.text, stream.kept_tokens()) == ("xa", 1)
    # One string that begins twice: the earlier beginning is no match, the later one is.
    stream = TextStream(PieceTokenizer((b"a", b"ab")), ("aab",))
    assert [stream.push(t) for t in (0, 0, 1)] == [False, False, True]
    assert (stream.text, stream.kept_tokens()) == ("a", 1)


def test_rates_count_no_position_that_was_never_judged() -> None:
    """A round of three drafts that ends with its first one says nothing about the second."""
    whole, cut = metrics.Round(4, 3, 3, 3), metrics.Round(1, 1, 3, 3)
    refused = metrics.Round(2, 1, 3, 3)
    stats = metrics.from_rounds([whole, refused, cut], depth=3, first_tokens=1, seconds=2, first_seconds=1)
    assert (stats.accepted_at, stats.reached_at) == ((3, 1, 1), (3, 2, 1))
    assert stats.n_alpha == [1, 1 / 2, 1]
    # A row without a token counts in no mean.
    nothing = metrics.from_rounds([], depth=3, first_tokens=0, seconds=0, first_seconds=0)
    assert nothing.rows == 0
    both = metrics.total([stats, nothing])
    assert (both.ttft_ms, both.tpot_ms) == (stats.ttft_ms, stats.tpot_ms) == (1000, 1000 / 7)
