"""From settings to everything that a run needs: samples, and the draft's configuration and first weights as
its family makes them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from eaglejax.drafts.registry import read_draft
from eaglejax.errors import ConfigError
from eaglejax.models.target import Target
from eaglejax.train import curate
from eaglejax.train.family import Draft, Remember, make_anew
from eaglejax.train.logs import import_wandb
from eaglejax.train.registry import OBJECTIVES, training_by
from eaglejax.train.samples import Report, Sample, read_samples
from eaglejax.train.settings import STARTS, DataSettings, TrainSettings


@dataclasses.dataclass(frozen=True)
class Data:
    """Samples to train on and to validate on, none longer than a packed row, and what was left out.
    ``prompts``: of those to validate on, uncut, the ones whose prompt the target can be asked."""

    train: list[Sample]
    validation: list[Sample]
    report: Report
    prompts: list[Sample] = dataclasses.field(default_factory=list)


def prepare_data(settings: DataSettings, target: Target) -> Data:
    """Read, curate, split and cut the files that the settings name."""
    tokenizer = target.need_tokenizer()
    if settings.row_tokens > target.context:
        raise ConfigError(
            f"data.row_tokens is {settings.row_tokens}; texts of more than the target's context of "
            f"{target.context} tokens have no features that serving would see"
        )
    report = Report()
    sources: dict[str, list[Sample]] = {}
    for source in settings.train:
        found, one = read_samples(
            source.path, tokenizer, vocab_size=target.config.vocab_size, limit=source.limit
        )
        report.rows += one.rows
        for reason, count in one.dropped.items():
            report.drop(reason, one.first[reason], count)
        sources.setdefault(source.path, []).extend(found)
    every = [s for samples in sources.values() for s in samples]
    if settings.deduplicate != "none":
        every = curate.deduplicate(every, report, by=settings.deduplicate)
    if settings.decontaminate:
        texts = [t for path in settings.decontaminate for t in curate.evaluation_texts(path)]
        every = curate.decontaminate(every, curate.Contamination(texts), tokenizer, report)
    train, validation = curate.split_validation(every, settings.validation)
    if settings.mix:
        kept = {id(s) for s in train}
        parts = {path: [s for s in samples if id(s) in kept] for path, samples in sources.items()}
        weights = {source.path: source.weight for source in settings.train}
        train = curate.mix(parts, weights, seed=settings.seed, total=settings.total)
        origin = {id(s): path for path, samples in parts.items() for s in samples}
        taken = Counter(origin[id(s)] for s in train)
        report.notes += [
            f"{path} is gone through {taken[path] / len(samples):.2f} times"
            for path, samples in parts.items()
            if taken[path] > len(samples)
        ]

    if settings.supervise == "all":
        train = [dataclasses.replace(s, supervised=np.ones_like(s.supervised)) for s in train]

    def cut(samples: Sequence[Sample]) -> list[Sample]:
        return [w for s in samples for w in curate.windows(s, settings.row_tokens, settings.overlap)]

    prompts = [s for s in validation if 0 < len(s.prompt) < target.context]
    train, validation = cut(train), cut(validation)
    if not train:
        raise ConfigError(
            "no sample is left to train on: " + ("; ".join(report.lines()) or "all were held out")
        )
    return Data(train, validation, report, prompts)


def check_run(settings: TrainSettings, data: Data) -> None:
    """Raise ConfigError for a run that could not begin: without prompts for evaluations that are to decode
    some, or without the package that it is to log to."""
    if settings.run.wandb:
        import_wandb()
    if settings.run.decode_prompts and not data.prompts:
        raise ConfigError(
            f"run.decode_prompts is {settings.run.decode_prompts}, and no prompt is held out to be decoded; "
            "raise data.validation, or set run.decode_prompts to 0"
        )


def planned_config(settings: TrainSettings, target: Target) -> Any:
    """The configuration of the draft that the settings ask for, without its weights.

    Raises ConfigError where they ask of an existing draft what it is not, and for a start that this draft
    cannot have from this target.
    """
    return training_by(settings.objective).planned(settings, target, _read_existing(settings))


def prepare_draft(
    settings: TrainSettings, target: Target, data: Data, *, remember: Remember = make_anew
) -> Draft:
    """The draft that the settings ask for, new or going on from an existing one.

    ``remember`` keeps what several drafts on the same text can share.
    """
    family, file = training_by(settings.objective), _read_existing(settings)
    config = family.planned(settings, target, file)
    return family.prepare(config, settings, target, data.train, file, remember)


def _read_existing(settings: TrainSettings) -> Any:
    """The file of the draft to go on from, with the boundaries that the settings name, if they do; None for
    a new draft."""
    start = settings.draft.start
    if start in STARTS:
        return None
    method = training_by(settings.objective).method
    family, file = read_draft(start, method=method, aux=settings.draft.aux or None)
    if family.name not in OBJECTIVES:
        raise ConfigError(
            f"{start} holds a {family.name}, which there is no objective to train with; go on from a draft "
            f"of the kind {' or '.join(OBJECTIVES)}"
        )
    if settings.objective.algorithm not in OBJECTIVES[family.name].algorithms:
        raise ConfigError(
            f"{start} holds a {family.name}, which objective.algorithm {settings.objective.algorithm!r} does "
            f"not train; use one of {', '.join(OBJECTIVES[family.name].algorithms)}"
        )
    return file
