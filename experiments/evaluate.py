"""Acceptance of a draft on suites of prompts, as results that figures are drawn from.

    python -m experiments.evaluate --config experiments/demo_draft/evaluate.toml --draft DRAFT \\
        --suites mt_bench.jsonl gsm8k.jsonl

One result a condition (greedy or sampled, tree or chain): tau, acceptance by position and n-alpha in the
definitions of ``eaglejax.speculate.metrics``, over each suite, each language (the rows' ``lang``) and all,
with a hash of all token ids. With ``--check`` nothing is written: the run must give the recorded tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro

import eaglejax as ej
from eaglejax.cli import show
from eaglejax.cli.answers import answer_rows
from eaglejax.cli.run import run_command
from eaglejax.config import BadRow, PromptRow, read_prompts
from eaglejax.drafts.base import Bound
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.registry import load_draft
from eaglejax.drafts.tree import DynamicTree, StaticTree, chain
from eaglejax.errors import ConfigError
from eaglejax.jsonl import parse_object, read_lines
from eaglejax.speculate import metrics
from eaglejax.train.features import fingerprint
from eaglejax.train.settings import parse, read_toml
from eaglejax.train.sweep import draft_digest
from experiments import record

COUNTS = ("num_tokens", "target_forwards", "num_accepted_tokens", "num_draft_tokens")
RATES = ("mean_acceptance_length", "per_position_acceptance_rate", "n_alpha")


@dataclasses.dataclass(frozen=True)
class EvaluateSettings:
    """``temperatures``: one condition each, 0 is greedy; ``seed``: of the first row of a suite, each next one
    has the next. ``tree_nodes`` (0: no tree), ``tree_depth``, ``tree_branching``: a dynamic tree, as
    ``DynamicTree`` counts; ``chain_length`` (0: no chain): a chain of that many drafts. ``limit``: first rows
    of a suite that are asked (None: all). Plain prompts go through the chat template when ``chat`` says so;
    turns always do."""

    target: str = "demo"
    dtype: str | None = None
    temperatures: tuple[float, ...] = (0.0, 1.0)
    seed: int = 0
    tree_nodes: int = 16
    tree_depth: int = 5
    tree_branching: int = 4
    chain_length: int = 5
    max_new_tokens: int = 128
    limit: int | None = None
    chat: bool = False
    batch_size: int = 8

    def shapes(self) -> dict[str, DynamicTree | StaticTree]:
        """The draft shapes by name. Raises ConfigError for none."""
        out: dict[str, DynamicTree | StaticTree] = {}
        if self.tree_nodes:
            out["tree"] = DynamicTree(self.tree_depth, self.tree_branching, self.tree_nodes)
        if self.chain_length:
            out["chain"] = chain(self.chain_length)
        if not out or not self.temperatures:
            raise ConfigError("nothing is to be measured: set tree_nodes or chain_length, and temperatures")
        return out


@dataclasses.dataclass(frozen=True)
class Suite:
    """A file of prompts: ``rows`` and the language of each; ``digest``: of the file's bytes."""

    name: str
    digest: str
    rows: list[PromptRow]
    languages: list[str]


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Measure what a draft accepts on suites of prompts."""

    config: Path
    """The study's `evaluate.toml`; its folder's name is the study's."""
    draft: str
    """The draft: a folder, a Hub id or `demo`."""
    suites: tuple[str, ...]
    """Prompt files in the format of `eaglejax generate`; rows may have a `lang`."""
    overrides: tyro.conf.Positional[tuple[str, ...]] = ()
    """Settings that replace those of the file, as `key=value`."""
    check: bool = False
    """Write nothing; fail where the tokens are not those on record."""
    root: Path = record.ROOT
    """Where the studies' results lie."""

    def run(self) -> int:
        """The command. Exit status 1 where a prompt failed or, with ``check``, something differs."""
        settings = parse(EvaluateSettings, read_toml(self.config, self.overrides))
        shapes = settings.shapes()
        suites = [read_suite(path, settings.limit) for path in self.suites]
        names = [suite.name for suite in suites]
        if len(set(names)) < len(names):
            raise ConfigError(f"two suites have the same name: {', '.join(sorted(names))}")
        with show.status(f"loading {settings.target}"):
            target = ej.load_target(settings.target, dtype=settings.dtype)
            bound = load_draft(self.draft, target)
        about = {
            "target": fingerprint(target),
            "draft": draft_digest(self.draft),
            "suites": {suite.name: suite.digest for suite in suites},
        }
        study, failed = self.config.resolve().parent.name, False
        for temperature in settings.temperatures:
            for name, shape in shapes.items():
                title = f"{'greedy' if temperature == 0 else f'sampled-t{temperature:g}'}-{name}"
                figures = measure(target, with_shape(bound, shape), suites, settings, temperature)
                failed |= figures["failed"] > 0
                config = {
                    **dataclasses.asdict(settings),
                    **about,
                    "temperature": temperature,
                    "shape": {"kind": name, **dataclasses.asdict(shape)},
                }
                show.print_note(f"{study}/{title}: tau {figures['all']['mean_acceptance_length']:.3f}")
                if self.check:
                    failed |= not self._same(study, title, config, figures)
                else:
                    record.record(
                        study,
                        title,
                        command=record.command(
                            "evaluate",
                            f"{study}/{self.config.name}",
                            *(shlex.quote(text) for text in self.overrides),
                            f"--draft DRAFT --suites {' '.join(f'{n}.jsonl' for n in names)}",
                        ),
                        config=json.loads(json.dumps(config)),
                        seed=settings.seed,
                        figures=figures,
                        root=self.root,
                    )
        return 1 if failed else 0

    def _same(self, study: str, name: str, config: Mapping[str, Any], figures: Mapping[str, Any]) -> bool:
        """Whether the record says the same; what differs goes to stderr."""
        found = record.read(record.results_folder(study, self.root) / f"{name}.json")
        config = json.loads(json.dumps(config))
        wrong = [
            k for k in sorted(set(config) | set(found["config"])) if config.get(k) != found["config"].get(k)
        ]
        if wrong:
            raise ConfigError(f"{study}/{name} was recorded under other settings: {', '.join(wrong)} differ")
        differ = [k for k in figures if figures[k] != found["figures"].get(k)]
        for key in differ:
            show.print_error(
                f"{study}/{name}: {key} is {figures[key]!r}, on record {found['figures'].get(key)!r}"
            )
        return not differ


