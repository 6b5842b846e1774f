"""One round of speculative decoding, and the loop of rounds.

    root -> propose a tree -> one target forward over it -> verify -> commit -> emit -> observe

The root is the last emitted token; it is not in the cache yet and sits at position ``cache.lengths``. A
round that accepts ``a`` drafts commits ``a + 1`` tokens (the root and the drafts) and emits ``a + 1`` (the
drafts and the new root), so it always moves on. Without guesses (N = 1) the same round is plain
autoregressive decoding, which is why both share one sampler, one stop rule and one law.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from eaglejax import pytree, sampling
from eaglejax.devices import Attention
from eaglejax.drafts.base import Draft, Observation, Proposer
from eaglejax.drafts.tree import ancestors
from eaglejax.models import decoder
from eaglejax.models.config import ModelConfig
from eaglejax.nn.attention import attention_by
from eaglejax.nn.cache import Cache, CacheScales
from eaglejax.nn.visible import Causal, Tree
from eaglejax.sampling import Purpose, RowSampling
from eaglejax.speculate.verify import verify
from eaglejax.tap import scope, tap


@dataclasses.dataclass(frozen=True)
class Program:
    """What a round is compiled for. ``method``: "token" or "block" verification; see ``verify``.
    ``attention``: how attention is computed, the target's and the draft's (None: as the device's adapter
    chooses)."""

    config: ModelConfig
    proposer: Proposer
    method: str = "token"
    logprobs: bool = False
    attention: Attention | None = None


P = ParamSpec("P")
R = TypeVar("R")


def _as_compiled_for(stage: Callable[P, R]) -> Callable[P, R]:
    """``stage`` with the choices of its first argument, a Program, in force."""

    @functools.wraps(stage)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        program = args[0] if args else kwargs["program"]
        assert isinstance(program, Program)
        with attention_by(program.attention):
            return stage(*args, **kwargs)

    return run


@pytree.dataclass
class Params:
    """Weights of the target and of the proposer (None where it has none)."""

    target: Any
    draft: Any = None


@pytree.dataclass
class DecodeState:
    """Everything that a round changes; donated to it.

    ``cache``: the target's; ``proposer``: the proposer's own state; ``rows``: sampling settings, keys and
    token counts; ``root``, ``emitted``, ``budget`` [B] int32: last token, tokens emitted, most tokens a row
    may emit; ``done`` [B] bool; ``eos`` [E] int32: ids that end a row.
    """

    cache: Cache
    proposer: Any
    rows: RowSampling
    root: jax.Array
    emitted: jax.Array
    budget: jax.Array
    done: jax.Array
    eos: jax.Array


@pytree.dataclass
class Record:
    """What a round gave. All statistics come from these.

    ``tokens`` [B, D+1] int32, of which ``count`` [B] are real (0 for a row that was done); ``accepted`` [B]:
    drafts among them; ``drafted`` [B]: nodes proposed, root excluded; ``reach`` [B]: depth of the deepest
    proposed node; ``finite`` [B] bool: no token was lost to logits that are not finite, which end the row;
    ``logprobs`` [B, D+1] f32 or None: log-probability of each token under the target before any sampling
    transform.
    """

    tokens: jax.Array
    count: jax.Array
    accepted: jax.Array
    drafted: jax.Array
    reach: jax.Array
    finite: jax.Array
    logprobs: jax.Array | None


def init_state(
    program: Program,
    params: Params,
    rows: RowSampling,
    *,
    capacity: int,
    budget: jax.Array,
    eos: jax.Array,
    cache_dtype: Any,
    cache_scales: CacheScales | None = None,
    inputs: Any = (),
) -> DecodeState:
    """An empty state; a row with ``budget`` 0 is done from the start. ``cache_dtype``, ``cache_scales``:
    format and scales of the target's cache, see ``decoder.init_cache``. ``inputs``: ``Proposer.inputs`` of
    the rows."""
    batch = budget.shape[0]
    zeros = jnp.zeros((batch,), jnp.int32)
    return DecodeState(
        cache=decoder.init_cache(program.config, batch, capacity, cache_dtype, cache_scales),
        proposer=program.proposer.init(params.draft, batch=batch, capacity=capacity, inputs=inputs),
        rows=rows,
        root=zeros,
        emitted=zeros,
        budget=budget,
        done=budget <= 0,
        eos=eos,
    )


def _keep(state: DecodeState, tokens: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cut ``tokens`` [B, M] at an end-of-text id and at the budget: (tokens kept [B], row ended [B])."""
    steps = jnp.arange(tokens.shape[1])
    ends = (tokens[:, :, None] == state.eos).any(-1) & (steps < count[:, None])
    through_end = jnp.where(ends.any(1), jnp.argmax(ends, axis=1) + 1, tokens.shape[1])
    left = state.budget - state.emitted
    kept = jnp.where(state.done, 0, jnp.minimum(jnp.minimum(count, through_end), left))
    ended = state.done | (ends & (steps < kept[:, None])).any(1) | (kept >= left)
    return kept, ended


