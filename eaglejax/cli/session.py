"""Runs of several methods over the same prompts, as ``eaglejax bench`` and ``eaglejax demo`` measure them."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import eaglejax as ej
from eaglejax.api import encode_prompt
from eaglejax.cli import methods, show
from eaglejax.config import BadRow, PromptRow
from eaglejax.devices import machine
from eaglejax.errors import EaglejaxError
from eaglejax.measure import near_ties, profile, timing
from eaglejax.speculate import metrics

ROUNDS_A_CHUNK = 16
"""Rounds between two looks at the host: a bench streams to no one."""


FLOAT32_AR = "ar_float32"
"""The name under which plain decoding in float32 stands beside the session's own dtype."""


def plain_in_float32_too() -> bool:
    """Whether float32 may be the faster dtype for one token at a time: it is on some CPUs."""
    import jax

    return jax.default_backend() == "cpu"


def float32_beside(target: ej.Target) -> ej.Target | None:
    """The same model in float32, whose plain decoding can take turns with the rest and so meets the same load
    of the machine. None where float32 is no faster, or where both would not leave half of the memory free."""
    size = target.nbytes + target.nbytes * 4 // target.dtype.itemsize
    if not plain_in_float32_too() or 2 * size > machine.memory_bytes():
        return None
    assert target.source is not None
    return _as(target, ej.load_target(target.source, dtype="float32", context=target.context))


def reload_in_float32(target: ej.Target) -> ej.Target:
    """The same model in float32; the given one's weights are freed first, so both are never held."""
    import jax

    assert target.source is not None
    for leaf in jax.tree.leaves(target.params):
        leaf.delete()
    gc.collect()
    with show.status("loading the same model in float32, for the fastest plain decoding"):
        wide = ej.load_target(target.source, dtype="float32", context=target.context)
    return _as(target, wide)


def _as(target: ej.Target, wide: ej.Target) -> ej.Target:
    """``wide`` with what was asked of ``target`` beside its weights."""
    return dataclasses.replace(wide, cache_format=target.cache_format, eos_ids=target.eos_ids)


