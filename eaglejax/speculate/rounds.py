"""One round of speculative decoding, and the loop of rounds.

    root -> propose a tree -> one target forward over it -> verify -> commit -> emit -> observe

The root is the last emitted token; it is not in the cache yet and sits at position ``cache.lengths``. A
round that accepts ``a`` drafts commits ``a + 1`` tokens (the root and the drafts) and emits ``a + 1`` (the
drafts and the new root), so it always moves on. Without guesses (N = 1) the same round is plain
autoregressive decoding, which is why both share one sampler, one stop rule and one distribution.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import sampling
from eaglejax.drafts.base import Draft, Observation, StateT
from eaglejax.drafts.tree import ancestors
from eaglejax.errors import EaglejaxError
from eaglejax.models import decoder
from eaglejax.nn.visible import Causal, Tree
from eaglejax.sampling import Purpose
from eaglejax.speculate import widths
from eaglejax.speculate.branches import Branch, run_if, run_one
from eaglejax.speculate.state import DecodeState, Params, Program, Record, as_compiled_for, init_state
from eaglejax.speculate.verify import verify
from eaglejax.speculate.widths import MemoryT
from eaglejax.tap import scope, tap


def _keep(state: DecodeState, tokens: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cut ``tokens`` [B, M] at an end-of-text id and at the budget: (tokens kept [B], row ended [B])."""
    steps = jnp.arange(tokens.shape[1])
    ends = (tokens[:, :, None] == state.eos).any(-1) & (steps < count[:, None])
    through_end = jnp.where(ends.any(1), jnp.argmax(ends, axis=1) + 1, tokens.shape[1])
    left = state.budget - state.emitted
    kept = jnp.where(state.done, 0, jnp.minimum(jnp.minimum(count, through_end), left))
    ended = state.done | (ends & (steps < kept[:, None])).any(1) | (kept >= left)
    return kept, ended


def _told(program: Program, logits: jax.Array, tokens: jax.Array) -> dict[str, Any]:
    """``logprobs`` and ``likeliest`` of a Record: of ``tokens`` [B, M] under ``logits`` [B, M, V], before any
    transform."""
    if not program.logprobs:
        return {"logprobs": None, "likeliest": None}
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, :, None], axis=2)[:, :, 0]
    best = None
    if program.top_logprobs:
        values, ids = jax.lax.top_k(logits, min(program.top_logprobs, logits.shape[-1]))
        best = (ids, values - total[:, :, None])
    return {"logprobs": chosen - total, "likeliest": best}


def _tap_fields(where: str, of: Any, *fields: str) -> None:
    """Tap some fields of a dataclass by their names."""
    with scope(where):
        for field in fields:
            tap(field, getattr(of, field))


def _has_distribution(logits: jax.Array, processed: jax.Array) -> jax.Array:
    """Where [B, M] ``logits`` [B, M, V] and what bias and penalties made of them have a finite peak: NaN and
    +inf have no distribution, and neither have tokens that are all banned."""
    return jnp.isfinite(logits.max(-1)) & jnp.isfinite(processed.max(-1))


