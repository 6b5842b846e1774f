"""A torch run held against a recording of the JAX run, stage by stage.

Every stage is run *freely* first, from the state that the torch run itself has reached: its tree, its tokens
and its numbers are compared. Where they differ by more than rounding, and at the first stages whatever they
are, the stage is run once more *led*: from the JAX run's caches, with every intermediate tensor compared and
then overwritten by the JAX run's, so that each operation is judged on exactly the inputs that JAX's had.
Errors do not pile up in a led run, so one tolerance fits every depth, and the first operation that exceeds it
is where the fault is. A decision that differs although every operation is right is a near tie if its gap says
so; the run then goes on from the led state, in step with the JAX run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from eaglejax.errors import ConfigError
from eaglejax.interop.backends.adapter import DeviceAdapter
from eaglejax.interop.backends.arrays import to_numpy, to_tensor
from eaglejax.interop.backends.limits import LimitError
from eaglejax.interop.backends.torch_import import torch
from eaglejax.interop.models.decoder import Cache
from eaglejax.interop.models.runner import State, TorchDraft, TorchRunner, TorchTarget
from eaglejax.interop.parity.compare import (
    TIE,
    TOLERANCE,
    Committed,
    Difference,
    Extent,
    Recorded,
    Stage,
    difference,
    follows,
    tolerance,
)
from eaglejax.interop.parity.decisions import Decision, first_decision
from eaglejax.interop.parity.names import Place, parse
from eaglejax.interop.parity.report import Finding, PromptResult, Worst
from eaglejax.interop.parity.watcher import Watcher

DEEP_ROUNDS = 2
"""Rounds of the first prompt that are led whatever the free run says, besides its first chunk."""

PILED_UP = 10
"""Tolerances of one operation that errors may pile up to over a whole run, where no led run can tell."""

SAME_LOGITS = 1e-5
"""Gap below which two candidates with equal logits may still change places: log-softmax rounds too."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What is asked: ``name`` of the row, its token ids, and the most tokens of the answer."""

    name: str | int
    tokens: tuple[int, ...]
    budget: int


@dataclasses.dataclass(frozen=True)
class Isolated:
    """One operation on the JAX run's inputs: how its result differs, what the numbers say (``hint``), what
    was expected and found, and the stage's tensors ``before`` it, among which its inputs are."""

    difference: Difference
    hint: str
    expected: Recorded
    found: np.ndarray
    before: dict[str, Recorded]


