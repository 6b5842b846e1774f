"""Law 4: after every round the state is what a computation from scratch gives for the committed text, and
the next round cannot tell the two apart. Greedy, penalised and sampled rows; every proposer, every kind of
target."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case, every, nothing
from loop_tools import (
    BATCH,
    CAPACITY,
    COLD,
    CONTEXT,
    GREEDY,
    HOT,
    empty_state,
    greedy_texts,
    prefill,
    prompts,
    split,
    start,
)

from eaglejax.drafts.base import Draft, Proposal
from eaglejax.nn import kv_codec
from eaglejax.nn.cache import Cache
from eaglejax.nn.kv_codec import PackedKV
from eaglejax.speculate import rounds

SETTINGS = (GREEDY, COLD, HOT)


def is_packed(x: Any) -> bool:
    return isinstance(x, PackedKV)


def committed(state: Any) -> Any:
    """``state`` with zeros behind what each of its caches holds, which may be less than a row has tokens."""

    def cut(cache: Any) -> Any:
        if not isinstance(cache, Cache):
            return cache
        lengths = np.asarray(cache.lengths)

        def zeroed(x: Any) -> Any:
            slots = () if is_packed(x) else [axis for axis, n in enumerate(x.shape) if axis and n >= CAPACITY]
            if not slots:
                return x
            x = np.array(x)
            for row, length in enumerate(lengths):
                np.moveaxis(x[row], slots[0] - 1, 0)[length:] = 0
            return x

        return dataclasses.replace(cache, layers=jax.tree.map(zeroed, cache.layers, is_leaf=is_packed))

    return jax.tree.map(cut, state, is_leaf=lambda x: isinstance(x, Cache))


def assert_same(got: Any, want: Any, lengths: Sequence[int], *, exact: bool, rows_too: bool = True) -> None:
    """Every array of one state against the other: slots up to each row's length; arrays without slots as
    they are, where ``rows_too`` is set. A narrow format's number may be the neighbour where rounding
    decides, which few show."""
    both = (jax.tree_util.tree_flatten_with_path(committed(x), is_leaf=is_packed)[0] for x in (got, want))
    pairs = zip(*both, strict=True)
    for (path, a), (_, b) in pairs:
        name, loose = jax.tree_util.keystr(path), not exact
        if is_packed(a):
            a, b, loose = kv_codec.decode(a), kv_codec.decode(b), True
        a, b = np.asarray(a), np.asarray(b)
        slots = [axis for axis, size in enumerate(a.shape) if axis and size >= CAPACITY]
        if not slots and not rows_too:
            continue
        for row, length in enumerate(lengths):
            x, y = a[row], b[row]
            if slots:
                x, y = (np.moveaxis(z, slots[0] - 1, 0)[:length] for z in (x, y))
            x, y = x.astype(np.float64), y.astype(np.float64)
            if loose:
                assert np.isclose(x, y, rtol=2e-2, atol=2e-3).mean() > 0.98, name
                assert np.linalg.norm(x - y) <= 0.03 * np.linalg.norm(y), name
            else:
                np.testing.assert_allclose(x, y, rtol=2e-4, atol=3e-5, err_msg=name)


@functools.partial(jax.jit, static_argnums=0)
def step(program: rounds.Program, params: rounds.Params, state: rounds.DecodeState) -> tuple[Any, Any, Draft]:
    """A round, by its halves where all of a draft is judged, and what was drafted; nothing is donated."""
    draft, memory = rounds.propose(program, params, rounds.catch_up(program, params, state))
    if program.widths:
        return *rounds.decode_round(program, params, state), draft
    return *rounds.judge(program, params, dataclasses.replace(state, proposer=memory), draft), draft


catch_up = jax.jit(rounds.catch_up, static_argnums=0)


def best(draft: Draft, inside: np.ndarray, width: int) -> np.ndarray:
    """Which nodes [N] bool of one row's draft are the ``width`` best of those ``inside`` [N]."""
    number = np.arange(len(inside))
    score = np.where(number == 0, 2.0, np.where(inside, draft.cut_score, -1.0))
    kept = np.lexsort((number, -score))[:width]
    return inside & np.isin(number, kept)


def scored(draft: Draft) -> Draft:
    """The draft's nodes alone, each with a score."""
    score = jnp.ones(draft.tokens.shape) if draft.cut_score is None else draft.cut_score
    return dataclasses.replace(draft, proposal=Proposal(), cut_score=score)


def longest(draft: Draft, judged: np.ndarray, after: Sequence[int]) -> int:
    """Drafts on the longest path of one row's ``judged`` [N] nodes that say what comes ``after`` the root."""
    right = [True] + [False] * (len(judged) - 1)
    for i in range(1, len(judged)):
        if judged[i] and right[draft.parent[i]] and draft.depth[i] <= len(after):
            right[i] = draft.tokens[i] == after[draft.depth[i] - 1]
    return int(draft.depth[right].max())