class Session:
    """Runs of several methods over the same prompts.

    Methods take turns prompt by prompt, so that a change in the machine's load meets all of them. Plain
    decoding goes first, and its answers are what later turns of a conversation see, so that all methods are
    asked the same. Every run is greedy, alone in its batch, and timed without compilation. ``decoding``:
    other fields of ``DecodeOptions``; ``own``: those of single methods, which go before. ``view``: called
    with a method's name before its run; what it returns sees the text.
    """

    def __init__(
        self,
        max_new_tokens: int,
        *,
        chat: bool = False,
        variables: Mapping[str, Any] | None = None,
        rounds_a_chunk: int = ROUNDS_A_CHUNK,
        decoding: Mapping[str, Any] | None = None,
        own: Mapping[str, Mapping[str, Any]] | None = None,
        view: Callable[[str], Callable[[str], None]] | None = None,
    ) -> None:
        self._options = {"max_new_tokens": max_new_tokens, "rounds_a_chunk": rounds_a_chunk}
        self._decoding, self._own = dict(decoding or {}), dict(own or {})
        self._chat, self._variables = chat, variables
        self._view = view
        self._asked: list[tuple[tuple[int, ...], str | None]] = []  # prompt and prediction
        self._profiles: dict[str, dict[str, Any] | None] = {}
        self._comparisons: dict[str, near_ties.Comparison] = {}
        self._errors: list[dict[str, Any]] = []
        self.answers: dict[str, list[tuple[str | int, ej.Generation]]] = {}

    def run(
        self,
        target: ej.Target,
        proposers: dict[str, Any],
        rows: Sequence[PromptRow | BadRow],
        reference: ej.Target | None = None,
    ) -> None:
        """Decode ``rows`` with every proposer; ``ar`` is among them. ``reference``: the model in float32, for
        plain decoding too."""
        tolerance = near_ties.tolerance(target)
        for name in proposers:
            self.answers[name] = []
            self._comparisons[name] = near_ties.Comparison(tolerance)
        if reference is not None:
            self.answers[FLOAT32_AR] = []
        with show.progress("measuring", len(rows)) if self._view is None else show.no_progress() as advance:
            for row in rows:
                try:
                    if isinstance(row, BadRow):
                        self._errors.append({"id": row.id, "error": row.error})
                    else:
                        self._run_row(target, proposers, row, reference)
                except EaglejaxError as error:
                    self._errors.append({"id": row.id, "error": str(error)})
                advance()

    def _run_row(
        self, target: ej.Target, proposers: dict[str, Any], row: PromptRow, reference: ej.Target | None
    ) -> None:
        texts: list[str] = []
        for turn in range(row.count):
            prompt = encode_prompt(target, row.request(texts, chat=self._chat), self._variables)
            results = {
                name: timing.timed(
                    target,
                    prompt,
                    None if self._view is None else functools.partial(self._view, name),
                    proposer=proposers[name],
                    prediction=row.predictions[turn] if methods.METHODS[name].reads_prediction else None,
                    **self._options,
                    **{**self._decoding, **self._own.get(name, {})},
                )
                for name in proposers
            }
            if reference is not None:
                result = timing.timed(reference, prompt, None, **self._options)
                self.answers[FLOAT32_AR].append((row.id, result))
            plain = results["ar"]
            self._asked.append((prompt, row.predictions[turn]))
            for name, result in results.items():
                self.answers[name].append((row.id, result))
                self._comparisons[name] = near_ties.compare(
                    self._comparisons[name], target, prompt, plain.token_ids, result.token_ids
                )
            texts.append(plain.text)

    def run_plain(self, name: str, target: ej.Target) -> None:
        """Plain decoding of the same prompts by ``target``, for its speed alone."""
        ids = [row for row, _ in self.answers["ar"]]
        self.answers[name] = []
        with show.progress(f"measuring {name}", len(ids)) as advance:
            for row, (prompt, _) in zip(ids, self._asked, strict=True):
                self.answers[name].append((row, timing.timed(target, prompt, None, **self._options)))
                advance()

    def profile(self, target: ej.Target, proposers: dict[str, Any]) -> None:
        """Measure where the time of each method's rounds goes, on the first prompt that was answered."""
        for prompt, guess in self._asked[:1]:
            with show.progress("profiling", len(proposers)) as advance:
                for name, proposer in proposers.items():
                    reads = methods.METHODS[name].reads_prediction
                    text = guess if reads else None
                    found = profile.profile(
                        target,
                        proposer,
                        prompt,
                        prediction=text and tuple(target.need_tokenizer().encode(text, special=False)),
                        **self._options,
                    )
                    self._profiles[name] = None if found is None else found.to_json()
                    advance()

    def _total(self, name: str) -> metrics.Stats:
        return metrics.total(answer.stats for _, answer in self.answers[name])

    @property
    def best_ar(self) -> str:
        """The fastest plain decoding: ``ar``, or ``ar_float32``."""
        plain = [name for name in ("ar", FLOAT32_AR) if name in self.answers]
        return max(plain, key=lambda name: self._total(name).tokens_per_second)

    @property
    def sound(self) -> bool:
        """No prompt failed and no text was wrong."""
        return not self._errors and all(c.identical for c in self._comparisons.values())

    def report(self) -> dict[str, Any]:
        """``methods``, ``best_ar`` and ``errors`` of what ``bench --json`` prints."""
        best = self._total(self.best_ar).tokens_per_second
        table: dict[str, Any] = {}
        for name, answers in self.answers.items():
            total, comparison = self._total(name), self._comparisons.get(name)
            table[name] = {
                **total.to_json(),
                "answers": len(answers),
                "seconds": total.seconds,
                "speedup_vs_best_ar": total.tokens_per_second / best if best else 0.0,
                # Another dtype is another model, whose text is its own.
                **(comparison.to_json() if comparison else {"identical_to_ar": None}),
            }
            if name in self._profiles:
                table[name]["profile"] = self._profiles[name]
        return {"methods": table, "best_ar": self.best_ar, "errors": self._errors}


def machine_report(target_dtype: str) -> dict[str, Any]:
    """The ``machine`` object of bench and demo: where the figures come from, and the most memory it took."""
    peak = round(machine.peak_memory_bytes() / machine.GIB, 2)
    return {**machine.describe(), "dtype": target_dtype, "peak_memory_gib": peak}
