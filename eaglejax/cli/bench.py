"""``eaglejax bench``: speed and acceptance of methods, beside the fastest plain decoding of the session."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import eaglejax as ej
from eaglejax.api import encode_prompt
from eaglejax.cli import methods, show
from eaglejax.config import (
    BadRow,
    PromptRow,
    SpeculativeConfig,
    parse_speculative_config,
    parse_template_kwargs,
    read_prompts,
)
from eaglejax.devices import machine
from eaglejax.drafts.eagle.files.read import AuxConvention
from eaglejax.errors import ConfigError, EaglejaxError
from eaglejax.measure import near_ties, profile, timing
from eaglejax.speculate import metrics

ROUNDS_A_CHUNK = 16
"""Rounds between two looks at the host: a bench streams to no one."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """Decode every prompt greedily with each method, one at a time, and compare."""

    target: str
    """The model: `demo`, a folder, a .gguf file or a Hub id."""
    prompts: str
    """A JSON Lines file, see `eaglejax generate`."""
    methods: str | None = None
    """Methods with commas between them; plain decoding (ar) is always among them. Default: ngram, or what the
    draft is (eagle or draft_model)."""
    draft: str | None = None
    """The draft of methods that have one: a folder, a Hub id or `demo`."""
    speculative_config: str | None = None
    """Settings of the method that it names, as for `eaglejax generate`."""
    aux_convention: AuxConvention | None = None
    """What layer ids in an EAGLE-3 draft's config count: hidden-state boundaries, or blocks (their output is
    meant). Default: told from the file."""
    prediction_field: str | None = None
    """The field of the prompt file that holds what the answer will mostly repeat."""
    max_new_tokens: int = 256
    """Most tokens of an answer."""
    limit: int | None = None
    """Read this many prompts at most."""
    chat: bool = False
    """Wrap plain prompts in the model's chat template; messages and turns always are."""
    chat_template_kwargs: str | None = None
    """What the chat template reads beside the messages, as for `eaglejax generate`."""
    quant: str | None = None
    """Hold the target's weights in 8 or 4 bits, as for `eaglejax generate`; float32 is not measured then."""
    context: int | None = None
    """Longest sequence, prompt and answer together. Default: what the model was made for."""
    eos: tuple[str, ...] = ()
    """Further tokens, texts or ids, that end every text, for models whose files name none."""
    dtype: str | None = None
    """Measure in this dtype alone. Default: bfloat16, and on a CPU plain decoding in float32 too."""
    kv_cache_dtype: str | None = None
    """Keys and values of the target, as for `eaglejax generate`, in plain decoding and with drafts."""
    draft_kv_cache_dtype: str | None = None
    """Keys and values of the draft, as for `eaglejax generate`."""
    profile: bool = False
    """Measure too where a round's time goes (draft, verification, host), on the first prompt."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else there."""

    def run(self) -> int:
        """The command. Exit status 1 when a prompt failed or a text is not plain decoding's."""
        configs = self._configs()
        if self.max_new_tokens < 1:
            raise ConfigError(f"--max-new-tokens is {self.max_new_tokens}; it must be 1 or more")
        variables = parse_template_kwargs(self.chat_template_kwargs)
        rows = read_prompts(self.prompts, prediction_field=self.prediction_field, limit=self.limit)
        with show.status(f"loading {self.target}"):
            target = methods.with_cache(
                ej.load_target(
                    self.target,
                    dtype=self.dtype,
                    context=self.context,
                    quant=self.quant,
                    eos=methods.token_names(self.eos),
                ),
                self.kv_cache_dtype,
            )
            proposers = {name: methods.proposer_from(target, config) for name, config in configs.items()}
            # A model with quantised weights is another one than its float32 form.
            wide = self.dtype is None and self.quant is None
            reference = float32_beside(target) if wide else None
        dtype = target.dtype.name
        session = Session(self.max_new_tokens, chat=self.chat, variables=variables)
        session.run(target, proposers, rows, reference)
        if self.profile:
            session.profile(target, proposers)
        if wide and reference is None and plain_in_float32_too():
            del proposers
            target = reload_in_float32(target)
            session.run_plain(FLOAT32_AR, target)
        report = {**session.report(), "machine": machine_report(dtype)}
        if self.json:
            show.print_json(report)
        else:
            console = show.stderr()
            title = f"{self.target}, {session.best_ar} is the fastest AR"
            console.print(show.stats_table(title, report["methods"]))
            if self.profile:
                console.print(show.profile_table("where a round's time goes", report["methods"]))
        for error in report["errors"]:
            show.print_error(f"prompt {error['id']}: {error['error']}")
        return 0 if session.sound else 1

    def _configs(self) -> dict[str, SpeculativeConfig]:
        given = None if self.speculative_config is None else parse_speculative_config(self.speculative_config)
        if given is not None and given.model not in (None, self.draft):
            raise ConfigError(f"--speculative-config names the draft {given.model!r}; use --draft for it")
        if given is not None:
            given = dataclasses.replace(given, method=methods.method_name(given.method))
        if self.methods is not None:
            names = [methods.method_name(name.strip()) for name in self.methods.split(",")]
        else:
            names = [given.method if given else methods.method_for(self.draft) if self.draft else "ngram"]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ConfigError(f"--methods names {min(repeated)!r} twice")
        chosen = {name: methods.method_named(name) for name in dict.fromkeys(["ar", *names])}
        if self.draft is not None and not any(m.needs_draft for m in chosen.values()):
            raise ConfigError(
                f"none of the methods {', '.join(names)} uses a draft, but --draft is {self.draft!r}"
            )
        predicts = any(m.reads_prediction for m in chosen.values())
        if predicts != (self.prediction_field is not None):
            raise ConfigError(
                "method 'prediction' and --prediction-field go together: the field holds what it drafts from"
            )
        if given is not None and given.method not in chosen:
            raise ConfigError(
                f"--speculative-config sets up {given.method!r}, which is not among {', '.join(names)}"
            )
        configs = {}
        for name, method in chosen.items():
            config = given if given is not None and given.method == name else SpeculativeConfig(name)
            if method.needs_draft:
                config = dataclasses.replace(config, model=self.draft)
            if self.aux_convention is not None and "aux_convention" in method.settings:
                config = dataclasses.replace(config, aux_convention=self.aux_convention)
            if self.draft_kv_cache_dtype is not None and method.needs_draft:
                config = dataclasses.replace(config, kv_cache_dtype=self.draft_kv_cache_dtype)
            configs[name] = config
        if self.aux_convention is not None and not any(c.aux_convention for c in configs.values()):
            raise ConfigError(f"none of the methods {', '.join(names)} reads layers by an aux convention")
        if self.draft_kv_cache_dtype is not None and not any(c.kv_cache_dtype for c in configs.values()):
            raise ConfigError(f"none of the methods {', '.join(names)} has a draft with a cache")
        for config in configs.values():
            methods.check_config(config)
        return configs


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
    asked the same. Every run is greedy, alone in its batch, and timed without compilation. ``view``: called
    with a method's name before its run; what it returns sees the text.
    """

    def __init__(
        self,
        max_new_tokens: int,
        *,
        chat: bool = False,
        variables: Mapping[str, Any] | None = None,
        rounds_a_chunk: int = ROUNDS_A_CHUNK,
        view: Callable[[str], Callable[[str], None]] | None = None,
    ) -> None:
        self._options = {"max_new_tokens": max_new_tokens, "rounds_a_chunk": rounds_a_chunk}
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