class Checker:
    """Compares a torch run of ``target`` and ``draft`` on ``adapter`` with stages of the JAX run.

    ``dtype``: of the computation, by which tolerances are chosen. ``operations`` and ``free`` collect the
    largest errors of the led and the free runs. Raises what ``TorchRunner`` does.
    """

    def __init__(
        self,
        target: TorchTarget,
        draft: TorchDraft,
        adapter: DeviceAdapter,
        *,
        dtype: str,
        eos_ids: Sequence[int] = (),
    ) -> None:
        self.dtype, self.tie = dtype, TIE[dtype]
        self._watcher = Watcher(dtype)
        self._runner = TorchRunner(target, draft, adapter, record=self._watcher)
        self._eos = tuple(eos_ids)
        self._explained: dict[tuple[str, str], float] = {}
        self._started = False
        self.operations: dict[tuple[str, str], Worst] = {}
        self.free: dict[tuple[str, str], Worst] = {}

    def check(self, prompt: Prompt, stages: Iterable[Stage]) -> PromptResult:
        """Compare one prompt's run up to its end or its first fault."""
        state: State | None = self._runner.start([prompt.budget], len(prompt.tokens) + prompt.budget)
        result = PromptResult(prompt.name, len(prompt.tokens))
        first, self._started = not self._started, True
        for stage in stages:
            assert state is not None
            count = int(stage.value("verify", "count"))
            result.tokens += stage.value("verify", "tokens")[:count].tolist()
            result.stages += 1
            deep = first and stage.index < (DEEP_ROUNDS if stage.stage == "round" else 1)
            try:
                state = self._stage(prompt, stage, state, result, deep)
            except LimitError as error:
                result.findings.append(Finding("refused", prompt.name, stage.name, text=str(error)))
                state = None
            if state is None:
                return result
        result.complete = True
        return result

    def isolate(self, prompt: Prompt, stages: Iterable[Stage], name: str) -> Isolated:
        """The stage of tensor ``name`` alone, led; nothing before it is run.

        Raises ConfigError where the stages do not have it.
        """
        place, emitted = parse(name), 0
        wanted = f"{place.stage}/{place.index}"
        for stage in stages:
            if stage.name == wanted:
                break
            emitted += int(stage.value("verify", "count"))
        else:
            raise ConfigError(f"prompt {prompt.name!r} has no stage {wanted}")
        details, committed = stage.everything(), stage.committed()
        if details is None or committed is None or name not in details:
            raise ConfigError(
                f"the recording has no {name}: it keeps intermediate tensors of its first stages"
            )
        state = _lead_state(
            self._runner.start([prompt.budget], len(prompt.tokens) + prompt.budget), committed
        )
        assert state.draft_cache is not None
        length = committed.keys["target"][0].shape[2]
        for cache in (state.cache, state.draft_cache):
            cache.lengths = torch.full_like(cache.lengths, length)
        state.emitted = torch.full_like(state.emitted, emitted)
        state.stages[place.stage] = place.index
        if stage.stage == "round":
            state.root = torch.full_like(state.root, int(stage.value("tree", "tokens")[0]))
        self._watcher.keep = name
        self._run(prompt, stage, state, details)
        if name not in self._watcher.differences or self._watcher.kept is None:
            raise ConfigError(f"the torch run computes no {name}")
        before = {x: details[x] for x in list(details)[: list(details).index(name)]}
        return Isolated(
            self._watcher.differences[name],
            self._watcher.hints.get(name, ""),
            details[name],
            self._watcher.kept,
            before,
        )

    def _stage(
        self, prompt: Prompt, stage: Stage, state: State, result: PromptResult, deep: bool
    ) -> State | None:
        """The state after ``stage``; None where the comparison of this prompt ends."""
        before = _fork(state)
        self._run(prompt, stage, state, None)
        decision = first_decision(stage, self._watcher.found)
        suspects = self._suspects(stage, decision)
        if decision is None and not suspects and not deep:
            return state
        details, committed = stage.everything(), stage.committed()
        if details is None or committed is None:
            finding = self._judge_blindly(prompt, stage, decision, suspects)
            result.findings += [] if finding is None else [finding]
            return state if finding is None else None
        fault = self._judge_caches(prompt, stage, before, committed)
        led = _lead_state(before, committed)
        if fault is None:
            self._run(prompt, stage, led, details)
            fault = self._judge_led(prompt, stage, details)
        if fault is not None:
            result.findings.append(fault)
            return None
        for suspect in suspects:
            key = _key(suspect.name)
            self._explained[key] = max(self._explained.get(key, 0.0), suspect.relative)
        if decision is None:
            return state
        finding = self._judge_decision(prompt, decision)
        result.findings.append(finding)
        return led if finding.kind == "near_tie" else None

    def _run(self, prompt: Prompt, stage: Stage, state: State, lead: dict[str, Recorded] | None) -> None:
        self._watcher.begin(lead, stage.extent)
        if stage.stage == "round":
            self._runner.round(state, self._eos)
            return
        begin = int(state.cache.lengths[0])
        end = begin + stage.chunk
        self._runner.prefill(
            state,
            [prompt.tokens[begin:end]],
            [prompt.tokens[begin + 1 : end + 1]],
            [end == len(prompt.tokens)],
            self._eos,
        )

    def _suspects(self, stage: Stage, decision: Decision | None) -> list[Difference]:
        """Tensors of the free run whose errors no led run has explained yet; those that follow from another
        decision are not looked at."""
        suspects = []
        for name, expected in stage.tensors.items():
            place = parse(name)
            if decision is not None and follows(place, parse(decision.name)):
                continue
            if place.part in ("tree", "verify") and place.operation != "scores":
                continue  # choices, which first_decision judges
            allowed = tolerance(self.dtype, place)
            found = difference(place, expected, self._watcher.found[name], stage.extent, allowed)
            if not found.exact:
                _note(self.free, found)
            if not found.relative <= max(allowed, 2 * self._explained.get(_key(name), 0.0)):
                suspects.append(found)
        return suspects

    def _judge_caches(
        self, prompt: Prompt, stage: Stage, before: State, committed: Committed
    ) -> Finding | None:
        """The first layer whose committed keys or values are not the JAX run's, rounding aside."""
        bound = PILED_UP * TOLERANCE[self.dtype]
        for place, expected, held in _cached(stage, before, committed):
            length = expected.shape[2]
            # As [1, slots, heads, d], like the tensors that were written.
            a, b = (x.transpose(0, 2, 1, 3) for x in (expected, to_numpy(held[:, :, :length])))
            found = difference(place, Recorded.of(a), b, Extent(None, 0, length), bound)
            if found.wrong_rows:
                return Finding(
                    "fault",
                    prompt.name,
                    str(place),
                    difference=found,
                    tolerance=bound,
                    text=f"this is the cache as it was before {stage.name}; its rows are slots",
                    hint="operations of earlier stages were right, so it is where keys and values are "
                    "written, moved (commit) or counted (lengths)",
                )
        return None

    def _judge_led(self, prompt: Prompt, stage: Stage, details: dict[str, Recorded]) -> Finding | None:
        """The first operation that is wrong on equal inputs; its hint counts the others."""
        wrong = []
        for name in details:
            found = self._watcher.differences.get(name)
            if found is None:
                text = "the torch run computes no such tensor in this stage"
                return Finding("fault", prompt.name, name, text=text)
            if not found.exact:
                _note(self.operations, found)
            if found.wrong_rows and not self._rounds_apart(stage, parse(name)):
                wrong.append(found)
        if not wrong:
            return None
        first, others = wrong[0], [x.name for x in wrong[1:]]
        hints = [self._watcher.hints.get(first.name, "")]
        if others:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            hints.append(f"also wrong on equal inputs: {', '.join(others[:3])}{more}")
        return Finding(
            "fault",
            prompt.name,
            first.name,
            difference=first,
            tolerance=0.0 if first.exact else tolerance(self.dtype, parse(first.name)),
            text="all that it is computed from is equal to the JAX run's",
            hint="; ".join(filter(None, hints)),
        )

    def _rounds_apart(self, stage: Stage, place: Place) -> bool:
        """Whether a choice among equal logits differs by the rounding of their log-softmax alone."""
        if place.part != "tree":
            return False
        decision = first_decision(stage, self._watcher.found)
        return decision is not None and decision.gap <= SAME_LOGITS

    def _judge_decision(self, prompt: Prompt, decision: Decision) -> Finding:
        near = decision.gap <= self.tie
        text = "every operation is right on equal inputs, " + (
            "and the candidates are closer than rounding moves them"
            if near
            else "yet the candidates are further apart than a near tie: errors pile up over the stages"
        )
        kind = "near_tie" if near else "fault"
        return Finding(kind, prompt.name, decision.name, decision=decision, tolerance=self.tie, text=text)

    def _judge_blindly(
        self, prompt: Prompt, stage: Stage, decision: Decision | None, suspects: list[Difference]
    ) -> Finding | None:
        """Without the stage's intermediate tensors, by the size of what differs alone."""
        note = f"no intermediate tensors of {stage.name} were recorded; record more rounds to locate it"
        bound = PILED_UP * TOLERANCE[self.dtype]
        for suspect in suspects:
            if suspect.exact or not suspect.relative <= bound:
                return Finding(
                    "fault",
                    prompt.name,
                    suspect.name,
                    difference=suspect,
                    tolerance=0.0 if suspect.exact else bound,
                    text=note,
                )
        if decision is None:
            return None
        near = decision.gap <= self.tie
        text = "judged by its gap alone, and compared no further: " + note if near else note
        kind = "near_tie" if near else "fault"
        return Finding(kind, prompt.name, decision.name, decision=decision, tolerance=self.tie, text=text)