def _token_logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """log p of ``tokens`` [B, M] under ``logits`` [B, M, V], before any transform."""
    chosen = jnp.take_along_axis(logits, tokens[:, :, None], axis=2)[:, :, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _tap_fields(where: str, of: Any, *fields: str) -> None:
    """Tap some fields of a dataclass by their names."""
    with scope(where):
        for field in fields:
            tap(field, getattr(of, field))


def _has_law(logits: jax.Array, processed: jax.Array) -> jax.Array:
    """Where [B, M] ``logits`` [B, M, V] and what bias and penalties made of them have a finite peak: NaN and
    +inf have no law, and neither have tokens that are all banned."""
    return jnp.isfinite(logits.max(-1)) & jnp.isfinite(processed.max(-1))


@_as_compiled_for
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
        drawn = sampling.draw(sampling.law(processed, state.rows)[:, 0], keys)
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
    finite = computed & (_has_law(logits, processed)[:, 0] | (kept == 0))
    kept = jnp.where(finite, kept, 0)
    record = Record(
        tokens=first[:, None],
        count=kept,
        accepted=jnp.zeros_like(kept),
        drafted=jnp.zeros_like(kept),
        reach=jnp.zeros_like(kept),
        finite=finite,
        logprobs=_token_logprobs(logits, first[:, None]) if program.logprobs else None,
    )
    _tap_fields("verify", record, "tokens", "count")
    with scope("draft/observe"):
        proposer_state = program.proposer.observe(params.draft, state.proposer, seen)
    state = dataclasses.replace(
        state,
        cache=out.cache.advance(count),
        proposer=proposer_state,
        rows=sampling.count_tokens(state.rows, first[:, None], kept),
        root=jnp.where(kept > 0, first, state.root),
        emitted=state.emitted + kept,
        done=jnp.where(last, ended, state.done) | ~finite,
    )
    return state, record


def decode_round(program: Program, params: Params, state: DecodeState) -> tuple[DecodeState, Record]:
    """Propose, verify and commit once for every row that is not done."""
    draft, memory = propose(program, params, state)
    return judge(program, params, dataclasses.replace(state, proposer=memory), draft)


@_as_compiled_for
def propose(program: Program, params: Params, state: DecodeState) -> tuple[Draft, Any]:
    """What the proposer guesses next, and the proposer's state after that."""
    lengths, rows = state.cache.lengths, state.rows
    keys = sampling.fold(sampling.round_keys(rows, lengths), Purpose.DRAFT)
    with scope("draft"):
        return program.proposer.propose(params.draft, state.proposer, state.root, lengths, rows, keys)


@_as_compiled_for
def judge(program: Program, params: Params, state: DecodeState, draft: Draft) -> tuple[DecodeState, Record]:
    """Verify ``draft``, whoever made it, and commit what is accepted; the proposer observes that.

    The draft's shape is its own: it need not be the proposer's. Its node 0 holds ``state.root``.
    """
    config, proposer = program.config, program.proposer
    lengths, rows = state.cache.lengths, state.rows
    keys = sampling.round_keys(rows, lengths)
    # A draft that could not be emitted is no draft: it would sit past the context's end and count in no
    # metric.
    left = jnp.where(state.done, 0, state.budget - state.emitted)
    root_only = jnp.arange(draft.tokens.shape[1]) == 0
    draft = dataclasses.replace(draft, valid=draft.valid & (draft.depth <= left[:, None]) | root_only)
    _tap_fields("draft/tree", draft, "tokens", "parent", "depth", "valid", "confidence")

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
    verdict = verify(processed, draft, rows, keys, method=program.method)
    _tap_fields("verify", verdict, "path", "accepted")

    path, accepted = verdict.path, verdict.accepted
    on_path = jnp.take_along_axis(draft.tokens, path, axis=1)
    steps = jnp.arange(path.shape[1])
    tokens = jnp.where(steps < accepted[:, None], jnp.roll(on_path, -1, axis=1), verdict.next_token[:, None])
    kept, ended = _keep(state, tokens, accepted + 1)
    # Only nodes that yield a kept token count: a refused draft may be one that the target cannot compute. The
    # tokens before a node that has no law are the text's last.
    sound = jnp.take_along_axis(_has_law(logits, processed), path, axis=1)
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
        finite=finite,
        logprobs=_token_logprobs(at_path(logits), tokens) if program.logprobs else None,
    )
    _tap_fields("verify", record, "tokens", "count")
    with scope("draft/observe"):
        memory = proposer.observe(params.draft, state.proposer, seen)
    newest = jnp.take_along_axis(tokens, jnp.maximum(kept - 1, 0)[:, None], axis=1)[:, 0]
    state = dataclasses.replace(
        state,
        # Rows keep as many cached tokens as they emitted, so that the cache is the committed text but its
        # last token even where an end cuts the path; a row that was done moves by none.
        cache=out.cache.commit(None if draft.chain else path, kept),
        proposer=memory,
        rows=sampling.count_tokens(rows, tokens, kept),
        root=jnp.where(kept > 0, newest, state.root),
        emitted=state.emitted + kept,
        done=ended | ~finite,
    )
    return state, record


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
