"""Law 3 for requests that come and go: a request's tokens are the same alone, in any company, in any slot, at
any arrival and after any preemption; nothing is compiled once the engine is warm; a fault ends one row."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.monitoring
import numpy as np
import pytest
from cases import CASES
from loop_tools import (
    COLD,
    CONTEXT,
    GREEDY,
    HOT,
    VOCAB,
    WARM,
    WORDS,
    PieceTokenizer,
    decode,
    expected,
    greedy_texts,
    logits_of,
    pad,
    prompts,
    tiny_target,
)

from eaglejax.drafts.base import Bound, Request
from eaglejax.engine.engine import ENGINE, BusyError, Engine, Event
from eaglejax.engine.slots import next_width, prefill_widths
from eaglejax.errors import ConfigError, RequestError
from eaglejax.sampling import Sampling
from eaglejax.speculate.books import Generation

OPTIONS = dataclasses.replace(ENGINE, prefill_width=16, rounds_a_chunk=2)
TOLD = Sampling(temperature=1.2, logit_bias={3: 2.0, 5: float("-inf")}, seed=3)


def request(which: int, how: Sampling = GREEDY, limit: int = 20, **more: Any) -> Request:
    return Request(prompts()[which], how, limit, **more)


POOL = (
    request(0),
    request(2, HOT),
    request(1, COLD, 13),
    request(1, WARM, 29),
    request(2, TOLD, 9),
    request(0, HOT, 1),
    request(1, GREEDY, 500),
    request(0, dataclasses.replace(WARM, top_k=0, seed=11), 24, stop_token_ids=(7, 8)),
)
"""Every kind of row: their texts begin and end at different times."""


@functools.cache
def engine(name: str) -> Engine:
    """An engine of three slots that drafts as the conformance suite's case of that name; warm."""
    case = CASES[name]
    params = case.params([greedy_texts(prompts())[1]])
    made = Engine(
        dataclasses.replace(tiny_target(), tokenizer=PieceTokenizer(WORDS)),
        Bound(case.proposer, None if name == "prediction" else params),
        slots=3,
        top_logprobs=4,
        options=OPTIONS,
    )
    made.warm_up()
    return made


def finish(made: Engine, ids: Sequence[int]) -> list[Generation]:
    results: dict[int, Generation] = {}
    while not made.idle:
        results |= {e.id: e.result for e in made.step() if e.result is not None}
    return [results[i] for i in ids]


def one(made: Engine, asked: Request, **more: Any) -> Generation:
    return finish(made, [made.submit(asked, **more)])[0]