def read_suite(path: str, limit: int | None) -> Suite:
    """Rows and their languages. Raises ConfigError for a row that cannot be asked."""
    rows = read_prompts(path, limit=limit)
    lines = itertools.islice(read_lines(path), len(rows))
    for row in rows:
        if isinstance(row, BadRow):
            raise ConfigError(row.error)
    languages = [str(parse_object(line).get("lang", "unknown")) for _, line in lines]
    good = [row for row in rows if isinstance(row, PromptRow)]
    return Suite(Path(path).stem, hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32], good, languages)


def with_shape(bound: Bound, shape: DynamicTree | StaticTree) -> Bound:
    """The same draft on another tree."""
    assert isinstance(bound.proposer, Eagle)
    return Bound(dataclasses.replace(bound.proposer, tree=shape), bound.params)


def measure(
    target: ej.Target, bound: Bound, suites: Sequence[Suite], settings: EvaluateSettings, temperature: float
) -> dict[str, Any]:
    """The ``figures`` of one condition."""
    by_suite: dict[str, list[metrics.Stats]] = {}
    by_language: dict[str, list[metrics.Stats]] = {}
    ids, errors = hashlib.sha256(), []
    with show.progress("answering", sum(len(s.rows) for s in suites)) as advance:
        for suite in suites:
            for at in range(0, len(suite.rows), settings.batch_size):
                rows = suite.rows[at : at + settings.batch_size]
                answers = answer_rows(
                    target,
                    rows,
                    chat=settings.chat,
                    predicts=False,
                    speculation="fixed",
                    sampling=[
                        ej.Sampling(temperature=temperature, seed=settings.seed + at + n)
                        for n in range(len(rows))
                    ],
                    proposer=bound,
                    max_new_tokens=settings.max_new_tokens,
                    batch_size=settings.batch_size,
                )
                for n, (row, turns) in enumerate(zip(rows, answers, strict=True)):
                    for answer in turns:
                        if answer.error:
                            errors.append({"suite": suite.name, "id": row.id, "error": answer.error})
                        by_suite.setdefault(suite.name, []).append(answer.stats)
                        by_language.setdefault(suite.languages[at + n], []).append(answer.stats)
                        ids.update(np.asarray(answer.token_ids, "<i4").tobytes() + b"|")
                    advance()
    for error in errors:
        show.print_error(f"{error['suite']}, prompt {error['id']}: {error['error']}")
    return {
        "all": summary([s for stats in by_suite.values() for s in stats]),
        "suites": {name: summary(stats) for name, stats in by_suite.items()},
        "languages": {name: summary(stats) for name, stats in sorted(by_language.items())},
        "failed": len(errors),
        "token_hash": ids.hexdigest(),
    }


def summary(stats: Sequence[metrics.Stats]) -> dict[str, Any]:
    """What is recorded of some answers: counts and rates, no times."""
    total = metrics.total(stats)
    return {"answers": len(stats), **{name: getattr(total, name) for name in (*RATES, *COUNTS)}}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    return run_command(Evaluate, argv)


if __name__ == "__main__":
    sys.exit(main())
