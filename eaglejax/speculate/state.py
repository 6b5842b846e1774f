"""What a round is compiled for, what it runs on, what it changes, and what it gives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.devices import Attention
from eaglejax.drafts.base import Observation, Proposer, StateT
from eaglejax.kv_format import KVFormat
from eaglejax.models import decoder
from eaglejax.models.config import ModelConfig
from eaglejax.nn.attention import attention_by
from eaglejax.nn.cache import Cache, CacheScales
from eaglejax.sampling import RowSampling
from eaglejax.speculate import widths
from eaglejax.speculate.widths import MemoryT, Widest, WidthPolicy

UNREAD = 16
"""Tokens of a row that a proposer may leave unread while nothing is drafted."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What a round is compiled for.

    ``method``: "token" or "block" verification; see ``verify``. ``attention``: how attention is computed, the
    target's and the draft's (None: as the device's adapter chooses). ``widths``: numbers of nodes that a
    round may judge, root included (empty: all that are drafted); ``policy`` chooses among them. A round of
    width 1, where the menu has it, does not draft: see ``widths``. ``top_logprobs``: with ``logprobs``, how
    many of the likeliest tokens are told of at each place.
    """

    config: ModelConfig
    proposer: Proposer
    method: str = "token"
    logprobs: bool = False
    attention: Attention | None = None
    widths: tuple[int, ...] = ()
    policy: WidthPolicy = dataclasses.field(default_factory=Widest)
    top_logprobs: int = 0

    @property
    def menu(self) -> tuple[int, ...]:
        """The widths that this proposer's drafts can have, ascending."""
        return widths.menu(self.widths, self.proposer.nodes)

    @property
    def rests(self) -> bool:
        """Whether a round may choose not to draft."""
        return self.menu[0] == 1 < self.menu[-1]


P = ParamSpec("P")
R = TypeVar("R")


def as_compiled_for(stage: Callable[P, R]) -> Callable[P, R]:
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

    target: decoder.Params
    draft: Any = None


@pytree.dataclass
class DecodeState(Generic[StateT, MemoryT]):
    """Everything that a round changes; donated to it.

    ``cache``: the target's; ``proposer``: the proposer's own state; ``rows``: sampling settings, keys and
    token counts; ``root``, ``emitted``, ``budget`` [B] int32: last token, tokens emitted, most tokens a row
    may emit; ``done`` [B] bool; ``eos`` [E] int32: ids that end a row. ``policy``: what the width policy
    remembers. ``unread`` [B, UNREAD]: what rounds without a draft have committed since the proposer last
    looked (None where every round drafts).
    """

    cache: Cache
    proposer: StateT
    rows: RowSampling
    root: jax.Array
    emitted: jax.Array
    budget: jax.Array
    done: jax.Array
    eos: jax.Array
    policy: MemoryT
    unread: Observation | None


@pytree.dataclass
class Record:
    """What a round gave. All statistics come from these.

    ``tokens`` [B, D+1] int32, of which ``count`` [B] are real (0 for a row that was done); ``accepted`` [B]:
    drafts among them; ``drafted`` [B]: nodes proposed, root excluded; ``reach`` [B]: depth of the deepest
    proposed node; ``width`` [B]: nodes judged, root included, and ``rested`` [B] bool: that nothing was
    drafted, both the same for all rows; ``finite`` [B] bool: no
    token was lost to logits that are not finite, which end the row; ``logprobs`` [B, D+1] f32 or None:
    log-probability of each token under the target before any sampling transform. ``likeliest``: ids and
    log-probabilities [B, D+1, K] of the likeliest tokens at each place, in that order; None where K is 0.
    """

    tokens: jax.Array
    count: jax.Array
    accepted: jax.Array
    drafted: jax.Array
    reach: jax.Array
    width: jax.Array
    rested: jax.Array
    finite: jax.Array
    logprobs: jax.Array | None
    likeliest: tuple[jax.Array, jax.Array] | None


def init_state(
    program: Program,
    params: Params,
    rows: RowSampling,
    *,
    capacity: int,
    budget: jax.Array,
    eos: jax.Array,
    cache_dtype: KVFormat,
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
        policy=program.policy.init(program.menu),
        unread=_nothing_unread(program, params, batch) if program.rests else None,
    )


def _nothing_unread(program: Program, params: Params, batch: int) -> Observation:
    size, taps = (batch, UNREAD), program.proposer.needs.taps
    nothing, none = jnp.zeros(size, jnp.int32), jnp.zeros((batch,), jnp.int32)
    width, dtype = program.config.hidden_size, params.target["norm"].dtype
    features = jnp.zeros((*size, len(taps), width), dtype) if taps else None
    return Observation(nothing, nothing, none, none, features)
