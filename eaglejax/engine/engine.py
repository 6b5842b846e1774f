"""Continuous batching: requests join and leave a batch of speculative decoding between chunks of rounds.

A request's tokens are the same alone, in any company, in any slot, at any arrival and after any preemption:
rows are independent, and a row's draws follow its own seed and positions. A row that is preempted keeps its
tokens and is read again, as if they had been part of its prompt.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable

import jax
import numpy as np

from eaglejax.drafts.base import Bound, Proposer, Request
from eaglejax.engine.slots import GREEDY, Slots, Staged, level_of
from eaglejax.engine.totals import Totals
from eaglejax.errors import ConfigError, RequestError
from eaglejax.models.target import Target
from eaglejax.speculate import metrics
from eaglejax.speculate.admission import bound_for, check_request
from eaglejax.speculate.books import Generation, Row, book_row, no_distribution
from eaglejax.speculate.chance import watch
from eaglejax.speculate.options import DecodeOptions
from eaglejax.speculate.state import Record

MOST_SLOTS, MOST_TOP = 1024, 64
ENGINE = DecodeOptions(rounds_a_chunk=4, prefill_width=256)
"""How an engine decodes where it is not told otherwise: it looks at its rows every few rounds."""


class BusyError(RequestError):
    """An engine's queue is full."""


@dataclasses.dataclass(frozen=True)
class Event:
    """What became of request ``id`` since its last event: newly settled ``text`` and ``token_ids``, as in
    ``Piece``; ``result``: its Generation, in its last event."""

    id: int
    text: str
    token_ids: tuple[int, ...]
    result: Generation | None = None


