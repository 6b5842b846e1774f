"""Costs that must not creep in: recompilation, hidden transfers, copies of the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from cases import CASES
from loop_tools import (
    BATCH,
    CONTEXT,
    GREEDY,
    NO_EOS,
    WIDTH,
    decode,
    greedy_texts,
    prompts,
    start,
    tiny_target,
)

from eaglejax.drafts.autoregressive import Autoregressive
from eaglejax.speculate import rounds
from eaglejax.speculate.generate import BatchDecoder, DecodeOptions, Request


def test_one_program_for_every_acceptance_length_and_text() -> None:
    case, texts = CASES["mixed"], greedy_texts(prompts())
    decode(case.proposer, case.params(texts), prompts())
    programs = [rounds.jit_init_state, rounds.jit_prefill_chunk, rounds.jit_run_rounds]
    before = [p._cache_size() for p in programs]
    forwards = 0
    for turn in range(3):
        for eos in ((texts[0][9], 1000), (1000, 1001)):
            for limit in (3, CONTEXT):
                results = decode(
                    case.proposer,
                    case.params(texts, turn=turn),
                    prompts(),
                    eos=eos,
                    limits=[CONTEXT, limit, 1],
                )
                forwards += sum(r.stats.target_forwards for r in results)
    assert forwards >= 50
    assert [p._cache_size() for p in programs] == before


def test_rounds_touch_the_host_only_where_they_say_so() -> None:
    case = CASES["draft_model"]
    run = BatchDecoder(
        dataclasses.replace(tiny_target(), eos_ids=NO_EOS),
        case.proposer,
        case.params(greedy_texts(prompts()), turn=1),
        [Request(p, GREEDY, CONTEXT) for p in prompts()],
        options=DecodeOptions(rounds_a_chunk=4, prefill_width=WIDTH),
    )
    pieces = iter(run)
    next(pieces)  # the prompt's forward places settings and prompts on the device
    with jax.transfer_guard("disallow"):
        rest = list(pieces)
    assert len(rest) > BATCH
    assert sum(len(r.token_ids) for r in run.results()) == BATCH * CONTEXT - sum(map(len, prompts()))


@dataclasses.dataclass(frozen=True)
class Listening(Autoregressive):
    """Plain decoding that remembers what it is told."""

    heard: list[tuple[Request, list[int]]] = dataclasses.field(default_factory=list, compare=False)

    def learn(self, row: Request, tokens: Sequence[int]) -> None:
        self.heard.append((row, list(tokens)))


def test_a_proposer_hears_every_token_of_every_answer_once() -> None:
    proposer = Listening()
    results = decode(proposer, None, prompts(), limits=[11, 1, CONTEXT])
    assert len(proposer.heard) > BATCH
    for prompt, result in zip(prompts(), results, strict=True):
        heard = [t for row, tokens in proposer.heard if row.prompt == prompt for t in tokens]
        assert heard == result.token_ids


def test_the_caches_are_donated() -> None:
    case, target = CASES["draft_model"], tiny_target()
    program = rounds.Program(target.config, case.proposer)
    params = rounds.Params(target.params, case.params(greedy_texts(prompts()), turn=1))
    state = start(program, params)
    old = jax.tree.leaves((state.cache.layers, state.proposer.cache.layers))
    places = {x.unsafe_buffer_pointer() for x in old}
    state, _, _ = rounds.jit_run_rounds(program, params, state, jax.device_put(np.int32(2)), most=4)
    assert all(x.is_deleted() for x in old)
    # Rewritten in place rather than into new memory.
    new = jax.tree.leaves((state.cache.layers, state.proposer.cache.layers))
    assert {x.unsafe_buffer_pointer() for x in new} == places
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))