@as_compiled_for
def prefill_chunk(
    program: Program,
    params: Params,
    state: DecodeState,
    tokens: jax.Array,
    following: jax.Array,
    count: jax.Array,
    last: jax.Array,
) -> tuple[DecodeState, Record]:
    """Take in the next ``count[b]`` prompt tokens of each row; ``last[b]`` says that the prompt ends here.

    ``tokens``, ``following`` [B, C] int32: the chunk and, for each of its tokens, the next prompt token. A
    row whose prompt ends emits its first token, drawn as in any round. Chunks are right-padded; no token sees
    padding, which stays uncommitted. A row with a prompt token that the target cannot compute ends.
    """
    config, needs = program.config, program.proposer.needs
    lengths = state.cache.lengths
    steps = jnp.arange(tokens.shape[1])
    real = steps < count[:, None]
    end = jnp.maximum(count - 1, 0)
    with scope("target"):
        out = decoder.forward(
            params.target, config, tokens, lengths[:, None] + steps, state.cache, Causal(), aux=needs.taps
        )
        logits = decoder.unembed(
            params.target, config, jnp.take_along_axis(out.hidden, end[:, None, None], axis=1)
        )
    processed = sampling.process(logits, state.rows)
    keys = sampling.fold(sampling.round_keys(state.rows, lengths + end), Purpose.BONUS)
    first = sampling.greedy(processed)[:, 0]
    if state.rows.sampled:
        drawn = sampling.draw(sampling.distribution(processed, state.rows)[:, 0], keys)
        first = jnp.where(state.rows.temperature > 0, drawn, first)

    kept, ended = _keep(state, first[:, None], last.astype(jnp.int32))
    following = jnp.where((steps == end[:, None]) & last[:, None], first[:, None], following)
    seen = Observation(
        tokens=tokens,
        following=following,
        start=lengths,
        count=count,
        features=out.aux,
    )
    # The cache holds zeros for a token whose keys were not finite, so that no later chunk would notice.
    computed = (jnp.isfinite(out.hidden).all(-1) | ~real).all(1)
    finite = computed & (_has_distribution(logits, processed)[:, 0] | (kept == 0))
    kept = jnp.where(finite, kept, 0)
    record = Record(
        tokens=first[:, None],
        count=kept,
        accepted=jnp.zeros_like(kept),
        drafted=jnp.zeros_like(kept),
        reach=jnp.zeros_like(kept),
        width=jnp.ones_like(kept),
        rested=jnp.ones_like(finite),
        finite=finite,
        **_told(program, logits, first[:, None]),
    )
    _tap_fields("verify", record, "tokens", "count")
    state = dataclasses.replace(
        observe(program, params, state, seen),
        cache=out.cache.advance(count),
        rows=sampling.count_tokens(state.rows, first[:, None], kept),
        root=jnp.where(kept > 0, first, state.root),
        emitted=state.emitted + kept,
        done=jnp.where(last, ended, state.done) | ~finite,
    )
    return state, record


@as_compiled_for
def decode_round(program: Program, params: Params, state: DecodeState) -> tuple[DecodeState, Record]:
    """Propose, verify and commit once for every row that is not done."""
    if not program.rests:
        return _draft(program, params, state)
    drafts = program.policy.drafts(state.policy, program.menu)
    branches = [functools.partial(kind, program, params) for kind in (_rest, _draft)]
    return run_one(drafts.astype(jnp.int32), branches, state)


def _draft(program: Program, params: Params, state: DecodeState) -> tuple[DecodeState, Record]:
    """A round that drafts, at the width that the policy chooses."""
    state = catch_up(program, params, state)
    draft, memory = propose(program, params, state)
    state = dataclasses.replace(state, proposer=memory)
    menu = program.menu
    if len(menu) == 1 and menu[0] == draft.tokens.shape[1]:
        return judge(program, params, state, draft)

    draft = _emittable(state, draft)
    order, scores = widths.rank(draft)
    scores = jnp.where(state.done[:, None], 0.0, scores)
    depths = jnp.take_along_axis(draft.depth, order, axis=1)
    drawn = draft.proposal.q is not None
    level = widths.decide(program.policy, state.policy, menu, scores, depths, drawn=drawn)

    def at(width: int) -> Branch:
        def run(state: DecodeState) -> tuple[DecodeState, tuple[Record, Observation, jax.Array]]:
            pruned, kept = widths.prune(draft, width, order)
            state, record, seen, path = _verify(program, params, state, pruned)
            path = jnp.take_along_axis(kept, path, axis=1)
            return state, _widen((record, seen, path), draft.max_depth + 1)

        return run

    state, (record, seen, path) = run_one(level, [at(width) for width in menu], state)
    real = jnp.take_along_axis(draft.valid, order, axis=1) & (record.drafted > 0)[:, None]
    place = jnp.arange(order.shape[1])
    on_path = (path[:, 1:, None] == order[:, None, :]) & (
        jnp.arange(path.shape[1] - 1)[:, None] < record.accepted[:, None, None]
    )
    real = real & (place > 0) & (place < record.width[:, None])
    judged = widths.Judged(jnp.bool_(True), record.width[0], scores, depths, real, on_path.any(axis=1))
    memory = program.policy.update(state.policy, menu, judged)
    return observe(program, params, dataclasses.replace(state, policy=memory), seen), record