@dataclasses.dataclass(eq=False)
class _Entry:
    """A request that has not ended. ``number``: its place in the order of arrival; ``slot``: where it is
    decoded or will be, None while it waits; ``reading``: its text has not been read yet."""

    number: int
    request: Request
    row: Row
    budget: int
    level: int
    priority: int
    begun: float
    deadline: float | None
    slot: int | None = None
    reading: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first."""
        return -self.priority, self.number


class Engine:
    """Decodes requests of ``target`` in up to ``slots`` rows at once, with drafts of ``proposer`` (None:
    plain decoding). For one thread at a time.

    ``context``: longest prompt and answer together (None: the target's), for which every row has room.
    ``queue``: most requests that wait (None: any number). ``top_logprobs``: most that a request may ask for.
    ``options``: how to decode; ``ENGINE`` where not given, and log-probabilities are asked for by request.
    ``clock``: seconds. Raises ConfigError for what cannot be or what memory has no room for.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | Bound | None = None,
        *,
        slots: int = 8,
        context: int | None = None,
        queue: int | None = None,
        top_logprobs: int = 0,
        options: DecodeOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check("slots", slots, 1, MOST_SLOTS)
        _check("top_logprobs", top_logprobs, 0, MOST_TOP)
        if context is not None:
            _check("context", context, 2, target.context)
        if queue is not None:
            _check("queue", queue, 0, 2**31)
        self.target, self.context = target, context or target.context
        self.bound = bound_for(target, proposer)
        self._options = options = options or ENGINE
        self._top, self._queue, self._clock = top_logprobs, queue, clock
        self._eos = frozenset() if options.ignore_eos else frozenset(target.eos_ids)
        self._slots = Slots(
            target,
            self.bound,
            slots=slots,
            context=self.context,
            options=options,
            top_logprobs=top_logprobs,
        )
        self._rows: list[_Entry | None] = [None] * slots
        self._waiting: list[_Entry] = []
        self._entries: dict[int, _Entry] = {}
        self._staged: tuple[_Entry, Staged] | None = None
        self._events: list[Event] = []
        self._count = 0
        self.totals = Totals()

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return sum(e is not None for e in self._rows)

    @property
    def waiting(self) -> int:
        """Requests that have none."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not self._entries and not self._events

    def warm_up(self) -> None:
        """Compile all that requests to come run, so that none of them waits for a compiler. No request may
        be under way."""
        if self._entries:
            raise ConfigError("an engine warms up before its requests, not while some are under way")
        self._slots.warm_up()

    def submit(
        self,
        request: Request,
        *,
        priority: int = 0,
        deadline: float | None = None,
        logprobs: bool = False,
        top_logprobs: int = 0,
    ) -> int:
        """Queue ``request``; the id that its events bear.

        ``priority``: the larger goes first, and takes the slot of a smaller one where none is free.
        ``deadline``: seconds from now after which it ends as it is, with an error that says so. ``logprobs``,
        ``top_logprobs``: return log-probabilities, and those of so many likeliest tokens in each place.
        Raises RequestError for what cannot be served, BusyError where too many wait.
        """
        check_request(request, self.context, self.target.config.vocab_size)
        if request.stop and self.target.tokenizer is None:
            raise RequestError("stop strings need a tokenizer and this target has none")
        if not 0 <= top_logprobs <= self._top:
            raise RequestError(f"top_logprobs is {top_logprobs}; this engine gives up to {self._top}")
        if self._queue is not None and len(self._waiting) >= self._queue + self._rows.count(None):
            raise BusyError(f"{len(self._waiting)} requests wait already; try again later")
        if request.prediction is not None and not self.bound.proposer.reads_predictions:
            self.bound.proposer.refuse_predictions([request])
        if request.sampling.seed is None:
            # A row that is read again must go on with the seed that it began with.
            sampling = dataclasses.replace(request.sampling, seed=secrets.randbits(64))
            request = dataclasses.replace(request, sampling=sampling)
        logprobs = logprobs or top_logprobs > 0
        now = self._clock()
        entry = _Entry(
            number=self._count,
            request=request,
            row=Row(request, self.target.tokenizer, self._eos, logprobs, top_logprobs),
            budget=min(request.max_new_tokens, self.context - len(request.prompt)),
            level=level_of(request.sampling, logprobs=logprobs),
            priority=priority,
            begun=now,
            deadline=None if deadline is None else now + deadline,
        )
        self._count += 1
        self._entries[entry.number] = entry
        if entry.budget <= 0:
            self._end(entry)
        else:
            self._waiting.append(entry)
        return entry.number

    def cancel(self, request: int) -> None:
        """End request ``request`` as it is, with finish reason "cancelled". One that has ended is left
        alone."""
        entry = self._entries.get(request)
        if entry is not None:
            entry.row.cancelled = True
            self._end(entry)

    def preempt(self, request: int) -> None:
        """Take the slot of request ``request``, which keeps its tokens and waits for another; nothing where
        it has none."""
        entry = self._entries.get(request)
        if entry is not None and entry.slot is not None:
            self._leave(entry)
            self._waiting.append(entry)
            self.totals.preemptions += 1

    def step(self) -> list[Event]:
        """Read some of the prompts of rows that join, decode a chunk of rounds, and say what came of it."""
        now = self._clock()
        for entry in list(self._entries.values()):
            if entry.deadline is not None and now >= entry.deadline:
                waited = now - entry.begun
                entry.row.error = (
                    f"its deadline passed after {waited:.1f} s and {len(entry.row.tokens)} tokens"
                )
                self._end(entry)
        self._read_prompts()
        self._run_rounds()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """End all requests, and keep what was learnt of costs."""
        for entry in list(self._entries.values()):
            entry.row.cancelled = True
            self._end(entry)
        self._slots.close()

    def _decoding(self) -> list[tuple[int, _Entry]]:
        """Rows that rounds move."""
        return [(slot, e) for slot, e in enumerate(self._rows) if e is not None and not e.reading]

    def _read_prompts(self) -> None:
        """Let rows join: all the prompts of an idle batch's first, and one chunk's worth of tokens a step
        beside rows that decode."""
        left = self._slots.widths[-1]
        while left > 0 or not self._decoding():
            if self._staged is None and not self._begin():
                return
            if self._staged is None:
                continue
            entry, staged = self._staged
            try:
                width, record, done = self._slots.read(staged)
            except Exception as error:
                self._fail(entry, error)
                continue
            left -= width
            if staged.at == staged.size:
                self._staged = None
                entry.reading = False
                if not staged.known:
                    self._book(entry, _row_of(record, 0), first=True)
                elif not record.finite[0]:
                    entry.row.error = no_distribution(len(entry.row.tokens), entry.request.sampling)
                if not self._settle(entry, done):
                    assert entry.slot is not None
                    self._slots.join(entry.slot, staged)
            elif done:
                # A prompt token that cannot be computed.
                entry.row.error = no_distribution(len(entry.row.tokens), entry.request.sampling)
                self._end(entry)

    def _begin(self) -> bool:
        """Give a slot to who waits and goes first; False where nobody does or none is free."""
        entry = min(self._waiting, key=lambda e: e.order, default=None)
        if entry is None:
            return False
        if None not in self._rows:
            last = max((e for e in self._rows if e is not None), key=lambda e: e.order)
            if last.priority >= entry.priority:
                return False
            self.preempt(last.number)
        self._waiting.remove(entry)
        entry.slot = self._rows.index(None)
        entry.reading = True
        self._rows[entry.slot] = entry
        try:
            self._staged = entry, self._slots.stage(entry.request, entry.budget, entry.row.tokens)
        except Exception as error:
            self._fail(entry, error)
        return True

    def _run_rounds(self) -> None:
        rows = self._decoding()
        if not rows:
            return
        level = max((e.level for _, e in rows), default=GREEDY)
        try:
            records, ran, done = self._slots.run(level, self._options.rounds_a_chunk)
        except Exception as error:
            # The state went with the program that failed.
            for _, entry in rows:
                self._fail(entry, error)
            self._slots.reset()
            return
        for i in range(ran):
            for slot, entry in rows:
                self._book(entry, jax.tree.map(lambda x, i=i, slot=slot: x[i, slot], records))
        for slot, entry in rows:
            self._settle(entry, bool(done[slot]))
        live = np.ones(len(self._rows), bool)
        live[[slot for slot, _ in self._decoding()]] = False
        if (live != done).any():
            self._slots.halt(live)

    def _book(self, entry: _Entry, record: Record, *, first: bool = False) -> None:
        row = entry.row
        if row.stopped or row.error:
            return
        try:
            if record.count:
                book_row(row, record, self._clock() - entry.begun, self._slots.pace, first=first)
        except Exception as error:
            row.error = _fault(error)
            return
        if not record.finite and not row.stopped:
            row.error = no_distribution(len(row.tokens), entry.request.sampling)

    def _settle(self, entry: _Entry, done: bool) -> bool:
        """Hand out what is new of a row; whether that was its end. ``done``: the device says so."""
        row = entry.row
        if done or row.stopped or row.error:
            self._end(entry)
            return True
        try:
            self._learn(entry)
            piece = row.piece(entry.number, final=False)
        except Exception as error:
            self._fail(entry, error)
            return True
        if piece is not None:
            self._events.append(Event(entry.number, piece.text, piece.token_ids))
        return False

    def _learn(self, entry: _Entry) -> None:
        if news := entry.row.news():
            self.bound.proposer.learn(entry.request, news)

    def _fail(self, entry: _Entry, error: Exception) -> None:
        """End one row for what went wrong with it."""
        entry.row.error = _fault(error)
        self._end(entry)

    def _leave(self, entry: _Entry) -> None:
        """Take a row out of its slot, which stands still until another joins."""
        assert entry.slot is not None
        self._rows[entry.slot] = None
        if self._staged is not None and self._staged[0] is entry:
            self._staged = None
        elif not entry.reading:
            halted = np.ones(len(self._rows), bool)
            halted[[slot for slot, _ in self._decoding()]] = False
            self._slots.halt(halted)
        entry.slot, entry.reading = None, False

    def _end(self, entry: _Entry) -> None:
        del self._entries[entry.number]
        if entry.slot is not None:
            self._leave(entry)
        elif entry in self._waiting:
            self._waiting.remove(entry)
        row = entry.row
        piece = None
        try:
            self._learn(entry)
            piece = row.piece(entry.number, final=True)
            result = row.result(self._eos, self.bound.proposer.depth)
        except Exception as error:
            reason = row.error or _fault(error)
            stats = metrics.Stats()
            result = Generation("", list(row.tokens), "error", None, stats, len(entry.request.prompt), reason)
        self.totals.add(result)
        watch(self.bound, self.target, [result])
        text, tokens = ("", ()) if piece is None else (piece.text, piece.token_ids)
        self._events.append(Event(entry.number, text, tokens, result))


def _row_of(record: Record, row: int) -> Record:
    return jax.tree.map(lambda x: x[row], record)


def _fault(error: Exception) -> str:
    """What is told of an error that ended a row."""
    text = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {text:.200}"


def _check(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} is {value!r:.80}; it must be a whole number from {least} to {most}")
