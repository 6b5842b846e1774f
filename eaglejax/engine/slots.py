"""The device half of an engine: a batch whose rows join and leave between chunks of rounds.

Every shape is fixed when the engine is made. A row that joins is read alone, in chunks of a few widths, and
then put into its slot whole: its caches, its proposer's memory, its sampling. What a row needs of the
sampling transform decides which of three programs runs, from greedy rows alone to penalties and
log-probabilities; none of them changes another row's tokens. What the caches are made of is known to
``nn.cache`` alone, which gives and takes rows by ``insert``.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import sampling
from eaglejax.drafts.base import Bound, Request
from eaglejax.drafts.limits import MOST_PREDICTED
from eaglejax.errors import RequestError
from eaglejax.models.target import Target
from eaglejax.nn.cache import put_row
from eaglejax.sampling import RowSampling, Sampling
from eaglejax.speculate import rounds
from eaglejax.speculate.adaptive import Adaptive
from eaglejax.speculate.admission import check_room
from eaglejax.speculate.costs import Kind
from eaglejax.speculate.options import DecodeOptions, cache_form, capacity_for, power_of_two
from eaglejax.speculate.pace import Pace
from eaglejax.speculate.state import UNREAD, DecodeState, Params, Program, Record

SMALLEST_PREFILL = 16
"""Fewest tokens of a prompt that are read at a time, padding included."""

GREEDY, SAMPLED, WHOLE = range(3)
"""What the rows of a batch need: nothing; draws and filters; bias, penalties and log-probabilities too."""


def level_of(settings: Sampling, *, logprobs: bool) -> int:
    """The least of the three that serves a row."""
    if settings.logit_bias or settings.penalised or logprobs:
        return WHOLE
    return SAMPLED if settings.temperature > 0 else GREEDY


def prefill_widths(largest: int) -> tuple[int, ...]:
    """The sizes of prompt chunks, ascending: a power of two that holds ``largest``, and quarters of it."""
    widths = [power_of_two(largest, 1)]
    while widths[0] // 4 >= SMALLEST_PREFILL:
        widths.insert(0, widths[0] // 4)
    return tuple(widths)


def next_width(left: int, widths: Sequence[int]) -> int:
    """Which of ``widths`` to read of ``left`` tokens: the smallest that holds them all, unless less than half
    of it would be text; then the largest that they fill."""
    holds = next((w for w in widths if w >= left), None)
    filled = max((w for w in widths if w <= left), default=None)
    if holds is not None and (filled is None or 2 * left >= holds):
        return holds
    assert filled is not None
    return filled


@dataclasses.dataclass
class Staged:
    """A row that is read alone. ``text``: what its caches shall hold, and behind it the token that follows
    where that is known (``known``: the row goes on with an answer that was begun); ``at``: tokens read."""

    state: DecodeState
    text: np.ndarray
    size: int
    known: bool
    at: int = 0


class Slots:
    """``slots`` rows of up to ``context`` tokens; see the module's text.

    ``top_logprobs``: how many of the likeliest tokens are told of where log-probabilities are asked for.
    ``widths``: sizes of prompt chunks; ``pace``: the measured costs, where widths are chosen by such.
    Raises ConfigError for what memory has no room for.
    """

    def __init__(
        self,
        target: Target,
        bound: Bound,
        *,
        slots: int,
        context: int,
        options: DecodeOptions,
        top_logprobs: int,
    ) -> None:
        proposer = bound.proposer
        self.slots, self._context = slots, context
        self._vocab_size = target.config.vocab_size
        self._most = options.rounds_a_chunk
        self._eos = frozenset() if options.ignore_eos else frozenset(target.eos_ids)
        # Rows that sample may come at any time, and what is drawn must not follow how many mates there are.
        choices = options.choices(proposer, sampled=True)
        plain = Program(target.config, proposer, options.verification, False, options.attention, *choices)
        whole = dataclasses.replace(plain, logprobs=True, top_logprobs=top_logprobs)
        self.programs = (plain, plain, whole)
        self.params = Params(target.params, bound.params)
        self.widths = prefill_widths(min(options.prefill_width, power_of_two(context, SMALLEST_PREFILL)))
        self._form = cache_form(target, options)
        unread = UNREAD if plain.rests else 0
        self._capacity = capacity_for(
            (context, self.widths[-1]), (context, proposer.nodes), (context, max(proposer.depth + 1, unread))
        )
        guess = (0,) * min(context, MOST_PREDICTED) if proposer.reads_predictions else None
        widest = proposer.inputs([Request((0,), Sampling(), 1, prediction=guess)], 1)
        self._shapes = jax.tree.map(lambda x: x.shape[1:], widest, is_leaf=lambda x: x is None)
        check_room(
            target,
            proposer,
            bound.params,
            batch=slots + 1,
            slots=self._capacity,
            prefill=self.widths[-1],
            cache=self._form[0],
            attention=options.attention,
            inputs=self._inputs((), slots + 1),
        )
        self.pace: Pace | None = None
        if isinstance(plain.policy, Adaptive) and len(plain.menu) > 1:
            size = (slots, self._capacity, self._form[0].name)
            self.pace = Pace(Kind(plain, self.params, *size, self._most, context, self._inputs((), slots)))
            self.pace.begin(lambda: _at_level(self._empty(slots, budget=1), GREEDY))
        self.reset()

    def reset(self) -> None:
        """All slots are empty."""
        state = self._empty(self.slots, budget=0)
        self._state = state if self.pace is None else self.pace.informed(state)

    def stage(self, request: Request, budget: int, answer: Sequence[int]) -> Staged:
        """Begin to read ``request`` and what has been answered so far, perhaps nothing, alone.

        ``budget``: most tokens of the whole answer. Raises RequestError for a prediction that is too long.
        """
        state = self._empty(1, budget=budget, request=request)
        text = np.asarray([*request.prompt, *answer], np.int32)
        size = len(text) - (1 if answer else 0)
        if answer:
            counts = np.bincount(answer, minlength=self._vocab_size)[None].astype(np.int32)
            state = dataclasses.replace(
                state,
                root=jax.device_put(text[-1:]),
                emitted=jax.device_put(np.asarray([len(answer)], np.int32)),
                rows=dataclasses.replace(state.rows, counts=jax.device_put(counts)),
            )
        return Staged(state, text, size, bool(answer))

    def read(self, staged: Staged) -> tuple[int, Record, bool]:
        """Read one more chunk: how wide it was, what it gave, whether the row has ended. When ``staged.at``
        comes to ``staged.size``, the row may join."""
        width = next_width(staged.size - staged.at, self.widths)
        count = min(width, staged.size - staged.at)
        tokens = np.zeros((2, 1, width), np.int32)
        for which, begin in enumerate((staged.at, staged.at + 1)):
            part = staged.text[begin : begin + count]
            tokens[which, 0, : len(part)] = part
        staged.at += count
        last = staged.at == staged.size and not staged.known
        staged.state, record = rounds.jit_prefill_chunk(
            self.programs[WHOLE],
            self.params,
            staged.state,
            *jax.device_put((*tokens, np.asarray([count], np.int32), np.asarray([last]))),
        )
        record, done = jax.device_get((record, staged.state.done))
        return width, record, bool(done[0])

    def join(self, slot: int, staged: Staged) -> None:
        """Row ``slot`` becomes what was read alone."""
        self._state = _join(self._state, jax.device_put(np.int32(slot)), staged.state)

    def run(self, level: int, most: int) -> tuple[Record, int, np.ndarray]:
        """A chunk of up to ``most`` rounds by the program of ``level``: records [rounds, slots, ...], how
        many rounds there were, and which rows have ended [slots]."""
        begin = time.perf_counter()
        state, records, ran = jax.block_until_ready(
            rounds.jit_run_rounds(
                self.programs[level],
                self.params,
                _at_level(self._state, level),
                jax.device_put(np.int32(most)),
                most=self._most,
            )
        )
        seconds = time.perf_counter() - begin
        self._state = _at_level(state, WHOLE)
        records, ran, done = jax.device_get((records, ran, state.done))
        if self.pace is not None:
            self.pace.count(records, int(ran), seconds)
        return records, int(ran), done

    def halt(self, done: np.ndarray) -> None:
        """Rows [slots] that do not move from now on."""
        self._state = dataclasses.replace(self._state, done=jax.device_put(done))

    def warm_up(self) -> None:
        """Compile all that the rows to come run. No slot may be in use."""
        staged = self.stage(Request((0,), Sampling(seed=0), 1), 0, ())
        for width in self.widths:
            staged.at, staged.size, staged.text = 0, width, np.zeros(width, np.int32)
            self.read(staged)
        self.join(0, staged)
        for level in (GREEDY, SAMPLED, WHOLE):
            self.halt(np.ones(self.slots, bool))
            self.run(level, 1)
        # Rows that go on bring a few arrays of their own.
        staged = self.stage(Request((0,), Sampling(seed=0), 1), 0, (0,))
        self.read(staged)
        self.join(0, staged)
        self.reset()

    def close(self) -> None:
        """Keep what was learnt of costs for engines to come."""
        if self.pace is not None:
            self.pace.settle(self._state.policy, lambda: _at_level(self._empty(self.slots, budget=1), GREEDY))

    def _inputs(self, requests: Sequence[Request], batch: int) -> Any:
        """What requests bring along, at the one width that programs are compiled for."""
        return jax.tree.map(_padded, self.programs[0].proposer.inputs(requests, batch), self._shapes)

    def _empty(self, batch: int, *, budget: int, request: Request | None = None) -> DecodeState:
        """``batch`` rows before any token, the first of them that of ``request``."""
        one = [] if request is None else [request]
        settings = [r.sampling for r in one] or [Sampling(seed=0)] * batch
        prompts = [r.prompt for r in one] or [()] * batch
        cache_dtype, cache_scales = self._form
        return rounds.jit_init_state(
            self.programs[WHOLE],
            self.params,
            sampling.rows(settings, self._vocab_size, prompts, whole=True),
            capacity=self._capacity,
            budget=jax.device_put(np.full(batch, budget, np.int32)),
            eos=jax.device_put(np.asarray(sorted(self._eos), np.int32)),
            cache_dtype=cache_dtype,
            cache_scales=cache_scales,
            inputs=self._inputs(one, batch),
        )


def _padded(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``x`` [B, ...] with zeros behind, up to [B, *shape]. Raises RequestError where it is larger."""
    missing = [want - have for want, have in zip(shape, x.shape[1:], strict=True)]
    if min(missing, default=0) < 0:
        raise RequestError(
            f"what the request brings along has {x.shape[1:]} entries; at most {shape} are read"
        )
    return jax.device_put(np.pad(np.asarray(x), [(0, 0), *((0, n) for n in missing)]))