def _rest(program: Program, params: Params, state: DecodeState) -> tuple[DecodeState, Record]:
    """A round that does not draft; what it commits is left unread until a round drafts or no room is left."""
    state, record, seen, _ = _verify(program, params, state, widths.lone(state.root))
    unread = state.unread
    assert unread is not None
    row, last = jnp.arange(state.root.shape[0]), unread.tokens.shape[1]
    slot = jnp.where(seen.count > 0, unread.count, last)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[row, slot].set(new[:, 0], mode="drop")

    unread = Observation(
        tokens=put(unread.tokens, seen.tokens),
        following=put(unread.following, seen.following),
        start=jnp.where(unread.count > 0, unread.start, seen.start),
        count=unread.count + seen.count,
        features=jax.tree.map(put, unread.features, seen.features),
    )
    size = (state.root.shape[0], program.proposer.nodes)
    none, zeros = jnp.zeros(size, bool), jnp.zeros(size, jnp.int32)
    scores = jnp.zeros(size).at[:, 0].set(seen.count > 0)
    judged = widths.Judged(jnp.bool_(False), jnp.int32(1), scores, zeros, none, none)
    memory = program.policy.update(state.policy, program.menu, judged)
    state = dataclasses.replace(state, unread=unread, policy=memory)
    state = run_if((unread.count == last).any(), functools.partial(_read, program, params), state)
    record = dataclasses.replace(record, rested=jnp.ones_like(record.rested))
    return state, _widen(record, program.proposer.depth + 1)


@as_compiled_for
def catch_up(program: Program, params: Params, state: DecodeState) -> DecodeState:
    """Let the proposer read what rounds without a draft have committed."""
    if state.unread is None:
        return state

    return run_if((state.unread.count > 0).any(), functools.partial(_read, program, params), state)


def _read(program: Program, params: Params, state: DecodeState) -> DecodeState:
    unread = state.unread
    assert unread is not None
    read = dataclasses.replace(unread, count=jnp.zeros_like(unread.count))
    return dataclasses.replace(observe(program, params, state, unread), unread=read)


def observe(program: Program, params: Params, state: DecodeState, seen: Observation) -> DecodeState:
    """Let the proposer see what was committed."""
    with scope("draft/observe"):
        memory = program.proposer.observe(params.draft, state.proposer, seen)
    return dataclasses.replace(state, proposer=memory)


def _widen(tree: Any, depth: int) -> Any:
    """Records and the like of a narrow draft, their second axis padded to ``depth``."""

    def wider(x: jax.Array) -> jax.Array:
        missing = depth - x.shape[1] if x.ndim > 1 else 0
        return jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)]) if missing else x

    return jax.tree.map(wider, tree)


@as_compiled_for
def propose(program: Program, params: Params, state: DecodeState[StateT, MemoryT]) -> tuple[Draft, StateT]:
    """What the proposer guesses next, and the proposer's state after that."""
    lengths, rows = state.cache.lengths, state.rows
    keys = sampling.fold(sampling.round_keys(rows, lengths), Purpose.DRAFT)
    with scope("draft"):
        draft, memory = program.proposer.propose(
            params.draft, state.proposer, state.root, lengths, rows, keys
        )
    if draft.proposal.q is not None and not program.proposer.draws:
        raise EaglejaxError(
            f"{type(program.proposer).__name__} hands on the distribution that its drafts were drawn from, "
            "but its `draws` is False; a proposer that draws must say so"
        )
    return draft, memory


@as_compiled_for
def judge(program: Program, params: Params, state: DecodeState, draft: Draft) -> tuple[DecodeState, Record]:
    """Verify ``draft``, whoever made it, and commit what is accepted; the proposer observes that.

    The draft's shape is its own: it need not be the proposer's. Its node 0 holds ``state.root``.
    """
    state, record, seen, _ = _verify(program, params, state, draft)
    return observe(program, params, state, seen), record


def _emittable(state: DecodeState, draft: Draft) -> Draft:
    """A draft that could not be emitted is no draft: it would sit past the context's end and count in no
    metric."""
    left = jnp.where(state.done, 0, state.budget - state.emitted)
    root_only = jnp.arange(draft.tokens.shape[1]) == 0
    return dataclasses.replace(draft, valid=draft.valid & (draft.depth <= left[:, None]) | root_only)


