"""Law 4: after every round the caches are what a computation from scratch gives for the committed text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_tools import (
    BATCH,
    CAPACITY,
    CASES,
    CONTEXT,
    GREEDY,
    NO_EOS,
    VOCAB,
    WIDTH,
    full_forward,
    greedy_texts,
    pad,
    prompts,
    split,
    tiny_target,
)

from eaglejax import sampling
from eaglejax.drafts.draft_model.proposer import DraftModelState
from eaglejax.drafts.prediction import PredictionState
from eaglejax.speculate import rounds


def start(program: rounds.Program, params: rounds.Params, inputs: Any = ()) -> rounds.DecodeState:
    """The state after the prompts, in the shapes that the other tests compile for."""
    rows = sampling.rows([GREEDY] * BATCH, VOCAB, prompts())
    lengths = np.asarray([len(p) for p in prompts()])
    state = rounds.jit_init_state(
        program,
        params,
        rows,
        capacity=CAPACITY,
        budget=jnp.asarray(CONTEXT - lengths, jnp.int32),
        eos=jnp.asarray(NO_EOS, jnp.int32),
        cache_dtype=np.dtype("float32"),
        inputs=inputs,
    )
    text = pad(prompts(), CONTEXT + 1)
    for begin in range(0, max(lengths), WIDTH):
        count = np.clip(lengths - begin, 0, WIDTH).astype(np.int32)
        state, _ = rounds.jit_prefill_chunk(
            program,
            params,
            state,
            jnp.asarray(text[:, begin : begin + WIDTH]),
            jnp.asarray(text[:, begin + 1 : begin + WIDTH + 1]),
            jnp.asarray(count),
            jnp.asarray((count > 0) & (lengths <= begin + WIDTH)),
        )
    return state


def assert_cache_is(cache: Any, lengths: np.ndarray, reference: Any) -> None:
    """Every committed slot of every layer, against a cache filled in one forward."""
    for cached, fresh in zip(jax.tree.leaves(cache.layers), jax.tree.leaves(reference.layers), strict=True):
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(cached[row, :, :length], fresh[row, :, :length], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_every_round_leaves_the_state_of_the_committed_text(name: str, turn: int) -> None:
    case, target, texts = CASES[name], tiny_target(), greedy_texts(prompts())
    program = rounds.Program(target.config, case.proposer)
    draft_weights, inputs = split(case.proposer, case.params(texts, turn=turn))
    params = rounds.Params(target.params, draft_weights)
    reference = full_forward(target.params, target.config, pad(texts))[1]
    state = start(program, params, inputs)
    lengths = np.asarray([len(p) for p in prompts()])
    for _ in range(6):
        assert np.asarray(state.cache.lengths).tolist() == lengths.tolist()
        assert_cache_is(state.cache, lengths, reference)
        roots = [text[length] for text, length in zip(texts, lengths, strict=True)]
        assert np.asarray(state.root).tolist() == roots
        if isinstance(state.proposer, DraftModelState):
            assert not state.proposer.ahead
            assert np.asarray(state.proposer.cache.lengths).tolist() == lengths.tolist()
            drafted = full_forward(draft_weights, case.proposer.config, pad(texts))[1]
            assert_cache_is(state.proposer.cache, lengths, drafted)
        if name in ("ngram", "prediction"):
            history = (
                state.proposer.history if isinstance(state.proposer, PredictionState) else state.proposer
            )
            for row, length in enumerate(lengths):
                assert np.asarray(history)[row, :length].tolist() == list(texts[row][:length])
        state, records, ran = rounds.jit_run_rounds(
            program, params, state, jax.device_put(np.int32(1)), most=4
        )
        assert int(ran) == 1
        lengths = lengths + np.asarray(records.count)[0]


@pytest.mark.parametrize("name", ["chain_1", "chain_3", "chain_5", "wide", "mixed"])
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_script_is_followed_to_the_letter(name: str, turn: int) -> None:
    case, target, texts = CASES[name], tiny_target(), greedy_texts(prompts())
    program = rounds.Program(target.config, case.proposer)
    script = case.params(texts, turn=turn)
    params = rounds.Params(target.params, script)
    state = start(program, params)
    depths = np.asarray(case.proposer.tree.depths)
    goal = depths[np.asarray(script.goal)]
    for turn_of_row in range(6):
        left = np.asarray(state.budget - state.emitted)
        state, records, _ = rounds.jit_run_rounds(program, params, state, jax.device_put(np.int32(1)), most=4)
        accepted = np.asarray(records.accepted)[0]
        assert accepted.tolist() == np.minimum(goal[:, turn_of_row], left).tolist()
        drafted = [(depths[1:] <= n).sum() for n in left]
        assert np.asarray(records.drafted)[0].tolist() == drafted


@pytest.mark.parametrize("name", ["chain_3", "draft_model", "mixed"])
def test_a_row_that_ends_inside_a_block_keeps_the_state_of_its_text(name: str) -> None:
    """Every draft is right, row 0 ends in the middle of its second round, and the others go on without it."""
    case, target, texts = CASES[name], tiny_target(), greedy_texts(prompts())
    program = rounds.Program(target.config, case.proposer)
    draft = case.params(texts, turn=0)
    if name != "draft_model":
        draft = case.proposer.script(pad(texts).tolist(), [case.proposer.depth])
    params = rounds.Params(target.params, draft)
    size = len(prompts()[0]) + 1 + (case.proposer.depth + 1) + 1
    state = start(program, params)
    state = state.replace(budget=state.budget.at[0].set(size - len(prompts()[0])))
    reference = full_forward(target.params, target.config, pad(texts))[1]
    for _ in range(4):
        state, _, _ = rounds.jit_run_rounds(program, params, state, jax.device_put(np.int32(1)), most=4)
    assert np.asarray(state.done).tolist() == [True, False, False]
    lengths = np.asarray(state.cache.lengths)
    assert lengths[0] == size - 1
    assert (lengths[1:] > [len(p) + 4 for p in prompts()[1:]]).all()
    assert int(state.root[0]) == texts[0][size - 1]
    assert_cache_is(state.cache, lengths, reference)
    if name == "draft_model":
        assert np.asarray(state.proposer.cache.lengths).tolist() == lengths.tolist()


def test_a_model_that_drafts_for_itself_is_always_accepted() -> None:
    case, target, texts = CASES["draft_model"], tiny_target(), greedy_texts(prompts())
    program = rounds.Program(target.config, case.proposer)
    params = rounds.Params(target.params, case.params(texts, turn=0))
    _, records, ran = rounds.jit_run_rounds(
        program, params, start(program, params), jax.device_put(np.int32(4)), most=4
    )
    assert int(ran) == 4
    assert (np.asarray(records.accepted) == case.proposer.length).all()
