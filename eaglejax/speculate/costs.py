"""What a round costs at each width, measured with the very program that decodes.

The first batch of a kind runs a few rounds of every width before it begins (``AdaptiveMemory.forced``); the
seconds are kept beside the compile cache, by machine, versions, program, model, dtypes, batch and capacity.
Measurements that scatter, that are old, or that a run contradicts are taken again. On an accelerator whose
rates are published the first batch does not wait: it goes by the roofline, and is measured when it is done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.devices import chips, compile_cache, machine
from eaglejax.speculate import rounds
from eaglejax.speculate.state import DecodeState, Params, Program

ROUNDS = 4
"""Rounds a measurement."""
_TRIES, _MOST_TRIES = 3, 7
_AGREE = 1.15  # two best measurements further apart than this are noise
_STALE = 2.0  # a run off by this factor says that the table no longer holds
_ENOUGH = 32  # rounds before a run says anything
_SOON = 600.0  # seconds before what has just been measured is measured again
_OLD = 30 * 86400.0  # seconds after which a table is measured again
_NEVER = 1 << 30


@dataclasses.dataclass(frozen=True)
class Clock:
    """``lap``: seconds for what is measured; ``now``: seconds since 1970, for how old a table is."""

    lap: Callable[[], float] = time.perf_counter
    now: Callable[[], float] = time.time


CLOCK = Clock()


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a table is for. ``most``: rounds a chunk; ``capacity``: cache slots a row; ``cache``: their
    format; ``reach``: tokens that its rows come to hold, half of which stand in the caches while it is
    measured. ``inputs``: what the requests bring along."""

    program: Program
    params: Params
    batch: int
    capacity: int
    cache: str
    most: int
    reach: int
    inputs: Any = ()

    @functools.cached_property
    def name(self) -> str:
        """A digest of all that the seconds depend on."""
        leaves = jax.tree.leaves((self.params, self.inputs))
        shapes = [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
        what = (_here(), self.program, shapes, self.batch, self.capacity, self.cache, self.most)
        return hashlib.sha256(repr(what).encode()).hexdigest()[:32]

    def describe(self) -> dict[str, Any]:
        """The same for a person."""
        weights = jax.tree.leaves(self.params.target)
        return {
            "machine": _here(),
            "model": self.program.config.family,
            "parameters": int(sum(leaf.size for leaf in weights)),
            "dtype": str(max(weights, key=lambda leaf: leaf.size).dtype),
            "draft": type(self.program.proposer).__name__,
            "nodes": self.program.proposer.nodes,
            "batch": self.batch,
            "capacity": self.capacity,
            "cache": self.cache,
        }


@dataclasses.dataclass(frozen=True)
class Costs:
    """``seconds`` of a round without a draft, then of one with a draft at each width of ``menu``. ``spread``:
    by what factor the two best measurements of any of them differ (1: not at all; 0: nothing is measured, it
    is the roofline). ``taken``: when, seconds since 1970. ``file``: where they are kept."""

    menu: tuple[int, ...]
    seconds: tuple[float, ...]
    spread: float
    taken: float
    file: Path

    @property
    def measured(self) -> bool:
        """Whether anything was."""
        return self.spread > 0

    def of(self, width: int, *, rested: bool) -> float:
        """Seconds of a round of ``width``; ``rested``: that did not draft."""
        return self.seconds[0 if rested else 1 + self.menu.index(width)]

    def outlived(self, now: float) -> bool:
        """Whether to measure again: what is old, and what scattered when it was taken a while ago."""
        age = now - self.taken
        return not 0 <= age <= _OLD or (self.spread > _AGREE and age > _SOON)

    def forget_if_stale(self, count: int, said: float, seconds: float) -> bool:
        """Whether ``count`` rounds, of which the table ``said`` so many seconds, took so long that it is
        wrong; it is deleted then, unless it has just been taken."""
        wrong = count >= _ENOUGH and not said / _STALE <= seconds <= said * _STALE
        stale = wrong and self.measured and CLOCK.now() - self.taken > _SOON
        if stale:
            self.file.unlink(missing_ok=True)
        return stale


def table(kind: Kind, state: Callable[[], DecodeState]) -> Costs:
    """Costs of ``kind``: from its file, else by the roofline where there is one, else measured now.
    ``state()`` gives a fresh state of the batch at hand."""
    file = folder() / f"{kind.name}.json"
    found = _read(file, kind.program.menu)
    if found is not None and not found.outlived(CLOCK.now()):
        return found
    if found is None and (chip := _chip()) is not None:
        seconds = roofline(kind, chip, jax.eval_shape(state))
        return Costs(kind.program.menu, seconds, 0.0, CLOCK.now(), file)
    return take(kind, state)


def take(kind: Kind, state: Callable[[], DecodeState]) -> Costs:
    """Measure ``kind`` and keep what comes of it."""
    program, params = kind.program, kind.params
    limit = min(ROUNDS, kind.most)

    def once(index: int) -> float:
        here = state()
        here = dataclasses.replace(
            here,
            cache=dataclasses.replace(here.cache, lengths=jnp.full_like(here.cache.lengths, kind.reach // 2)),
            budget=jnp.where(here.budget > 0, jnp.int32(_NEVER), here.budget),
            eos=jnp.full_like(here.eos, program.config.vocab_size),
            policy=dataclasses.replace(here.policy, forced=jnp.int32(index)),
        )
        most = jax.device_put(np.int32(limit))
        jax.block_until_ready(here)
        begin = CLOCK.lap()
        _, _, ran = jax.block_until_ready(rounds.jit_run_rounds(program, params, here, most, most=kind.most))
        return (CLOCK.lap() - begin) / max(int(ran), 1)

    seconds, spread = measure(once, 1 + len(program.menu), rests=program.rests)
    costs = Costs(program.menu, seconds, spread, CLOCK.now(), folder() / f"{kind.name}.json")
    _write(costs, kind.describe())
    return costs


def measure(
    once: Callable[[int], float], count: int, *, rests: bool = True
) -> tuple[tuple[float, ...], float]:
    """Seconds of each of ``count`` choices, and their spread (see ``Costs``); ``once(index)`` gives one
    measurement of one. Where no round ``rests`` the first choice costs what the second does.

    A wider round does all that a narrower one does, so what says that it costs less is noise.
    """
    first = 0 if rests else 1
    once(first)  # compiles
    costs, spread = [], 1.0
    for index in range(first, count):
        times = sorted(once(index) for _ in range(_TRIES))
        while times[1] > _AGREE * times[0] and len(times) < _MOST_TRIES:
            times = sorted([*times, once(index)])
        costs.append(times[0])
        spread = max(spread, times[1] / times[0])
    costs = costs[:1] * first + costs
    return tuple(float(x) for x in np.maximum.accumulate(costs)), spread


def roofline(kind: Kind, chip: chips.Chip, state: DecodeState) -> tuple[float, ...]:
    """Seconds at the published rates of ``chip``: each forward reads its weights and cache once, or is bound
    by arithmetic. ``state``: its shapes."""
    params = kind.params
    leaf = jax.tree.leaves(params.target)[0]
    devices = len(leaf.devices()) if isinstance(leaf, jax.Array) else 1
    bandwidth = chip.device_bandwidth * devices
    rate = chip.bf16 / chip.devices * devices

    def forward(weights: Any, cache: Any, nodes: int) -> float:
        read = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((weights, cache)))
        done = 2 * sum(x.size for x in jax.tree.leaves(weights)) * nodes * kind.batch
        return max(read / bandwidth, done / rate)

    drafts = kind.program.proposer.depth if jax.tree.leaves(params.draft) else 0
    draft = drafts * forward(params.draft, state.proposer, 1)
    target = [forward(params.target, state.cache.layers, width) for width in kind.program.menu]
    plain = forward(params.target, state.cache.layers, 1)
    return (plain, *(draft + x for x in target))


def _chip() -> chips.Chip | None:
    """The chip under jax's first device, where its rates are published."""
    device = jax.devices()[0]
    name = chips.tpu_generation(device.device_kind) or chips.gpu_model(device.device_kind)
    return chips.CHIPS[name] if name is not None else None


def folder() -> Path:
    """Where tables are kept."""
    return compile_cache.home(os.environ) / "costs"


@functools.cache
def _of_process() -> dict[str, Any]:
    here = machine.describe()
    names = ("system", "processor", "versions", "platform", "devices", "cpu_flags")
    return {name: here[name] for name in names}


def _here() -> dict[str, Any]:
    """The machine and what is in force on it."""
    named = ("EAGLEJAX_NO_NATIVE", "EAGLEJAX_NATIVE_LEVEL", "EAGLEJAX_ADAPTER", "XLA_FLAGS")
    settings = {name: os.environ[name] for name in named if os.environ.get(name)}
    return {**_of_process(), "cores": machine.cores(), "settings": settings}


def stored() -> list[dict[str, Any]]:
    """All tables of the folder, newest first, as ``Kind.describe`` and ``Costs`` have them; ``here``: whether
    the machine is this one, set up as now; ``age`` in seconds."""
    found = []
    for file in folder().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            row = json.loads(file.read_text(encoding="utf-8"))
            costs = _read(file, tuple(row["widths"]))
            if costs is not None:
                again = costs.outlived(CLOCK.now())
                age = CLOCK.now() - costs.taken
                found.append({**row, "here": row["machine"] == _here(), "age": age, "again": again})
    return sorted(found, key=lambda row: row["age"])


def _read(file: Path, menu: tuple[int, ...]) -> Costs | None:
    """The table in ``file``; None where it is missing or holds anything else than one of ``menu``."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        seconds = tuple(float(x) for x in found["seconds"])
        costs = Costs(tuple(found["widths"]), seconds, float(found["spread"]), float(found["taken"]), file)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    sound = costs.menu == menu and len(seconds) == 1 + len(menu) and all(0 < x < math.inf for x in seconds)
    return costs if sound and 1 <= costs.spread < math.inf else None


def _write(costs: Costs, kind: dict[str, Any]) -> None:
    """Keep the table; a folder that cannot be written costs the next run a measurement."""
    file = costs.file
    row = {**kind, "widths": costs.menu, "seconds": costs.seconds, "spread": costs.spread}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({**row, "taken": costs.taken}) + "\n", encoding="utf-8")
        part.replace(file)


def text(menu: Sequence[int], seconds: Sequence[float]) -> str:
    """A table on one line: milliseconds of a round without a draft, and of each width with one."""
    widths = ", ".join(f"{w}: {1e3 * s:.3g}" for w, s in zip(menu, seconds[1:], strict=True))
    return f"plain {1e3 * seconds[0]:.3g} ms; with a draft, by width, {widths}"
