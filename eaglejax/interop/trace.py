"""The JAX side of a parity run: greedy decoding stage by stage, with the tensors that ``names`` lists.

The computation is the library's own (see ``instrument``); this module drives it from prompt to answer as
``generate`` does, for one row, and hands out what each stage read and gave.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import sampling
from eaglejax.drafts.base import Bound
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.errors import ConfigError, RequestError
from eaglejax.interop.compare import Committed, Recorded, Stage, in_order, is_coarse
from eaglejax.interop.instrument import Capture, Instruments
from eaglejax.interop.names import Place, parse
from eaglejax.models.target import Target
from eaglejax.sampling import Sampling
from eaglejax.speculate.generate import LARGEST_PREFILL, Request, check_request, power_of_two
from eaglejax.speculate.round import Params, Program


class Tracer:
    """Runs a target and an EAGLE draft greedily, one row at a time, and records.

    Raises ConfigError for a proposer that is no EAGLE draft, for sampled drafts and for a confidence cut,
    whose skipped levels have nothing to record.
    """

    def __init__(self, target: Target, draft: Bound) -> None:
        proposer = draft.proposer
        if not isinstance(proposer, Eagle):
            raise ConfigError(
                f"parity compares EAGLE drafts; {type(proposer).__name__} has no counterpart in torch"
            )
        if proposer.sample or proposer.min_confidence:
            raise ConfigError(
                "parity compares trees of the likeliest tokens, grown whole: leave out draft_sample and "
                "min_confidence"
            )
        self._target = target
        self._params = Params(target.params, draft.params)
        self._capture = Capture()
        self._instruments = Instruments(self._capture)
        self._program = Program(target.config, self._instruments.proposer(proposer))
        self._jitted = {stage: jax.jit(self._recorded(stage)) for stage in ("prefill", "round")}

    def stages(
        self, prompt: Sequence[int], max_new_tokens: int, *, prefill_width: int = LARGEST_PREFILL
    ) -> Iterator[Stage]:
        """The stages of one answer to the token ids ``prompt``, in the shapes in which ``generate`` decodes.

        Raises RequestError for a prompt that cannot be served, and where nothing may be answered.
        """
        target = self._target
        check_request(
            Request(tuple(prompt), Sampling(), max_new_tokens), target.context, target.config.vocab_size
        )
        budget = min(max_new_tokens, target.context - len(prompt))
        if budget < 1:
            raise RequestError("nothing may be answered: the limit is 0 or the prompt fills the context")
        width = min(power_of_two(prefill_width, 1), power_of_two(len(prompt), 16))
        reach = max(len(prompt) + budget + self._program.proposer.nodes, len(prompt) + width)
        state = self._instruments.round.init_state(
            self._program,
            self._params,
            sampling.rows([Sampling(seed=0)], target.config.vocab_size, [list(prompt)]),
            capacity=power_of_two(reach, 32),
            budget=jnp.asarray([budget], jnp.int32),
            eos=jnp.asarray(sorted(target.eos_ids), jnp.int32),
            cache_dtype=target.dtype,
        )
        padded = np.zeros((1, -(-len(prompt) // width) * width + 1), np.int32)
        padded[0, : len(prompt)] = prompt
        for index, begin in enumerate(range(0, len(prompt), width)):
            count = min(len(prompt) - begin, width)
            state, stage = self._advance(
                ("prefill", index),
                count,
                state,
                padded[:, begin : begin + width],
                padded[:, begin + 1 : begin + width + 1],
                np.asarray([count], np.int32),
                np.asarray([begin + width >= len(prompt)]),
            )
            yield stage
        index = 0
        while not stage.ended:
            state, stage = self._advance(("round", index), None, state)
            yield stage
            index += 1

    def _advance(
        self, where: tuple[str, int], real: int | None, state: Any, *chunk: np.ndarray
    ) -> tuple[Any, Stage]:
        """One stage; of a prompt's chunk the first ``real`` rows are no padding."""
        stage, index = where

        after, found = self._jitted[stage](self._params, state, *chunk)
        places = {dataclasses.replace(parse(name), index=index): x for name, x in found.items()}

        def fetch(wanted: Callable[[Place], bool]) -> dict[str, Recorded]:
            return {
                str(p): Recorded.of(_without_padding(p, np.asarray(places[p]), real))
                for p in in_order(filter(wanted, places))
            }

        return after, Stage(
            stage,
            index,
            fetch(is_coarse),
            ended=bool(after.done[0]),
            everything=lambda: fetch(lambda place: True),
            committed=lambda: _committed(state),
        )

    def _recorded(self, stage: str) -> Callable[..., tuple[Any, dict[str, jax.Array]]]:
        name = {"prefill": "prefill_chunk", "round": "decode_round"}[stage]

        def run(params: Params, state: Any, *chunk: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
            with self._capture.stage(stage, params) as found:
                after, _ = getattr(self._instruments.round, name)(self._program, params, state, *chunk)
            return after, found

        return run


def _committed(state: Any) -> Committed:
    """What the caches of a state hold, one row."""
    caches = {"target": state.cache, "draft": state.proposer.cache}

    def held(arrays: Sequence[jax.Array], length: int) -> list[np.ndarray]:
        return [Recorded.of(np.asarray(x)[:, :, :length]).values for x in arrays]

    return Committed(
        keys={name: held(c.k, int(c.lengths[0])) for name, c in caches.items()},
        values={name: held(c.v, int(c.lengths[0])) for name, c in caches.items()},
        feature=Recorded.of(np.asarray(state.proposer.feature)).values,
    )


def _without_padding(place: Place, array: np.ndarray, real: int | None) -> np.ndarray:
    """A prompt chunk's tensor without the rows behind its ``real`` tokens (None: a round has none)."""
    if real is None or place.part == "verify" or place.operation == "logits":
        return array
    array = array[:, :real]
    return array[:, :, :real] if place.operation == "visible" else array
