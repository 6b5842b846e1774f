"""Host side of generation: one batch of requests through prefill and chunks of rounds.

The device runs a ``while_loop`` of rounds and returns once a chunk with one record a round; the host turns
tokens into text, looks for stop strings, and keeps the books. Shapes are bucketed, so that the programs
compiled do not depend on the text: prompts by chunk, caches by powers of two.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from eaglejax import sampling
from eaglejax.drafts.base import Proposer, Request
from eaglejax.errors import EaglejaxError
from eaglejax.models.target import Target
from eaglejax.sampling import Sampling
from eaglejax.speculate import rounds
from eaglejax.speculate.adaptive import Adaptive
from eaglejax.speculate.admission import check_room
from eaglejax.speculate.books import Generation, Piece, Row, book_row, no_distribution
from eaglejax.speculate.costs import Kind
from eaglejax.speculate.options import DecodeOptions, cache_form, capacity_for, power_of_two
from eaglejax.speculate.pace import Pace
from eaglejax.speculate.state import UNREAD


class BatchDecoder:
    """Decodes up to ``batch`` requests together (None: as many as there are).

    Iterate over it for Pieces as they settle; afterwards ``results()`` gives a Generation a request.
    ``draft_params``: the proposer's weights. Every request must have passed ``admission.check_request``.
    ``program`` and ``params`` are what is run; ``device_seconds`` and ``chunks``: time in which the host did
    nothing but wait for chunks of rounds, and how many there were. Raises ConfigError for a batch that memory
    has no room for.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        draft_params: Any,
        requests: Sequence[Request],
        *,
        batch: int | None = None,
        options: DecodeOptions | None = None,
    ) -> None:
        options = options or DecodeOptions()
        self._batch = batch or len(requests)
        if not 0 < len(requests) <= self._batch:
            raise EaglejaxError(f"a batch of {self._batch} rows cannot hold {len(requests)} requests")
        self._target = target
        self.program = rounds.Program(
            target.config,
            proposer,
            options.verification,
            options.logprobs,
            options.attention,
            *options.choices(proposer, sampled=any(r.sampling.temperature > 0 for r in requests)),
        )
        self.params = rounds.Params(target.params, draft_params)
        self._requests = list(requests)
        self._inputs = proposer.inputs(self._requests, self._batch)
        self._eos = frozenset() if options.ignore_eos else frozenset(target.eos_ids)
        self._rounds_a_chunk = options.rounds_a_chunk
        self._cache_dtype, self._cache_scales = cache_form(target, options)
        self._rows = [Row(r, target.tokenizer, self._eos, options.logprobs) for r in self._requests]

        longest = max(len(r.prompt) for r in self._requests)
        self._width = min(power_of_two(options.prefill_width, 1), power_of_two(longest, 16))
        budgets = [min(r.max_new_tokens, target.context - len(r.prompt)) for r in self._requests]
        reach = max(len(r.prompt) + b for r, b in zip(self._requests, budgets, strict=True))
        # All prompts are read before any round, so that no chunk comes behind more than the longest of them.
        unread = UNREAD if self.program.rests else 0
        self._capacity = capacity_for(
            (longest, self._width), (reach, proposer.nodes), (reach, max(proposer.depth + 1, unread))
        )
        check_room(
            target,
            proposer,
            draft_params,
            batch=self._batch,
            slots=self._capacity,
            prefill=self._width,
            cache=self._cache_dtype,
            attention=options.attention,
            inputs=self._inputs,
        )
        self._pace: Pace | None = None
        if isinstance(self.program.policy, Adaptive) and len(self.program.menu) > 1:
            size = (self._batch, self._capacity, self._cache_dtype.name)
            kind = Kind(self.program, self.params, *size, self._rounds_a_chunk, reach, self._inputs)
            self._pace = Pace(kind)
        self._budgets = budgets + [0] * (self._batch - len(budgets))
        self._finished = False
        self.device_seconds = 0.0
        self.chunks = 0
        self._start = time.perf_counter()

    def __iter__(self) -> Iterator[Piece]:
        if self._pace is not None:
            self._pace.begin(self.start)
        self._start = time.perf_counter()
        if any(b > 0 for b in self._budgets):
            state = self.prefill()
            yield from self._pieces()
            limit = jax.device_put(np.int32(self._rounds_a_chunk))
            while not self._finished:
                begin = time.perf_counter()
                state, records, ran = jax.block_until_ready(
                    rounds.jit_run_rounds(self.program, self.params, state, limit, most=self._rounds_a_chunk)
                )
                seconds = time.perf_counter() - begin
                self.device_seconds += seconds
                self.chunks += 1
                state = self._read(state, records, ran, seconds)
                yield from self._pieces()
            policy = state.policy
            del state
            if self._pace is not None:
                self._pace.settle(policy, self.start)
        for index, row in enumerate(self._rows):
            piece = row.piece(index, final=True)
            if piece:
                yield piece

    def results(self) -> list[Generation]:
        """One Generation a request; call after iteration."""
        return [row.result(self._eos, self.program.proposer.depth) for row in self._rows]

    def start(self) -> rounds.DecodeState:
        """The state before any prompt token is read."""
        pad = self._batch - len(self._requests)
        prompts = [list(r.prompt) for r in self._requests] + [[]] * pad
        rows = sampling.rows(
            [r.sampling for r in self._requests] + [Sampling(seed=0)] * pad,
            self._target.config.vocab_size,
            prompts,
        )
        state = rounds.jit_init_state(
            self.program,
            self.params,
            rows,
            capacity=self._capacity,
            budget=jax.device_put(np.asarray(self._budgets, np.int32)),
            eos=jax.device_put(np.asarray(sorted(self._eos), np.int32)),
            cache_dtype=self._cache_dtype,
            cache_scales=self._cache_scales,
            inputs=self._inputs,
        )
        return state if self._pace is None else self._pace.informed(state)

    def chunks_of_prompts(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """What ``rounds.prefill_chunk`` takes, chunk by chunk: tokens, following, count, last."""
        width, lengths = self._width, np.zeros(self._batch, np.int64)
        lengths[: len(self._requests)] = [len(r.prompt) for r in self._requests]
        longest = int(lengths.max())
        padded = np.zeros((self._batch, -(-longest // width) * width + 1), np.int32)
        for row, request in zip(padded, self._requests, strict=False):
            row[: len(request.prompt)] = request.prompt
        for begin in range(0, longest, width):
            count = np.clip(lengths - begin, 0, width)
            yield (
                padded[:, begin : begin + width],
                padded[:, begin + 1 : begin + width + 1],
                count.astype(np.int32),
                (count > 0) & (lengths <= begin + width),
            )

    def prefill(self) -> rounds.DecodeState:
        """Run the prompts through target and proposer and book the first tokens: the state before any
        round."""
        state = self.start()
        for chunk in self.chunks_of_prompts():
            state, record = rounds.jit_prefill_chunk(self.program, self.params, state, *jax.device_put(chunk))
            record, done = jax.device_get((record, state.done))
            self._book(record, done, first=True)
        self._finished = bool(done.all())
        return self._between_chunks(state, done)

    def _read(
        self, state: rounds.DecodeState, records: rounds.Record, ran: jax.Array, seconds: float
    ) -> rounds.DecodeState:
        records, ran, done = jax.device_get((records, ran, state.done))
        if self._pace is not None:
            self._pace.count(records, int(ran), seconds)
        for i in range(int(ran)):
            self._book(jax.tree.map(lambda x, i=i: x[i], records), done, first=False)
        self._finished = bool(done.all())
        return self._between_chunks(state, done)

    def _between_chunks(self, state: rounds.DecodeState, done: np.ndarray) -> rounds.DecodeState:
        """Tell the proposer's host half what is new, and the device about rows that a stop string ended."""
        for row in self._rows:
            if news := row.news():
                self.program.proposer.learn(row.request, news)
        halt = done.copy()
        for b, row in enumerate(self._rows):
            halt[b] |= row.stopped
        self._finished = bool(halt.all())
        return state if (halt == done).all() else dataclasses.replace(state, done=jax.device_put(halt))

    def _book(self, record: rounds.Record, done: np.ndarray, *, first: bool) -> None:
        now = time.perf_counter() - self._start
        for b, row in enumerate(self._rows):
            if row.stopped or row.error:
                continue
            if record.count[b]:
                book_row(row, jax.tree.map(lambda x, b=b: x[b], record), now, self._pace, first=first)
            if not record.finite[b] and not row.stopped:
                row.error = no_distribution(len(row.tokens), row.request.sampling)

    def _pieces(self) -> Iterator[Piece]:
        for index, row in enumerate(self._rows):
            piece = row.piece(index, final=False)
            if piece:
                yield piece
