"""Settings and shapes that must not show in the text: penalties, chunk sizes, cache dtypes, faulty tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from loop_tools import (
    BATCH,
    CONTEXT,
    GREEDY,
    VOCAB,
    decode,
    greedy_texts,
    prompts,
    tiny_config,
    tiny_target,
)

from eaglejax.drafts.ngram import NGram
from eaglejax.errors import ConfigError, RequestError
from eaglejax.nn import kv
from eaglejax.sampling import Sampling
from eaglejax.speculate import generate, rounds
from eaglejax.speculate.admission import check_request
from eaglejax.speculate.generate import BatchDecoder, DecodeOptions, Request
from eaglejax.speculate.options import capacity_for

BAN = float("-inf")


def run(name: str, **options: Any) -> list[list[int]]:
    case, texts = CASES[name], greedy_texts(prompts())
    return [r.token_ids for r in decode(case.proposer, case.params(texts, turn=1), prompts(), **options)]


def test_every_write_fits_and_one_that_does_not_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "CHECK_WRITES", True)
    texts = greedy_texts(prompts())

    def answers() -> list[list[int]]:
        # A length of no other test, whose programs were traced without the check.
        return [r.token_ids for r in decode(NGram(length=6), None, prompts())]

    assert answers() == [list(t[len(p) :]) for t, p in zip(texts, prompts(), strict=True)]
    monkeypatch.setattr(generate, "capacity_for", lambda *forwards: 40)
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not fit a cache of 40 slots"):
        answers()


def test_a_cache_holds_what_every_forward_writes() -> None:
    assert capacity_for((20, 16), (30, 8)) == 64
    assert capacity_for((20, 12), (24, 8)) == 32
    assert capacity_for((1, 1)) == 32


def test_penalties_and_bias_give_the_text_of_plain_decoding() -> None:
    """A83: every row has settings of its own, one of them a penalty that rewards repetition, one a ban on the
    id that would have ended its text."""
    answer = greedy_texts(prompts())[1][len(prompts()[1]) :]
    settings = [
        Sampling(frequency_penalty=-2.0),
        Sampling(logit_bias={answer[4]: BAN}),
        Sampling(frequency_penalty=2.0, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={5: 4.0}),
    ]
    plain = run("ar", samplings=settings)
    loose = run("ar")
    assert all(a != b for a, b in zip(plain, loose, strict=True))
    for name in ("ngram", "mixed"):
        assert run(name, samplings=settings) == plain, name
    widest = [
        Sampling(frequency_penalty=1000.0, repetition_penalty=1000.0),
        Sampling(presence_penalty=-1000.0, repetition_penalty=0.001, logit_bias={5: -1e9}),
        Sampling(frequency_penalty=-1000.0, logit_bias={5: 1e9, 7: 1e9}),
    ]
    far = run("ar", samplings=widest)
    for name in ("ngram", "mixed"):
        assert run(name, samplings=widest) == far, name
    eos = (answer[4], 1000)
    ended = run("ar", samplings=settings, eos=eos)
    assert run("ngram", samplings=settings, eos=eos) == ended
    assert ended[1] == plain[1]
    assert eos[0] not in ended[1]


@pytest.mark.parametrize("name", ["ar", "ngram"])
def test_settings_that_leave_no_law_end_their_row_alone(name: str) -> None:
    """Logits that are finite and overflow under a row's penalties: an error, never token 0 for ever."""
    target = tiny_target()
    large = {**target.params, "norm": jax.tree.map(lambda x: x * 1e36, target.params["norm"])}
    huge = dataclasses.replace(target, params=large)
    every = dict.fromkeys(range(VOCAB - 1), BAN)
    settings = [
        Sampling(frequency_penalty=0.1, logit_bias={1: 1.0}),
        Sampling(repetition_penalty=0.001, logit_bias={1: 1.0}),
        Sampling(logit_bias=every),
    ]
    case, texts = CASES[name], greedy_texts(prompts())
    results = decode(
        case.proposer, case.params(texts, turn=1), prompts(), target=huge, samplings=settings, limits=4
    )
    assert [r.finish_reason for r in results] == ["length", "error", "length"]
    assert "penalties" in results[1].error
    assert results[2].token_ids == [VOCAB - 1] * 4