@functools.cache
def alone(name: str) -> list[list[int]]:
    """The tokens of every request of the pool, each alone in the engine."""
    return [one(engine(name), asked).token_ids for asked in POOL]


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of the programs that jax compiles meanwhile."""
    seen: list[str] = []
    live = [True]

    def count(event: str, _: float, **about: Any) -> None:
        if live and event == "/jax/core/compile/backend_compile_duration":
            seen.append(str(about))

    jax.monitoring.register_event_duration_secs_listener(count)
    yield seen
    live.clear()


SLOW = pytest.mark.slow
LAW = ["eagle3_tree", *(pytest.param(name, marks=SLOW) for name in ("ar", "ngram", "prediction"))]


@pytest.mark.parametrize("name", LAW)
def test_tokens_do_not_depend_on_company_slot_arrival_or_preemption(name: str) -> None:
    made, wanted = engine(name), alone(name)
    rng = np.random.default_rng(len(name))
    with compilations() as compiled:
        for _ in range(2):
            ids: dict[int, int] = {}
            results: dict[int, Generation] = {}
            left = [*range(len(POOL)), *rng.integers(0, len(POOL), 4).tolist()]
            rng.shuffle(left)
            while left or not made.idle:
                while left and rng.random() < 0.5:
                    which = left.pop()
                    logprobs = bool(rng.random() < 0.3)
                    asked = dataclasses.replace(POOL[which])
                    ids[made.submit(asked, priority=int(rng.integers(3)), logprobs=logprobs)] = which
                if rng.random() < 0.2:
                    # Somebody who soon loses interest.
                    made.cancel(made.submit(POOL[int(rng.integers(len(POOL)))]))
                for number in ids:
                    if rng.random() < 0.1:
                        made.preempt(number)
                results |= {e.id: e.result for e in made.step() if e.result is not None}
            for number, which in ids.items():
                assert results[number].error is None
                assert results[number].token_ids == wanted[which]
    assert not compiled
    assert made.totals.preemptions > 5
    for which, asked in enumerate(POOL):
        if asked.sampling == GREEDY:
            text = greedy_texts(prompts())[prompts().index(asked.prompt)]
            assert wanted[which] == expected(asked.prompt, text, asked.max_new_tokens, ())[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "eagle3_tree"])
def test_what_is_written_is_what_batches_write(name: str) -> None:
    """Sampled and penalised rows write what ``generate`` writes."""
    wanted = alone(name)
    case = CASES[name]
    starts, settings = [prompts()[2], prompts()[1], prompts()[1]], [HOT, COLD, WARM]
    params = case.params([greedy_texts(prompts())[1]])
    batch = decode(case.proposer, params, starts, samplings=settings, limits=29, logprobs=True)
    assert batch[0].token_ids[:20] == wanted[1]
    assert batch[1].token_ids[:13] == wanted[2]
    assert batch[2].token_ids == wanted[3]


def test_pieces_and_log_probabilities() -> None:
    made = engine("eagle3_tree")
    number = made.submit(request(1, HOT), top_logprobs=3)
    beside = made.submit(request(2))
    events: list[Event] = []
    while not made.idle:
        events += made.step()
    mine = [e for e in events if e.id == number]
    result = mine[-1].result
    assert result is not None
    assert "".join(e.text for e in mine) == result.text != ""
    assert [t for e in mine for t in e.token_ids] == result.token_ids == one(made, request(1, HOT)).token_ids
    assert len(mine) > 3
    assert next(e.result for e in events if e.id == beside and e.result).logprobs is None
    logits = logits_of(tiny_target(), pad([[*prompts()[1], *result.token_ids]]))[0].astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert result.logprobs is not None
    assert result.top_logprobs is not None
    assert len(result.top_logprobs) == len(result.token_ids)
    for n, (token, value, best) in enumerate(
        zip(result.token_ids, result.logprobs, result.top_logprobs, strict=True)
    ):
        here = logs[len(prompts()[1]) - 1 + n]
        assert value == pytest.approx(here[token], abs=1e-4)
        assert [i for i, _ in best] == np.argsort(-here)[:3].tolist()
        assert [v for _, v in best] == pytest.approx(np.sort(here)[::-1][:3], abs=1e-4)


def test_stop_strings_and_ends() -> None:
    made = engine("eagle3_tree")
    whole = one(made, request(0))
    stop = whole.text[5:8]
    cut = one(made, request(0, stop=(stop,)))
    assert (cut.text, cut.finish_reason) == (whole.text.partition(stop)[0], "stop")
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert one(made, request(0, limit=0)).token_ids == []
    long = one(made, request(1, limit=500))
    assert (len(long.token_ids), long.finish_reason) == (CONTEXT - len(prompts()[1]), "length")


@pytest.mark.slow
def test_predictions_are_followed_and_change_nothing() -> None:
    made, text = engine("prediction"), alone("prediction")[0]
    told = one(made, request(0, prediction=tuple(text)))
    assert told.token_ids == text
    assert told.stats.mean_acceptance_length > 3
    with pytest.raises(ConfigError, match="does not use them"):
        engine("ngram").submit(request(0, prediction=(1, 2)))


def test_priorities_deadlines_cancellation_and_the_queue() -> None:
    now = [0.0]
    made = Engine(tiny_target(), slots=1, queue=2, context=CONTEXT - 8, options=OPTIONS, clock=lambda: now[0])
    wanted = one(made, request(1)).token_ids
    low = made.submit(request(1))
    made.step()
    assert (made.running, made.waiting) == (1, 0)
    high = made.submit(request(0), priority=1)
    late = made.submit(request(2), deadline=5.0)
    with pytest.raises(BusyError, match="2 requests wait"):
        made.submit(request(2))
    ended = [e.id for e in made.step() if e.result]
    assert made.totals.preemptions == 1
    now[0] = 9.0
    results: dict[int, Generation] = {}
    while not made.idle:
        for e in made.step():
            if e.result is not None:
                ended.append(e.id)
                results[e.id] = e.result
    assert ended == [late, high, low]
    assert "deadline passed after 9.0 s" in (results[late].error or "")
    assert results[low].token_ids == wanted
    gone = made.submit(request(1))
    made.step()
    made.cancel(gone)
    made.cancel(gone)
    (event,) = made.step()
    assert event.result is not None
    assert event.result.finish_reason == "cancelled"
    assert event.result.token_ids == wanted[: len(event.result.token_ids)] != []
    for asked, match in (
        (Request((), GREEDY, 5), "empty"),
        (Request((1,) * CONTEXT, GREEDY, 5), "context is 40"),
        (Request((VOCAB,), GREEDY, 5), "vocabulary"),
        (request(0, stop=("x",)), "need a tokenizer"),
    ):
        with pytest.raises(RequestError, match=match):
            made.submit(asked)
    with pytest.raises(RequestError, match="gives up to 0"):
        made.submit(request(0), top_logprobs=1)
    with pytest.raises(ConfigError, match="slots is 0"):
        Engine(tiny_target(), slots=0)


@dataclasses.dataclass(frozen=True)
class Broken(PieceTokenizer):
    """Cannot decode token 5."""

    def decode(self, ids: Sequence[int]) -> str:
        if 5 in ids:
            raise RuntimeError("a damaged tokenizer")
        return super().decode(ids)


def test_a_fault_ends_its_own_row() -> None:
    """Here one whose text cannot be made."""
    made = engine("eagle3_tree")
    never = Sampling(logit_bias={5: float("-inf")}, seed=0)
    wanted = one(made, request(1, never)).token_ids
    whole, made.target = made.target, dataclasses.replace(made.target, tokenizer=Broken(WORDS))
    try:
        good = made.submit(request(1, never))
        made.step()
        text = made.submit(request(0, Sampling(logit_bias={5: 1e9}, seed=0)))
        results = finish(made, [good, text])
    finally:
        made.target = whole
    assert results[0].token_ids == wanted
    assert results[1].finish_reason == "error"
    assert "a damaged tokenizer" in (results[1].error or "")
    assert one(made, POOL[1]).token_ids == alone("eagle3_tree")[1]


def unable(*_: Any) -> None:
    raise RuntimeError("no memory\nat all")


def test_a_device_that_fails_costs_the_rows_that_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine("eagle3_tree")
    number = made.submit(request(0))
    with monkeypatch.context() as patched:
        patched.setattr(
            made._slots, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory\nat all"))
        )
        (result,) = finish(made, [number])
    assert result.error == "RuntimeError: no memory"
    assert one(made, POOL[1]).token_ids == alone("eagle3_tree")[1]


def test_prompts_are_read_in_few_widths() -> None:
    assert prefill_widths(256) == (16, 64, 256)
    assert prefill_widths(100) == (32, 128)
    assert [next_width(n, (16, 64, 256)) for n in (1, 16, 17, 40, 64, 100, 200, 900)] == [
        16, 16, 16, 64, 64, 64, 256, 256,
    ]  # fmt: skip
