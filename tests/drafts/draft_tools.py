"""What the tests of proposers without weights share: rows, observations, and a loop played against a known
text."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import sampling
from eaglejax.drafts.base import Draft, Observation, Request
from eaglejax.sampling import RowSampling, Sampling

VOCAB = 64


@functools.cache
def greedy_rows(batch: int) -> RowSampling:
    """Rows of temperature 0."""
    return sampling.rows([Sampling(seed=0)] * batch, VOCAB)


def observation(tokens: Any, start: Any, count: Any) -> Observation:
    """An observation of ``tokens`` [B, M]; the proposers tested here never read what follows them."""
    tokens = jnp.asarray(tokens, jnp.int32)
    return Observation(
        tokens=tokens,
        following=tokens,
        start=jnp.asarray(start, jnp.int32),
        count=jnp.asarray(count, jnp.int32),
    )


def propose(proposer: Any, params: Any, state: Any, root: jax.Array, lengths: jax.Array) -> tuple[Draft, Any]:
    """A proposal for greedy rows."""
    return _propose(proposer, params, state, root, lengths, greedy_rows(root.shape[0]))


@functools.partial(jax.jit, static_argnums=0)
def _propose(
    proposer: Any, params: Any, state: Any, root: jax.Array, lengths: jax.Array, rows: RowSampling
) -> tuple[Draft, Any]:
    return proposer.propose(params, state, root, lengths, rows, rows.keys)


def pad(rows: list[list[int]], width: int) -> np.ndarray:
    """[B, width] int32, zeros behind each row."""
    out = np.zeros((len(rows), width), np.int32)
    for row, text in enumerate(rows):
        out[row, : len(text)] = text
    return out


def guesses(draft: Draft, row: int) -> list[int]:
    """The valid drafts of a row's chain; fails when they are not a prefix of it."""
    valid = np.asarray(draft.valid[row])
    count = int(valid.sum())
    assert valid[:count].all()
    return [int(t) for t in np.asarray(draft.tokens[row])[1:count]]


def predicting(predictions: list[list[int] | None]) -> list[Request]:
    """Requests that bring these along."""
    return [Request((0,), Sampling(), 1, (), None if p is None else tuple(p)) for p in predictions]


def first_proposal(
    proposer: Any, params: Any, texts: list[list[int]], capacity: int, inputs: Any = ()
) -> Draft:
    """What is proposed after each of ``texts`` (the last token is the root)."""
    batch = len(texts)
    tokens = pad(texts, capacity)
    last = np.asarray([len(t) - 1 for t in texts], np.int32)
    state = proposer.init(params, batch=batch, capacity=capacity, inputs=inputs)
    state = proposer.observe(params, state, observation(tokens, np.zeros(batch), last))
    root = jnp.asarray(tokens[np.arange(batch), last])
    return propose(proposer, params, state, root, jnp.asarray(last))[0]


def play(
    proposer: Any, prompt: list[int], answer: list[int], capacity: int, inputs: Any = ()
) -> list[list[int]]:
    """The drafts of each round of a single row that is going to write ``answer``, greedily verified."""
    text = prompt + answer
    params = None
    state = proposer.init(params, batch=1, capacity=capacity, inputs=inputs)
    state = proposer.observe(params, state, observation(pad([prompt], capacity), [0], [len(prompt)]))
    at, rounds = len(prompt), []
    while at < len(text) - 1:
        draft, state = propose(proposer, params, state, jnp.asarray([text[at]]), jnp.asarray([at]))
        chain = guesses(draft, 0)
        rounds.append(chain)
        accepted = 0
        while (
            accepted < len(chain)
            and at + 1 + accepted < len(text)
            and chain[accepted] == text[at + 1 + accepted]
        ):
            accepted += 1
        count = min(accepted + 1, len(text) - 1 - at)
        seen = pad([text[at : at + count]], proposer.nodes)
        state = proposer.observe(params, state, observation(seen, [at], [count]))
        at += count
    return rounds