def _verify(
    program: Program, params: Params, state: DecodeState, draft: Draft
) -> tuple[DecodeState, Record, Observation, jax.Array]:
    """``judge`` before the proposer's observation, which comes with the path [B, D+1] of nodes."""
    config, proposer = program.config, program.proposer
    lengths, rows = state.cache.lengths, state.rows
    draft = _emittable(state, draft)
    _tap_fields("draft/tree", draft, "tokens", "parent", "depth", "valid", "cut_score")

    seen_by = ancestors(draft.parent, draft.valid, draft.max_depth)
    positions = lengths[:, None] + draft.depth
    with scope("target"):
        out = decoder.forward(
            params.target,
            config,
            draft.tokens,
            positions,
            state.cache,
            Tree(seen_by),
            aux=proposer.needs.taps,
        )
        logits = decoder.unembed(params.target, config, out.hidden)
    processed = sampling.process(logits, rows, draft.tokens, seen_by)
    verdict = verify(processed, draft, rows, lengths, method=program.method)
    _tap_fields("verify", verdict, "path", "accepted")

    path, accepted = verdict.path, verdict.accepted
    on_path = jnp.take_along_axis(draft.tokens, path, axis=1)
    steps = jnp.arange(path.shape[1])
    tokens = jnp.where(steps < accepted[:, None], jnp.roll(on_path, -1, axis=1), verdict.next_token[:, None])
    kept, ended = _keep(state, tokens, accepted + 1)
    # Only nodes that yield a kept token count: a refused draft may be one that the target cannot compute. The
    # tokens before a node that has no distribution are the text's last.
    sound = jnp.take_along_axis(_has_distribution(logits, processed), path, axis=1)
    computed = jnp.cumprod(sound, axis=1).sum(1)
    finite = computed >= kept
    kept = jnp.minimum(kept, computed)

    def at_path(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, path.reshape(*path.shape, *[1] * (x.ndim - 2)), axis=1)

    seen = Observation(
        tokens=on_path,
        following=tokens,
        start=lengths,
        count=kept,
        features=None if out.aux is None else at_path(out.aux),
    )
    record = Record(
        tokens=tokens,
        count=kept,
        accepted=jnp.minimum(accepted, kept),
        drafted=jnp.where(state.done, 0, draft.valid.sum(1) - 1),
        reach=jnp.where(draft.valid, draft.depth, 0).max(1),
        width=jnp.full_like(kept, draft.tokens.shape[1]),
        rested=jnp.zeros_like(finite),
        finite=finite,
        **_told(program, at_path(logits) if program.logprobs else logits, tokens),
    )
    _tap_fields("verify", record, "tokens", "count")
    newest = jnp.take_along_axis(tokens, jnp.maximum(kept - 1, 0)[:, None], axis=1)[:, 0]
    state = dataclasses.replace(
        state,
        # Rows keep as many cached tokens as they emitted, so that the cache is the committed text but its
        # last token even where an end cuts the path; a row that was done moves by none.
        cache=out.cache.commit(None if draft.chain else path, kept),
        rows=sampling.count_tokens(rows, tokens, kept),
        root=jnp.where(kept > 0, newest, state.root),
        emitted=state.emitted + kept,
        done=ended | ~finite,
    )
    return state, record, seen, path


def run_rounds(
    program: Program, params: Params, state: DecodeState, limit: jax.Array, *, most: int
) -> tuple[DecodeState, Record, jax.Array]:
    """Rounds until every row is done, ``limit`` (a traced int, at most the static ``most``) at the most.

    Returns the state, the records stacked [most, ...] and how many of them are real.
    """
    blank = jax.eval_shape(functools.partial(decode_round, program), params, state)[1]
    records = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), blank)

    def body(carry: tuple[jax.Array, DecodeState, Record]) -> tuple[jax.Array, DecodeState, Record]:
        i, state, records = carry
        state, record = decode_round(program, params, state)
        return i + 1, state, jax.tree.map(lambda all_, one: all_.at[i].set(one), records, record)

    def more(carry: tuple[jax.Array, DecodeState, Record]) -> jax.Array:
        i, state, _ = carry
        return (i < jnp.minimum(limit, most)) & ~state.done.all()

    done, state, records = jax.lax.while_loop(more, body, (jnp.int32(0), state, records))
    return state, records, done


jit_init_state = jax.jit(init_state, static_argnames=("program", "capacity", "cache_dtype"))
jit_prefill_chunk = jax.jit(prefill_chunk, static_argnames=("program",), donate_argnames=("state",))
jit_run_rounds = jax.jit(run_rounds, static_argnames=("program", "most"), donate_argnames=("state",))