CHUNKS = [
    ("ngram", {"rounds_a_chunk": 1, "prefill_width": 7}),
    pytest.param("draft_model", {"prefill_width": 7}, marks=pytest.mark.slow),
    pytest.param("draft_model", {"rounds_a_chunk": 16}, marks=pytest.mark.slow),
    pytest.param("mixed", {"rounds_a_chunk": 1}, marks=pytest.mark.slow),
    pytest.param("ngram", {"prefill_width": 1}, marks=pytest.mark.slow),
    pytest.param("prediction", {"prefill_width": 512}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "options"), CHUNKS)
def test_chunks_of_rounds_and_of_the_prompt_leave_the_text_alone(name: str, options: dict[str, int]) -> None:
    """A41, A42, A44: prompts in one piece and in pieces; looks at the host after any round."""
    assert run(name, **options) == run(name)


@pytest.mark.slow
def test_a_cache_of_bfloat16() -> None:
    plain = run("ar", cache_dtype="bfloat16")
    assert run("mixed", cache_dtype="bfloat16") == plain


@pytest.mark.parametrize("width", [1, 7, 512])
@pytest.mark.parametrize("name", ["ar", "ngram", "chain_5", "mixed", "draft_model"])
def test_no_block_is_written_past_the_end_of_the_cache(name: str, width: int) -> None:
    """A block that would overrun is moved back by the update, over committed slots. So for the longest and
    the shortest prompts, with and without a budget: a prefill chunk is written at up to the last committed
    token of a row whose prompt has ended, a round's nodes at up to prompt + budget - 1 (the root is not in
    the cache), or right behind the prompt of a row that may emit nothing."""
    proposer = CASES[name].proposer
    for sizes, limits in (
        ((1,), (1,)),
        ((CONTEXT,), (1,)),
        ((CONTEXT - 1, 1), (5, CONTEXT)),
        ((1, 17, 33), (0, CONTEXT, 31)),
        ((16, 31), (16, 1)),
        ((CONTEXT, 1), (0, 1)),
    ):
        requests = [Request((1,) * s, GREEDY, n) for s, n in zip(sizes, limits, strict=True)]
        decoder = BatchDecoder(
            tiny_target(), proposer, None, requests, batch=BATCH, options=DecodeOptions(prefill_width=width)
        )
        chunk = decoder._width
        assert chunk >= width or chunk >= max(sizes)
        assert chunk & (chunk - 1) == 0
        budgets = [min(n, CONTEXT - s) for s, n in zip(sizes, limits, strict=True)]
        prefill = [min(s, begin) for s in sizes for begin in range(0, max(sizes), chunk)]
        rounds = [s + max(b - 1, 0) for s, b in zip(sizes, budgets, strict=True)]
        assert max(prefill) + chunk <= decoder._capacity
        assert max(rounds) + proposer.nodes <= decoder._capacity


class Faulty:
    """The decoder, but for one token whose hidden state overflows."""

    def __init__(self, real: Any, token: int) -> None:
        self.real, self.token = real, token

    def __call__(self, params: Any, config: Any, tokens: Any, *args: Any, **options: Any) -> Any:
        out = self.real(params, config, tokens, *args, **options)
        bad = (tokens == self.token)[:, :, None]
        return dataclasses.replace(out, hidden=jnp.where(bad, jnp.nan, out.hidden))


