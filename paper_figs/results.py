"""What figures are drawn from: the results of experiments, and published numbers."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eaglejax.errors import ConfigError
from experiments import record

PUBLISHED = Path(__file__).parent / "published.toml"

_EVALUATE = (
    "python -m experiments.evaluate --config experiments/{study}/evaluate.toml --draft DRAFT --suites FILES"
)
_SWEEP = (
    "python -m experiments.sweep --config experiments/{study}/{name}.toml "
    "'data.train=[{{path=\"FILE\"}}]' out=RUNS"
)
_SCORE = "python -m experiments.quantization.{name} --answers FILE --suites FILES"
COMMANDS = {
    "demo_draft": _EVALUATE,
    "eagle1": _EVALUATE,
    "data_scaling": _SWEEP,
    "draft_shape": _SWEEP,
    "rotation": "python -m experiments.rotation.ladder --draft DRAFT --prompts FILE",
    "quantization/acceptance": _SCORE,
    "quantization/outliers": _SCORE,
    "quantization/speed": "python -m experiments.quantization.speed --prompts FILE",
    "quantization/retrained": "python -m experiments.quantization.retrained --runs RUN RUN --suites FILES",
}
"""Study, or study and result -> the command that makes it."""


@dataclasses.dataclass(frozen=True)
class Results:
    """The results below ``root``, by study and name."""

    root: Path = record.ROOT

    def need(self, study: str, name: str) -> dict[str, Any]:
        """One result's ``figures``. Raises ConfigError with the command that makes it where it is missing."""
        path = record.results_folder(study, self.root) / f"{name}.json"
        if not path.is_file():
            command = COMMANDS.get(f"{study}/{name}") or COMMANDS[study]
            raise ConfigError(f"{path} is missing; make it with: {command.format(study=study, name=name)}")
        return record.read(path)["figures"]

    def study(self, study: str, example: str) -> dict[str, dict[str, Any]]:
        """The ``figures`` of all results of a study; ``example``: the one to make where there is none."""
        found = {name: result["figures"] for name, result in record.read_study(study, self.root).items()}
        return found or {example: self.need(study, example)}


def published(kind: str) -> list[dict[str, Any]]:
    """Published entries of a kind ("tau", "n_alpha", "data_scaling"), each with ``label`` and ``source``.

    Raises ConfigError for an entry whose source is not stated.
    """
    table = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))
    entries = []
    for entry in table[kind]:
        if entry["source"] not in table["sources"]:
            raise ConfigError(f"{PUBLISHED}: source {entry['source']!r} is not among [sources]")
        source = table["sources"][entry["source"]]
        where = f"{source['short']}, {entry['where']}"
        how = ", read off the figure" if entry.get("reading") else ""
        label = f"theirs: {entry['method']}, {entry['model']} ({where}{how})"
        entries.append({**entry, "label": label, "citation": source["citation"]})
    return entries


def standard_error(run: Mapping[str, Any]) -> float:
    """Of a run's tau, were its rounds independent: their number is ``target_forwards``, or follows from
    ``tokens`` and ``tau``; the variance of the accepted tokens X of a round follows from P(X >= k), which
    ``per_position_acceptance_rate`` holds."""
    rates = run["per_position_acceptance_rate"]
    rounds = run["target_forwards"] if "target_forwards" in run else run["tokens"] / run["tau"]
    mean = math.fsum(rates)
    square = math.fsum((2 * k - 1) * rate for k, rate in enumerate(rates, start=1))
    return math.sqrt(max(square - mean**2, 0.0) / rounds)
