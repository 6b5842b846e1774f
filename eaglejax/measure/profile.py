"""Where a round's time goes: drafting, the target's forward with its verification, the host.

The whole is the loop that ``generate`` runs, timed as it runs. Its parts are timed one by one on a state
captured from that loop, each as a program of its own that is waited for, so each holds one dispatch and
nothing of another part overlaps with it; their sum need not be the whole.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax.api import decoder_for
from eaglejax.drafts.autoregressive import Autoregressive
from eaglejax.drafts.base import Bound, Observation, Proposer
from eaglejax.models.target import Target
from eaglejax.sampling import Purpose, Sampling, fold, round_keys
from eaglejax.speculate import rounds
from eaglejax.speculate.generate import BatchDecoder, DecodeOptions, Request

REPEATS = 15
"""Runs of each part, of which the median counts."""

_ROUNDS_BEFORE = 2  # rounds before the state is captured: the first one's text is not typical

_jit_judge = jax.jit(rounds.judge, static_argnums=0, donate_argnums=2)


@dataclasses.dataclass(frozen=True)
class Profile:
    """Times of one method on one prompt, in milliseconds a round but for ``rounds``.

    ``round_ms``: wall time of the loop behind the first token, a round. ``propose_ms``, ``observe_ms``: the
    proposer's two parts; ``verify_ms``: target forward, verification and commit. ``host_ms``: wall time in
    which no round runs (text, stop strings, streaming, and starting the chunks).
    """

    rounds: int
    round_ms: float
    propose_ms: float
    verify_ms: float
    observe_ms: float
    host_ms: float

    def to_json(self) -> dict[str, Any]:
        """All fields, and the shares of the draft, the verification and the host in a round."""
        whole = self.round_ms
        return {
            **dataclasses.asdict(self),
            "draft_share": (self.propose_ms + self.observe_ms) / whole,
            "verify_share": self.verify_ms / whole,
            "host_share": self.host_ms / whole,
        }


def profile(
    target: Target,
    proposer: Proposer | Bound | None,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    rounds_a_chunk: int,
    prediction: Any = None,
) -> Profile | None:
    """Profile a greedy answer to ``prompt``, all drafts judged; None where it ends with its first token,
    without any round."""

    def decoder() -> BatchDecoder:
        request = Request(tuple(prompt), Sampling(), max_new_tokens, prediction=prediction)
        return decoder_for(
            target, proposer, [request], 1, DecodeOptions(rounds_a_chunk=rounds_a_chunk, speculation="fixed")
        )

    _run(decoder())
    timed, wall = min((_run(decoder()) for _ in range(3)), key=lambda run: run[1])
    count = timed.results()[0].stats.target_forwards
    if not count:
        return None
    source = decoder()
    state, _, _ = rounds.jit_run_rounds(
        source.program, source.params, source.prefill(), jnp.int32(_ROUNDS_BEFORE), most=rounds_a_chunk
    )
    starting, state = _starting(source, state, rounds_a_chunk)
    host = wall - timed.device_seconds + timed.chunks * starting
    propose, verify, observe = _parts(source.program, source.params, state)
    return Profile(
        rounds=count,
        round_ms=1e3 * wall / count,
        propose_ms=1e3 * propose,
        verify_ms=1e3 * verify,
        observe_ms=1e3 * observe,
        host_ms=1e3 * host / count,
    )


def _run(decoder: BatchDecoder) -> tuple[BatchDecoder, float]:
    """Decode to the end: the decoder, and the seconds after the first token."""
    pieces = iter(decoder)
    next(pieces)
    begin = time.perf_counter()
    for _ in pieces:
        pass
    return decoder, time.perf_counter() - begin


def _clock(run: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = jax.block_until_ready(run())
    return time.perf_counter() - begin, result


def _starting(
    decoder: BatchDecoder, state: rounds.DecodeState, most: int
) -> tuple[float, rounds.DecodeState]:
    """Seconds to start a chunk of rounds and be told of its end, from chunks of no rounds; and the state."""
    times = []
    none = jnp.int32(0)
    for _ in range(REPEATS):
        seconds, (state, _, _) = _clock(
            lambda s=state: rounds.jit_run_rounds(decoder.program, decoder.params, s, none, most=most)  # type: ignore[misc]
        )
        times.append(seconds)
    return statistics.median(times), state


def _parts(
    program: rounds.Program, params: rounds.Params, state: rounds.DecodeState
) -> tuple[float, float, float]:
    """Seconds of proposing, of the target's part and of observing; consumes ``state``."""
    proposer = program.proposer
    propose = jax.jit(proposer.propose, donate_argnums=1)
    observe = jax.jit(proposer.observe, donate_argnums=1)
    lengths, rows = state.cache.lengths, state.rows
    keys = fold(round_keys(rows, lengths), Purpose.DRAFT)
    nothing = _nothing_seen(program, params, lengths)
    memory, times = state.proposer, []
    # Each leaves the memory as the other expects it, so the two take turns; the first turn compiles.
    for _ in range(REPEATS + 1):
        proposing, (draft, memory) = _clock(
            lambda m=memory: propose(params.draft, m, state.root, lengths, rows, keys)  # type: ignore[misc]
        )
        observing, memory = _clock(lambda m=memory: observe(params.draft, m, nothing))  # type: ignore[misc]
        times.append((proposing, observing))
    # The target's part alone: one who observes nothing is told of it.
    unobserved, alone = (
        dataclasses.replace(program, proposer=Autoregressive()),
        dataclasses.replace(params, draft=None),
    )
    state = dataclasses.replace(state, proposer=())
    verifying = []
    for _ in range(REPEATS + 1):
        seconds, (state, _) = _clock(lambda s=state: _jit_judge(unobserved, alone, s, draft))  # type: ignore[misc]
        verifying.append(seconds)
    proposing, observing = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return proposing, statistics.median(verifying[1:]), observing


def _nothing_seen(program: rounds.Program, params: rounds.Params, lengths: jax.Array) -> Observation:
    """A round's observation of no token: as much work, and the memory stays as long as it is."""
    taps, shape = program.proposer.needs.taps, (lengths.shape[0], program.proposer.depth + 1)
    width, dtype = program.config.hidden_size, params.target["norm"].dtype
    tokens = jnp.zeros(shape, jnp.int32)
    return Observation(
        tokens=tokens,
        following=tokens,
        start=lengths,
        count=jnp.zeros_like(lengths),
        features=jnp.zeros((*shape, len(taps), width), dtype) if taps else None,
    )
