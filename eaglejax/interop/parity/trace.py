"""The JAX side of a parity run: greedy decoding stage by stage, with the tensors that ``names`` lists.

The computation is the library's own and says what it reads and gives (``eaglejax.tap``); this module runs it
from prompt to answer as ``generate`` does, for one row, and hands that out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.drafts.base import Bound, Request
from eaglejax.errors import ConfigError, RequestError
from eaglejax.interop.convert.export import draft_tree
from eaglejax.interop.parity.compare import Committed, Recorded, Stage, in_order, is_coarse
from eaglejax.interop.parity.names import Place, parse
from eaglejax.models.target import Target
from eaglejax.sampling import Sampling
from eaglejax.speculate.admission import check_request
from eaglejax.speculate.generate import BatchDecoder
from eaglejax.speculate.options import LARGEST_PREFILL, DecodeOptions
from eaglejax.speculate.rounds import Params, Program, decode_round, prefill_chunk
from eaglejax.tap import watch


class Tracer:
    """Runs a target and an EAGLE draft greedily, one row at a time, and records.

    Raises ConfigError for a draft that has no counterpart in torch and for a confidence cut, whose skipped
    levels have nothing to record.
    """

    def __init__(self, target: Target, draft: Bound) -> None:
        if draft_tree(draft).min_confidence:
            raise ConfigError("parity compares trees that are grown whole: leave out min_confidence")
        self._target, self._draft = target, draft

    def stages(
        self, prompt: Sequence[int], max_new_tokens: int, *, prefill_width: int = LARGEST_PREFILL
    ) -> Iterator[Stage]:
        """The stages of one answer to the token ids ``prompt``, in the shapes in which ``generate`` decodes.

        Raises RequestError for a prompt that cannot be served, and where nothing may be answered.
        """
        target, draft = self._target, self._draft
        request = Request(tuple(prompt), Sampling(seed=0), max_new_tokens)
        check_request(request, target.context, target.config.vocab_size)
        if min(max_new_tokens, target.context - len(prompt)) < 1:
            raise RequestError("nothing may be answered: the limit is 0 or the prompt fills the context")
        options = DecodeOptions(prefill_width=prefill_width, cache_dtype=target.dtype, speculation="fixed")
        decoder = BatchDecoder(target, draft.proposer, draft.params, [request], options=options)
        state, stage = decoder.start(), None
        for index, chunk in enumerate(decoder.chunks_of_prompts()):
            state, stage = _advance("prefill", index, decoder, state, chunk)
            yield stage
        index = 0
        while stage is not None and not stage.ended:
            state, stage = _advance("round", index, decoder, state)
            yield stage
            index += 1


def _advance(
    stage: str, index: int, decoder: BatchDecoder, state: Any, chunk: tuple[np.ndarray, ...] = ()
) -> tuple[Any, Stage]:
    """One stage of a decoder's only row."""
    after, found = _watched(stage, decoder.program, decoder.params, state, *chunk)
    places = {parse(f"{stage}/{index}/{name}"): x for name, x in found.items()}
    real = int(chunk[2][0]) if chunk else None

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


@functools.partial(jax.jit, static_argnames=("stage", "program"))
def _watched(
    stage: str, program: Program, params: Params, state: Any, *chunk: jax.Array
) -> tuple[Any, dict[str, jax.Array]]:
    """A stage, and what it taps by name."""
    found: dict[str, jax.Array] = {}

    def see(name: str, value: jax.Array) -> None:
        assert name not in found, f"{name} is tapped twice in one {stage}"
        found[name] = value

    with watch(see):
        run: Any = {"prefill": prefill_chunk, "round": decode_round}[stage]
        after, _ = run(program, params, state, *chunk)
    if stage == "round":
        # Sums of logarithms, as torch keeps them, lie further apart than small probabilities.
        found["draft/tree/scores"] = jnp.log(found.pop("draft/tree/cut_score"))
    return after, found


def _committed(state: Any) -> Committed:
    """What the caches of a state hold, one row."""
    caches = {"target": state.cache, "draft": state.proposer.cache}

    def held(arrays: Sequence[jax.Array], length: int) -> list[np.ndarray]:
        return [Recorded.of(np.asarray(x)[:, :, :length]).values for x in arrays]

    return Committed(
        keys={name: held([x.k for x in c.layers], int(c.lengths[0])) for name, c in caches.items()},
        values={name: held([x.v for x in c.layers], int(c.lengths[0])) for name, c in caches.items()},
        feature=Recorded.of(np.asarray(state.proposer.feature)).values,
    )


def _without_padding(place: Place, array: np.ndarray, real: int | None) -> np.ndarray:
    """A prompt chunk's tensor without the rows behind its ``real`` tokens (None: a round has none)."""
    if real is None or place.part == "verify" or place.operation == "logits":
        return array
    array = array[:, :real]
    return array[:, :, :real] if place.operation == "visible" else array