def test_a_token_that_the_target_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A19: a row that reaches it is told so and its mates go on; a draft that is refused costs nothing."""
    texts = greedy_texts(prompts())
    answers = [list(t[len(p) :]) for t, p in zip(texts, prompts(), strict=True)]
    limit = 8
    seen = [set(p) | set(a[:limit]) for p, a in zip(prompts(), answers, strict=True)]
    token = next(t for t in range(VOCAB) if t in answers[0][2 : limit - 1] and t not in seen[1] | seen[2])
    monkeypatch.setattr(rounds.decoder, "forward", Faulty(rounds.decoder.forward, token))
    # Another configuration, for another compilation than the sound decoder's.
    target = dataclasses.replace(tiny_target(), config=tiny_config(max_position=CONTEXT + 1))
    proposer = CASES["wide"].proposer
    # Row 0 meets the token in its text, the others among their drafts: rank 0 drafts what comes before it.
    script = [[token - 1] * CONTEXT for _ in prompts()]
    params = proposer.script(script, [0] * 12)
    results = decode(proposer, params, prompts(), target=target, limits=limit)
    assert results[0].finish_reason == "error"
    assert "NaN or infinite" in results[0].error
    assert results[0].token_ids == answers[0][: answers[0].index(token) + 1]
    for result, answer in zip(results[1:], answers[1:], strict=True):
        assert (result.error, result.token_ids) == (None, answer[:limit])
        assert result.stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"cache_dtype": "int4"}, "int4"),
        ({"cache_dtype": np.dtype("int8")}, "no scales"),
        ({"cache_dtype": "fancy"}, "fancy"),
        ({"rounds_a_chunk": 2.5}, "rounds_a_chunk is 2.5"),
        ({"rounds_a_chunk": 0}, "rounds_a_chunk is 0"),
        ({"prefill_width": True}, "prefill_width is True"),
        ({"verification": "typical"}, "'typical'"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        DecodeOptions(**options)


def test_rows_without_a_budget_and_prompts_at_the_context_beside_others() -> None:
    rng = np.random.default_rng(3)
    full = tuple(rng.integers(0, VOCAB, CONTEXT).tolist())
    starts = (prompts()[1], full, prompts()[0])
    answer = list(greedy_texts(prompts())[1][len(prompts()[1]) :])
    for name in ("ngram", "draft_model"):
        case = CASES[name]
        params = case.params([greedy_texts(prompts())[1]] * BATCH, turn=1)
        results = decode(case.proposer, params, starts, limits=[CONTEXT, 5, 0])
        assert results[0].token_ids == answer
        for empty in results[1:]:
            assert (empty.token_ids, empty.text) == ([], "")
            assert (empty.finish_reason, empty.stats.num_tokens) == ("length", 0)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prompt": ()}, "empty"),
        ({"prompt": (1,) * (CONTEXT + 1)}, f"context is {CONTEXT}"),
        ({"prompt": (1,) * CONTEXT}, f"fills the target's context of {CONTEXT}"),
        ({"prompt": (1, VOCAB)}, f"prompt token id {VOCAB}"),
        ({"prompt": (-1,)}, "prompt token id -1"),
        ({"prediction": (3, 10**6)}, "prediction token id 1000000"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"max_new_tokens": None}, "max_new_tokens is None"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ({"stop": ("a", "")}, "stop string is empty"),
        ({"stop": (7,)}, "stop string 7 is int"),
        ({"stop_token_ids": (VOCAB,)}, f"stop_token_ids holds {VOCAB}"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids holds -1"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids holds 'a'"),
        ({"sampling": {"temperature": 1}}, "must be a Sampling"),
        ({"sampling": Sampling(logit_bias={VOCAB: 1.0})}, f"names token {VOCAB}"),
        ({"sampling": Sampling(logit_bias=dict.fromkeys(range(VOCAB), BAN))}, "bans every token"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(changes: dict[str, Any], match: str) -> None:
    good = Request((1, 2), GREEDY, 5)
    check_request(good, CONTEXT, VOCAB)
    check_request(dataclasses.replace(good, prompt=(1,) * CONTEXT, max_new_tokens=0), CONTEXT, VOCAB)
    with pytest.raises(RequestError, match=match):
        check_request(dataclasses.replace(good, **changes), CONTEXT, VOCAB)