def check_draft(draft: Draft, case: Case) -> None:
    """What the protocol asks of every tree, and of the distribution that it was drawn from."""
    tokens, parent, depth, valid = (
        np.asarray(x) for x in (draft.tokens, draft.parent, draft.depth, draft.valid)
    )
    vocab = case.target.config.vocab_size
    assert tokens.shape == (BATCH, case.proposer.nodes)
    assert draft.max_depth == case.proposer.depth
    assert draft.chain == case.proposer.chain
    assert ((tokens >= 0) & (tokens < vocab)).all()
    assert valid[:, 0].all()
    proposal = draft.proposal
    q = None if proposal.q is None else np.asarray(proposal.q)
    for b in range(BATCH):
        for i in range(1, tokens.shape[1]):
            above = parent[b, i]
            assert above < i
            assert depth[b, i] == depth[b, above] + 1 <= draft.max_depth
            assert not draft.chain or above == i - 1
            if not valid[b, i]:
                continue
            assert valid[b, above], "an orphan"
            mates = [j for j in range(1, i) if parent[b, j] == above and valid[b, j]]
            assert proposal.replacement or tokens[b, i] not in tokens[b, mates]
            if q is not None and SETTINGS[b].temperature > 0:
                ids = np.arange(vocab) if proposal.ids is None else np.asarray(proposal.ids)
                np.testing.assert_allclose(q[b, above].sum(), 1, atol=1e-5)
                assert q[b, above][ids == tokens[b, i]] > 0, "a token of no probability"


def recomputed(
    case: Case,
    program: rounds.Program,
    params: rounds.Params,
    state: Any,
    texts: Sequence[Sequence[int]],
    inputs: Any,
) -> Any:
    """``state`` with caches and the proposer's memory from a prefill of the committed ``texts``, whose last
    tokens are the roots."""
    fresh = empty_state(program, params, case.target, SETTINGS, prompts(), [CONTEXT] * BATCH, inputs=inputs)
    fresh, _ = prefill(program, params, fresh, texts, [len(t) - 1 for t in texts], emit=False)
    return dataclasses.replace(state, cache=fresh.cache, proposer=fresh.proposer)


@every("state")
def test_every_round_leaves_the_state_of_the_committed_text(case: Case) -> None:
    """In the second turn row 0 ends in the middle of a block, keeps its state, and disturbs nobody."""
    target, depth = case.target, case.proposer.depth
    program = case.program(logprobs=True)
    known = [greedy_texts(prompts(), case.layers, s)[b] for b, s in enumerate((GREEDY, COLD, GREEDY))]
    sizes = [len(p) for p in prompts()]
    accepted, widths = set(), set()
    for turn in range(2):
        weights, inputs = split(case.proposer, case.params(known, turn=turn))
        params = rounds.Params(target.params, weights)
        budget = [CONTEXT - n for n in sizes]
        if turn:
            budget[0] = depth + 3
        state = start(program, params, target, SETTINGS, budget, inputs)
        texts = [[*p, int(root)] for p, root in zip(prompts(), state.root, strict=True)]
        for _ in range(14):
            lengths = [len(t) - 1 for t in texts]
            assert np.asarray(state.cache.lengths).tolist() == lengths
            assert np.asarray(state.root).tolist() == [t[-1] for t in texts]
            emitted = [
                np.bincount(t[n:], minlength=target.config.vocab_size)
                for t, n in zip(texts, sizes, strict=True)
            ]
            np.testing.assert_array_equal(state.rows.counts, emitted)
            # What rounds without a draft have left unread is read first.
            whole = catch_up(program, params, state)
            again = recomputed(case, program, params, whole, texts, inputs)
            assert_same(state.cache, again.cache, lengths, exact=case.layers.exact)
            assert_same(
                whole.proposer,
                again.proposer,
                lengths,
                exact=case.layers.exact,
                rows_too=case.committed,
            )
            if not case.committed:
                again = dataclasses.replace(again, proposer=whole.proposer)
            left = np.asarray(state.budget - state.emitted)
            done = np.asarray(state.done)
            _, other_record, _ = step(program, params, again)
            state, record, draft = step(program, params, state)
            if case.layers.exact:
                np.testing.assert_allclose(record.logprobs, other_record.logprobs, rtol=1e-3, atol=1e-4)
                for name in ("tokens", "count", "accepted", "drafted", "reach", "finite"):
                    np.testing.assert_array_equal(getattr(record, name), getattr(other_record, name))
            check_draft(draft, case)
            count = np.asarray(record.count)
            for row in range(BATCH):
                if done[row]:
                    assert count[row] == 0
                    continue
                texts[row] += np.asarray(record.tokens)[row, : count[row]].tolist()
                took = int(record.accepted[row])
                accepted.add(took)
                assert took <= count[row] <= took + 1
                own = jax.tree.map(lambda x, row=row: np.asarray(x[row]), scored(draft))
                judged = best(own, own.valid & (own.depth <= left[row]), int(record.width[row]))
                assert record.drafted[row] == judged.sum() - 1
                widths.add(int(record.width[row]))
                if SETTINGS[row].temperature == 0:
                    # The longest path of right guesses, not a node more or less.
                    whole = known[row][len(prompts()[row]) :]
                    assert texts[row][sizes[row] :] == list(whole[: len(texts[row]) - sizes[row]])
                    at = lengths[row] + 1
                    assert took == longest(own, judged, known[row][at : at + left[row]])
    # Nobody helps a proposer that is given nothing; ``test_greedy`` shows that its drafts get accepted.
    assert case.weights is nothing or len(accepted) > 1
    assert len(widths) > (len(program.menu) > 1)