def _at_level(state: DecodeState, level: int) -> DecodeState:
    """``state`` as the program of ``level`` takes it; no array changes."""
    draws, whole = level >= SAMPLED, level == WHOLE
    rows = dataclasses.replace(state.rows, sampled=draws, filtered=draws, penalised=whole, biased=whole)
    return dataclasses.replace(state, rows=rows)


@functools.partial(jax.jit, donate_argnums=(0,))
def _join(state: DecodeState, slot: jax.Array, one: DecodeState) -> DecodeState:
    """Row ``slot`` [] int32 of ``state`` becomes the only row of ``one``; what belongs to no row stays."""

    def put(own: jax.Array, other: jax.Array) -> jax.Array:
        return put_row(own, slot, other, jnp.int32(0))

    def put_keys(rows: RowSampling, other: RowSampling) -> RowSampling:
        data = put(jax.random.key_data(rows.keys), jax.random.key_data(other.keys))
        bare = [dataclasses.replace(r, keys=jnp.zeros((r.keys.shape[0],))) for r in (rows, other)]
        return dataclasses.replace(jax.tree.map(put, *bare), keys=jax.random.wrap_key_data(data))

    return dataclasses.replace(
        state,
        cache=state.cache.insert(slot, one.cache, 0),
        proposer=jax.tree.map(put, state.proposer, one.proposer),
        rows=put_keys(state.rows, one.rows),
        root=put(state.root, one.root),
        emitted=put(state.emitted, one.emitted),
        budget=put(state.budget, one.budget),
        done=put(state.done, one.done),
        unread=jax.tree.map(put, state.unread, one.unread),
    )