def _key(name: str) -> tuple[str, str]:
    place = parse(name)
    return place.part, place.operation


def _note(table: dict[tuple[str, str], Worst], found: Difference) -> None:
    table.setdefault(_key(found.name), Worst(found.name, 0.0, 0.0, 0)).take(found)


def _cached(
    stage: Stage, state: State, committed: Committed
) -> Iterator[tuple[Place, np.ndarray, torch.Tensor]]:
    """Every layer's keys and values: their place, what JAX's cache holds of them, and the cache at hand."""
    for part, model, cache in (("target", "target", state.cache), ("observe", "draft", state.draft_cache)):
        assert cache is not None
        for layer in range(len(cache.k)):
            for operation, known, held in (
                ("k", committed.keys[model], cache.k),
                ("v", committed.values[model], cache.v),
            ):
                place = Place(stage.stage, stage.index, part, operation, layer=layer)
                yield place, known[layer], held[layer]


def _fork(state: State) -> State:
    """The same state apart from what a stage assigns. The caches' arrays are shared: what a stage writes
    stands behind the lengths, where nothing is read that the same stage has not written."""

    def cache(c: Cache | None) -> Cache | None:
        return None if c is None else dataclasses.replace(c, k=list(c.k), v=list(c.v))

    target = cache(state.cache)
    assert target is not None
    return dataclasses.replace(
        state, cache=target, draft_cache=cache(state.draft_cache), stages=dict(state.stages)
    )


def _lead_state(state: State, committed: Committed) -> State:
    """A copy of ``state`` whose caches and draft state are the JAX run's."""
    led = _fork(state)
    assert led.draft_cache is not None
    assert led.feature is not None
    for model, cache in (("target", led.cache), ("draft", led.draft_cache)):
        for held, known in ((cache.k, committed.keys[model]), (cache.v, committed.values[model])):
            for layer, values in enumerate(known):
                held_copy = held[layer].clone()
                held_copy[:, :, : values.shape[2]] = to_tensor(values).to(held_copy)
                held[layer] = held_copy
    led.feature = to_tensor(committed.feature).to(led.feature)
    return led
