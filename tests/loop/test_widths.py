"""Widths, what the conformance suite leaves out: long rests, what is compiled, what is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from cases import CASES
from loop_tools import (
    CONTEXT,
    GREEDY,
    empty_state,
    full_forward,
    greedy_texts,
    pad,
    prompts,
    start,
    tiny_target,
)
from width_tools import Turns

from eaglejax.errors import ConfigError
from eaglejax.speculate import rounds
from eaglejax.speculate.options import DecodeOptions
from eaglejax.speculate.state import UNREAD

OPTIMISED = True


def test_what_was_left_unread_is_caught_up_with() -> None:
    """A draft model that rests for more rounds than may be left unread, and drafts then."""
    case, target, texts = CASES["draft_model"], tiny_target(), greedy_texts(prompts())
    rest = UNREAD + 3
    program = rounds.Program(target.config, case.proposer, widths=(1, 2, 3), policy=Turns(rest=rest))
    params = rounds.Params(target.params, case.params(texts))
    reference = full_forward(target.params, target.config, pad(texts))[1]
    state = start(program, params)
    catch_up = jax.jit(rounds.catch_up, static_argnums=0)
    seen = []
    for turn in range(rest + 2):
        state, records, _ = rounds.jit_run_rounds(program, params, state, jax.device_put(np.int32(1)), most=4)
        seen.append(int(records.width[0, 0]))
        lengths, read = np.asarray(state.cache.lengths), np.asarray(state.proposer.cache.lengths)
        left = min(turn + 1, rest) % UNREAD if turn < rest else 0
        assert (lengths - read).tolist() == [left] * len(lengths)
        if turn in (4, rest - 1, rest + 1):
            whole = catch_up(program, params, state)
            assert np.asarray(whole.proposer.cache.lengths).tolist() == lengths.tolist()
            for cached, fresh in zip(
                jax.tree.leaves(whole.proposer.cache.layers), jax.tree.leaves(reference.layers), strict=True
            ):
                for row, length in enumerate(lengths):
                    np.testing.assert_allclose(
                        cached[row, :, :length], fresh[row, :, :length], rtol=2e-4, atol=2e-5
                    )
    assert seen == [1] * rest + [3, 2]


def test_a_chosen_width_moves_no_cache() -> None:
    """XLA copies what a conditional rewrites; the loops in its place leave every cache where it is."""
    case, target = CASES["draft_model"], tiny_target()
    program = rounds.Program(target.config, case.proposer, widths=(1, 2, 3), policy=Turns())
    params = rounds.Params(target.params, case.params(greedy_texts(prompts())))
    budget = [CONTEXT] * len(prompts())
    state = empty_state(program, params, target, (GREEDY,) * len(budget), prompts(), budget)
    text = rounds.jit_run_rounds.lower(program, params, state, np.int32(1), most=4).compile().as_text()
    shape = "[{},{},{},{}]".format(*jax.tree.leaves(state.cache)[0].shape)
    caches = [line for line in text.splitlines() if shape in line]
    assert len(caches) > 20
    assert not [line for line in caches if " copy(" in line]


@pytest.mark.parametrize("menu", [(0, 4), (True,), (2.5,)])
def test_widths_that_count_nothing_are_refused(menu: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="widths are"):
        DecodeOptions(widths=menu)
