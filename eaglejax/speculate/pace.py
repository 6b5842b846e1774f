"""One batch's use of measured costs: they inform its policy, its rounds are held against them, and what it
has learnt is kept for the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from eaglejax.speculate import costs
from eaglejax.speculate.adaptive import AdaptiveMemory, carried
from eaglejax.speculate.state import DecodeState, Record

MOST_KINDS = 64
"""Kinds of batches whose memories are kept."""

_learnt: dict[str, AdaptiveMemory] = {}


class Pace:
    """Costs of the batch of ``kind``. ``begin`` comes first, ``settle`` last."""

    def __init__(self, kind: costs.Kind) -> None:
        self._kind = kind
        self._costs: costs.Costs | None = None
        self._chunks = self._rounds = 0
        self._said = self._took = 0.0

    def begin(self, state: Callable[[], DecodeState]) -> None:
        """Look the costs up, or measure them on fresh states of the batch."""
        self._costs = costs.table(self._kind, state)

    def informed(self, state: DecodeState) -> DecodeState:
        """``state`` of a batch that begins, with the costs and what earlier ones of its kind have learnt."""
        if self._costs is None:
            return state
        seconds = jax.device_put(np.asarray(self._costs.seconds, np.float32))
        policy = dataclasses.replace(state.policy, costs=seconds)
        before = _learnt.get(self._kind.name)
        return dataclasses.replace(state, policy=policy if before is None else carried(policy, before))

    def said(self, record: Record) -> tuple[float, float]:
        """Seconds that the costs give one row's ``record``, and a round of plain decoding."""
        assert self._costs is not None
        return (
            self._costs.of(int(record.width), rested=bool(record.rested)),
            self._costs.seconds[0],
        )

    def count(self, records: Record, ran: int, seconds: float) -> None:
        """Note that the ``ran`` rounds of a chunk took so many seconds. The first may have waited for a
        compiler, and says nothing."""
        self._chunks += 1
        if self._chunks == 1:
            return
        self._rounds += ran
        self._took += seconds
        for i in range(ran):
            self._said += self.said(jax.tree.map(lambda x, i=i: x[i, 0], records))[0]

    def settle(self, memory: AdaptiveMemory, state: Callable[[], DecodeState]) -> None:
        """Let go of costs that the run contradicts, measure what has gone by the roofline so far, and keep
        what the batch has learnt for the next of its kind in this process."""
        assert self._costs is not None
        self._costs.forget_if_stale(self._rounds, self._said, self._took)
        _learnt.pop(self._kind.name, None)
        _learnt[self._kind.name] = jax.device_get(memory)
        while len(_learnt) > MOST_KINDS:
            del _learnt[next(iter(_learnt))]
        if not self._costs.measured:
            costs.take(self._kind, state)
