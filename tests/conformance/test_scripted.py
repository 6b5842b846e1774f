"""The scripted proposers themselves: which nodes are right, which distributions they draw from, what they
refuse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from draft_tools import VOCAB, greedy_rows, propose
from loop_tools import greedy_texts, one_round, prompts, split, start, tiny_target
from scripted import FromTables, Scripted

from eaglejax import sampling
from eaglejax.drafts.tree import chain, from_choices
from eaglejax.errors import ConfigError, MismatchError
from eaglejax.sampling import Sampling
from eaglejax.speculate import rounds

TREE = from_choices([[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]])
TEXT = list(range(10, 30))


@pytest.mark.parametrize(("sibling", "path"), [("first", [0, 1, 3]), ("last", [0, 2, 6])])
def test_the_right_path_and_nothing_else(sibling: str, path: list[int]) -> None:
    proposer = Scripted(TREE, VOCAB)
    script = proposer.script([TEXT], [0, 1, 2], sibling)  # type: ignore[arg-type]
    inputs = proposer.inputs(script.requests(), 1)
    state = proposer.init(None, batch=1, capacity=32, inputs=inputs)
    for accepted in (0, 1, 2, 0):
        draft, state = propose(proposer, None, state, jnp.asarray([TEXT[5]]), jnp.asarray([5]))
        tokens = np.asarray(draft.tokens)[0]
        right = [TEXT[5 + d] for d in TREE.depths]
        assert np.flatnonzero(tokens == right).tolist() == path[: accepted + 1]
        # Siblings differ, as those of any proposer do.
        assert len({tokens[1], tokens[2]}) == len({tokens[3], tokens[4]}) == len({tokens[5], tokens[6]}) == 2


def test_alternating_siblings_and_a_script_a_row() -> None:
    proposer = Scripted(TREE, VOCAB)
    inputs = proposer.inputs(proposer.script([TEXT, TEXT], [[1, 1], [2, 0]], "alternate").requests(), 2)
    assert np.asarray(inputs.goal).tolist() == [[1, 2], [3, 0]]


def test_scripted_refuses() -> None:
    with pytest.raises(ConfigError, match="depths 0"):
        Scripted(TREE, VOCAB).script([TEXT], [3])
    with pytest.raises(ConfigError, match="2 siblings"):
        Scripted(TREE, 2)
    proposer = Scripted(TREE, VOCAB)
    inputs = proposer.inputs(proposer.script([TEXT], [1]).requests(), 1)
    with pytest.raises(MismatchError, match="1 rows"):
        proposer.init(None, batch=2, capacity=32, inputs=inputs)
    with pytest.raises(ConfigError, match="strictly increasing"):
        FromTables(TREE, ids=(3, 1))


@pytest.mark.parametrize("replacement", [False, True])
def test_siblings_are_drawn_as_declared(replacement: bool) -> None:
    table = jnp.log(jnp.asarray([[0.6, 0.3, 0.1]]))
    trials = 20_000
    rows = sampling.rows([Sampling(temperature=1.0, seed=0)], VOCAB)
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), trials)
    rows = jax.tree.map(lambda x: jnp.repeat(x, trials, axis=0), rows).replace(keys=keys)
    proposer = FromTables(from_choices([[0], [1]]), ids=(4, 7, 9), replacement=replacement)
    root = jnp.zeros((trials,), jnp.int32)
    draft, _ = jax.jit(proposer.propose)(table, (), root, root, rows, keys)
    first, second = np.asarray(draft.tokens)[:, 1:].T
    seen = np.asarray([[np.mean((first == a) & (second == b)) for b in (4, 7, 9)] for a in (4, 7, 9)])
    q = np.asarray([0.6, 0.3, 0.1])
    off = np.where(np.eye(3), 0, q) / (1 - q[:, None])
    wanted = q[:, None] * (q[None] if replacement else off)
    assert np.abs(seen - wanted).max() < 5 * np.sqrt(0.25 / trials)
    np.testing.assert_allclose(draft.proposal.q[0, 0], q, atol=1e-6)
    assert np.asarray(draft.proposal.ids).tolist() == [4, 7, 9]


def test_siblings_beyond_the_support_are_not_valid() -> None:
    table = jnp.asarray([[0.0, -jnp.inf, 1.0]])
    proposer = FromTables(from_choices([[0], [1], [2], [2, 0]]))
    draft, _ = propose(proposer, table, (), jnp.asarray([5]), jnp.asarray([0]))
    assert np.asarray(draft.valid)[0].tolist() == [True, True, True, False, False]
    assert np.asarray(draft.tokens)[0, 1:3].tolist() == [2, 0]
    assert draft.proposal.q is None
    assert greedy_rows(1).sampled is False
    assert FromTables(chain(2)).chain


@pytest.mark.parametrize(
    "name",
    ["mixed", *(pytest.param(n, marks=pytest.mark.slow) for n in ("chain_1", "chain_3", "chain_5", "wide"))],
)
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_script_is_followed_to_the_letter(name: str, turn: int) -> None:
    """A39: the rounds accept what they are told to, whichever siblings it leads through."""
    case, target, texts = CASES[name], tiny_target(), greedy_texts(prompts())
    program = rounds.Program(target.config, case.proposer)
    weights, inputs = split(case.proposer, case.params(texts, turn=turn))
    params = rounds.Params(target.params, weights)
    state = start(program, params, inputs=inputs)
    depths = np.asarray(case.proposer.tree.depths)
    goal = depths[np.asarray(inputs.goal)]
    for turn_of_row in range(6):
        left = np.asarray(state.budget - state.emitted)
        state, record = one_round(program, params, state)
        assert record.accepted.tolist() == np.minimum(goal[:, turn_of_row], left).tolist()
        assert record.drafted.tolist() == [(depths[1:] <= n).sum() for n in left]
