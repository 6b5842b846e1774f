"""What a round costs at each width, measured with the very program that decodes.

The first batch of a kind runs a few rounds of every width before it begins (``AdaptiveMemory.forced``); the
seconds are kept beside the compile cache, by machine, versions, program, types of the weights, batch and
capacity. A run that takes much longer or shorter than they say makes them be taken again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.devices import compile_cache, machine
from eaglejax.speculate import rounds
from eaglejax.speculate.state import DecodeState, Params, Program

ROUNDS = 4
"""Rounds a measurement."""
_TRIES, _MOST_TRIES = 3, 7
_AGREE = 1.15  # two best measurements further apart than this are noise
_STALE = 2.0  # a run off by this factor says that the table no longer holds
_ENOUGH = 32  # rounds before a run says anything
_NEVER = 1 << 30


@dataclasses.dataclass(frozen=True)
class Costs:
    """``seconds`` a round at each width of the program's menu; ``file``: where they are kept."""

    seconds: tuple[float, ...]
    file: Path

    def forget_if_stale(self, widths: dict[int, int], menu: tuple[int, ...], seconds: float) -> bool:
        """Whether rounds of these ``widths`` (width: how many) took so long, ``seconds``, that the table is
        wrong; it is deleted then."""
        count = sum(widths.values())
        said = sum(self.seconds[menu.index(width)] * n for width, n in widths.items())
        stale = count >= _ENOUGH and not said / _STALE <= seconds <= said * _STALE
        if stale:
            self.file.unlink(missing_ok=True)
        return stale


def table(
    program: Program, params: Params, state: Callable[[], DecodeState], *, most: int, reach: int
) -> Costs:
    """Costs of ``program``, from the file or measured now.

    ``state()`` gives a fresh state of the batch at hand; ``most``: rounds a chunk; ``reach``: tokens that its
    rows come to hold, half of which stand in the caches while it is measured.
    """
    shapes = jax.eval_shape(state)
    file = _folder() / f"{_key(program, params, shapes, most)}.json"
    seconds = _read(file, len(program.menu))
    if seconds is None:
        seconds = _measure(program, params, state, most, reach // 2)
        _write(file, program.menu, seconds)
    return Costs(seconds, file)


def _measure(
    program: Program, params: Params, state: Callable[[], DecodeState], most: int, length: int
) -> tuple[float, ...]:
    def once(index: int) -> float:
        here = state()
        here = dataclasses.replace(
            here,
            cache=dataclasses.replace(here.cache, lengths=jnp.full_like(here.cache.lengths, length)),
            budget=jnp.where(here.budget > 0, jnp.int32(_NEVER), here.budget),
            eos=jnp.full_like(here.eos, program.config.vocab_size),
            policy=dataclasses.replace(here.policy, forced=jnp.int32(index)),
        )
        limit = jax.device_put(np.int32(min(ROUNDS, most)))
        jax.block_until_ready(here)
        begin = time.perf_counter()
        _, _, ran = jax.block_until_ready(rounds.jit_run_rounds(program, params, here, limit, most=most))
        return (time.perf_counter() - begin) / max(int(ran), 1)

    once(0)  # compiles
    costs = []
    for index in range(len(program.menu)):
        times = sorted(once(index) for _ in range(_TRIES))
        while times[1] > _AGREE * times[0] and len(times) < _MOST_TRIES:
            times = sorted([*times, once(index)])
        costs.append(times[0])
    return tuple(costs)


def _folder() -> Path:
    return compile_cache.home(os.environ) / "costs"


def _key(program: Program, params: Params, state: DecodeState, most: int) -> str:
    here = machine.describe()
    where = [here[name] for name in ("system", "processor", "cores", "versions", "platform", "devices")]
    leaves = jax.tree.leaves((params, state))
    shapes = [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
    return hashlib.sha256(repr((where, program, shapes, most)).encode()).hexdigest()[:32]


def _read(file: Path, count: int) -> tuple[float, ...] | None:
    """The seconds in ``file``; None where it is missing or holds anything else than ``count`` of them."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["seconds"]
        seconds = tuple(float(x) for x in found)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return seconds if len(seconds) == count and all(0 < x < math.inf for x in seconds) else None


def _write(file: Path, menu: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    """Keep the table; a folder that cannot be written costs the next run a measurement."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"widths": menu, "seconds": seconds}) + "\n", encoding="utf-8")
        part.replace(file)
