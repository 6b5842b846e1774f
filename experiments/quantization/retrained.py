"""A draft trained on a quantised target's features against its twin trained on the float target's.

    python -m experiments.quantization.retrained --runs RUN RUN --suites humaneval.jsonl mt_bench.jsonl

The runs are of ``experiments/quantization/retrained.toml``, or any two whose settings differ in
``target_quant`` alone. Both drafts decode the first questions of the suites on the float target and on the
quantised one; over one target both are asked for the same text, so that tau compares the drafts.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import eaglejax as ej
from eaglejax.cli import show
from eaglejax.cli.run import run_command
from eaglejax.drafts.registry import load_draft
from eaglejax.drafts.tree import DynamicTree
from eaglejax.errors import ConfigError
from eaglejax.train.settings import TrainSettings, load_settings
from eaglejax.train.sweep import draft_digest
from experiments import record
from experiments.evaluate import read_suite
from experiments.quantization.acceptance import accepted, placeless, told
from experiments.quantization.growing import GrowingResult
from experiments.sweep import without_places

CONFIG, DRAFT = "config.toml", "draft"
"""What a finished run's folder holds: its settings and its draft."""


@dataclasses.dataclass(frozen=True)
class Retrained:
    """Compare a draft trained on a quantised target's features with one trained on the float target's."""

    runs: tuple[str, str]
    """Folders of the two finished runs."""
    suites: tuple[str, ...]
    """Prompt files; of a conversation the first question is asked."""
    limit: int = 10
    """Questions of each suite."""
    max_new_tokens: int = 64
    """Of each answer."""
    tree_nodes: int = 16
    """Tokens that the target verifies a round."""
    tree_depth: int = 5
    """Most drafts that a round accepts."""
    tree_branching: int = 10
    """Nodes expanded at a level, and children of each."""
    name: str = "retrained"
    """Of the result."""
    root: Path = record.ROOT
    """Where the studies' results lie."""

    def run(self) -> int:
        """The command. Exit status 1 where a text is not plain decoding's."""
        settings = twins(self.runs)
        drafts = {one.target_quant or "float": str(Path(run) / DRAFT) for run, one in settings.items()}
        suites = [read_suite(path, self.limit) for path in self.suites]
        names = ("limit", "max_new_tokens", "tree_nodes", "tree_depth", "tree_branching", "name")
        options = {name: getattr(self, name) for name in names}
        words = [f"--{key.replace('_', '-')} {value}" for key, value in options.items()]
        words.append(f"--suites {' '.join(f'{suite.name}.jsonl' for suite in suites)}")
        shared = next(iter(settings.values()))
        training = without_places(shared)
        del training["target_quant"]
        config = {
            "training": training | {"target": placeless(shared.target)},
            "drafts": {name: draft_digest(path) for name, path in drafts.items()},
            "suites": {suite.name: suite.digest for suite in suites},
        }
        result = GrowingResult(
            self.name,
            command=" ".join(["python -m experiments.quantization.retrained --runs RUN RUN", *words]),
            config=options | config,
            seed=shared.run.seed,
            root=self.root,
        )
        tree = DynamicTree(self.tree_depth, self.tree_branching, self.tree_nodes)
        for kind in drafts:
            missing = {name: path for name, path in drafts.items() if not result.has(kind, name)}
            if not missing:
                continue
            with show.status(f"loading {shared.target}, {kind}"):
                quant = None if kind == "float" else kind
                target = ej.load_target(shared.target, dtype=shared.target_dtype, quant=quant)
            for name, path in missing.items():
                found = accepted(target, load_draft(path, target, tree=tree), suites, self.max_new_tokens)
                result.put(found, kind, name)
                show.print_note(f"{kind} target, draft trained on {name} features: {told(found)}")
        every = [found for row in result.figures.values() for found in row.values()]
        return 0 if all(found["identical_to_ar"] for found in every) else 1


def twins(runs: Sequence[str]) -> dict[str, TrainSettings]:
    """Settings of two runs, the float target's first. Raises ConfigError where more than ``target_quant``
    differs, or where both or none are of a quantised target."""
    settings = {run: load_settings(Path(run) / CONFIG) for run in runs}
    ordered = dict(sorted(settings.items(), key=lambda item: item[1].target_quant is not None))
    if [one.target_quant is None for one in ordered.values()] != [True, False]:
        raise ConfigError("one run must be of the float target and one of a quantised one (target_quant)")
    one, other = (dataclasses.asdict(s) for s in ordered.values())
    differ = sorted(k for k in one if k not in ("out", "target_quant") and one[k] != other[k])
    if differ:
        raise ConfigError(f"the runs differ in more than target_quant: {', '.join(differ)}")
    return ordered


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    return run_command(Retrained, argv)


if __name__ == "__main__":
    sys.exit(main())
