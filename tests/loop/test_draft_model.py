"""The draft model's chain and distributions against an uncached forward; odd vocabularies; NaN."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from loop_tools import (
    CAPACITY,
    VOCAB,
    full_forward,
    greedy_texts,
    lively,
    one_round,
    pad,
    prompts,
    start,
    tiny_config,
    tiny_target,
)

from eaglejax import sampling
from eaglejax.drafts.base import Draft, Observation
from eaglejax.drafts.draft_model.proposer import DraftModel
from eaglejax.errors import ConfigError
from eaglejax.sampling import RowSampling, Sampling
from eaglejax.speculate import rounds

K = 3
HOT = Sampling(temperature=0.8, top_p=0.95, frequency_penalty=0.9, presence_penalty=0.3, seed=3)
WARM = Sampling(temperature=1.4, seed=4)
GREEDY = Sampling(frequency_penalty=1.5, seed=5)
ROOTS = (3, 17, 29)
CONFIG = tiny_config()


@functools.partial(jax.jit, static_argnums=0)
def draft(
    proposer: DraftModel, params: Any, seen: Observation, root: jax.Array, rows: RowSampling
) -> tuple[Draft, Any]:
    """Prefill in one chunk, then propose."""
    state = proposer.init(params, batch=root.shape[0], capacity=CAPACITY)
    state = proposer.observe(params, state, seen)
    return proposer.propose(params, state, root, seen.count, rows, rows.keys)


def proposal(proposer: DraftModel, params: Any, settings: list[Sampling], vocab: int) -> Draft:
    tokens = jnp.asarray(pad(prompts(), 20))
    count = jnp.asarray([len(p) for p in prompts()], jnp.int32)
    seen = Observation(tokens=tokens, following=tokens, start=jnp.zeros_like(count), count=count)
    rows = sampling.rows(settings, vocab, prompts())
    rows = sampling.count_tokens(rows, jnp.asarray(ROOTS)[:, None], jnp.ones((3,), jnp.int32))
    return draft(proposer, params, seen, jnp.asarray(ROOTS, jnp.int32), rows)[0]


def drafted(result: Draft) -> list[list[int]]:
    return np.asarray(result.tokens).tolist()


def draft_probs(config: Any, params: Any, chains: list[list[int]], row: int, how: Sampling) -> np.ndarray:
    """[K, V]: the distribution of each draft of a row from one forward over its text, penalties counted by
    hand."""
    text = [*prompts()[row], *chains[row]]
    logits = np.array(full_forward(params, config, pad([text], 24))[0][0], np.float64)
    out = []
    for n in range(K):
        z = logits[len(prompts()[row]) + n]
        for token in set(chains[row][: n + 1]):
            z[token] -= how.presence_penalty + how.frequency_penalty * chains[row][: n + 1].count(token)
        if how.temperature == 0:
            out.append(np.eye(len(z))[z.argmax()])
            continue
        p = np.exp(z / how.temperature - (z / how.temperature).max())
        p /= p.sum()
        order = np.argsort(-p)
        p[order[np.cumsum(p[order]) - p[order] >= how.top_p]] = 0
        out.append(p / p.sum())
    return np.asarray(out)


def test_mixed_rows_carry_the_distributions_they_were_drawn_from() -> None:
    params, settings = lively(CONFIG, 2), [HOT, GREEDY, WARM]
    result = proposal(DraftModel(CONFIG, K), params, settings, VOCAB)
    chains = drafted(result)
    assert np.asarray(result.valid).all()
    assert result.chain
    q = np.asarray(result.proposal.q)
    assert q.shape == (3, K + 1, VOCAB)
    for row, how in enumerate(settings):
        np.testing.assert_allclose(q[row, :K], draft_probs(CONFIG, params, chains, row, how), atol=2e-5)
        assert (q[row, np.arange(K), chains[row][1:]] > 0).all()
    assert (q[:, K] == 0).all()
    assert set(np.unique(q[1])) == {0.0, 1.0}


def test_greedy_batches_carry_no_distribution() -> None:
    params = lively(CONFIG, 2)
    result = proposal(DraftModel(CONFIG, K), params, [GREEDY] * 3, VOCAB)
    assert result.proposal.q is None
    chains = drafted(result)
    for row in range(3):
        assert draft_probs(CONFIG, params, chains, row, GREEDY).argmax(-1).tolist() == chains[row][1:]


@pytest.mark.parametrize("target_vocab", [VOCAB - 2, VOCAB + 5])
def test_tables_of_another_size(target_vocab: int) -> None:
    """Surplus ids are never drafted and carry no mass; the rest keeps its proportions."""
    params = lively(CONFIG, 2)
    wide = np.asarray(proposal(DraftModel(CONFIG, K), params, [WARM] * 3, VOCAB).proposal.q)[:, 0]
    result = proposal(DraftModel(CONFIG, K, target_vocab), params, [WARM] * 3, target_vocab)
    q = np.asarray(result.proposal.q)
    assert q.shape == (3, K + 1, target_vocab)
    common = min(target_vocab, VOCAB)
    kept = wide[:, :common] / wide[:, :common].sum(-1, keepdims=True)
    np.testing.assert_allclose(q[:, 0, :common], kept, atol=1e-5)
    assert (q[..., common:] == 0).all()
    assert np.asarray(result.tokens).max() < common


def test_nan_weights_cost_the_draft_and_nothing_else() -> None:
    params = lively(CONFIG, 2)
    params["norm"] = params["norm"].at[0].set(jnp.nan)
    result = proposal(DraftModel(CONFIG, K), params, [HOT, GREEDY, WARM], VOCAB)
    assert np.asarray(result.valid).tolist() == [[True] + [False] * K] * 3
    assert np.asarray(result.tokens).tolist() == [[r] * (K + 1) for r in ROOTS]
    assert (np.asarray(result.proposal.q) == 0).all()


@pytest.mark.parametrize("settings", [{"length": 0}, {"length": 2.5}, {"vocab_size": 0}])
def test_refuses(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="DraftModel"):
        DraftModel(CONFIG, **settings)


def test_a_model_that_drafts_for_itself_is_always_accepted() -> None:
    case, target = CASES["draft_model"], tiny_target()
    program = rounds.Program(target.config, case.proposer)
    params = rounds.Params(target.params, case.params(greedy_texts(prompts()), turn=0))
    state = start(program, params)
    for _ in range(4):
        state, record = one_round(program, params, state)
        assert (record.accepted == case.proposer.length).all()
