"""A study that trains several drafts: ``eaglejax sweep``, with its table as a result.

    python -m experiments.sweep --config experiments/draft_shape/width.toml \\
        'data.train=[{path="answers.jsonl"}]' out=runs/width

The folder of the TOML file names the study and the file the result. Where data and runs lie is said on the
command line and not recorded; file names and hashes are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from eaglejax.checkpoint.files import read_json
from eaglejax.cli import show
from eaglejax.cli.run import run_command
from eaglejax.cli.sweep import Sweep
from eaglejax.train.grid import read_sweep, short
from eaglejax.train.settings import STARTS, TrainSettings
from eaglejax.train.sweep import draft_digest
from experiments import record

PLACES = ("out", "data.train", "data.decontaminate", "draft.start", "run.features")
"""Settings that say where something lies."""


@dataclasses.dataclass(frozen=True)
class Study:
    """Train a study's drafts and record what they accept and cost."""

    config: Path
    """The study's sweep file."""
    overrides: tyro.conf.Positional[tuple[str, ...]] = ()
    """Settings of all runs, `section.key=value`: `data.train` and `out` at least."""
    profile: bool = False
    """Measure too how long a round's draft takes."""
    root: Path = record.ROOT
    """Where the studies' results lie."""

    def run(self) -> int:
        """The command; recorded only when every run is finished."""
        points = read_sweep(self.config, self.overrides)
        status = Sweep(str(self.config), self.overrides, profile=self.profile).run()
        if status:
            return status
        settings = points[0].settings
        found = read_json(Path(settings.out) / "sweep.json")
        fields = ("tau", "per_position_acceptance_rate", "n_alpha", "tokens", "updates")
        costs = ("parameters", "bytes", "step_flops", "propose_ms")
        study = self.config.resolve().parent.name
        changes = [text for text in self.overrides if text.partition("=")[0].strip() not in PLACES]
        path = record.record(
            study,
            self.config.stem,
            command=record.command(
                "sweep",
                f"{study}/{self.config.name}",
                "'data.train=[...]' out=RUNS",
                *(shlex.quote(text) for text in changes),
            ),
            config={**without_places(settings), "axes": list(points[0].values)},
            seed=settings.run.seed,
            figures={
                "runs": [
                    {
                        "values": {n: v if plain(v) else short(v) for n, v in run["values"].items()},
                        **{name: run[name] for name in (*fields, *costs)},
                    }
                    for run in found["runs"]
                ]
            },
            root=self.root,
        )
        show.print_note(f"recorded in {path}")
        return 0


def plain(value: Any) -> bool:
    """Whether a grid value is a number or a word, which figures can place on an axis."""
    return isinstance(value, int | float | str)


def without_places(settings: TrainSettings) -> dict[str, Any]:
    """The settings with files and the draft that is gone on from by name and content, without folders."""
    table = json.loads(json.dumps(dataclasses.asdict(settings)))
    del table["out"]
    data = table["data"]
    data["train"] = [{**_file(source.pop("path")), **source} for source in data["train"]]
    data["decontaminate"] = [_file(path) for path in data["decontaminate"]]
    start, features = settings.draft.start, settings.run.features
    if start not in STARTS:
        table["draft"]["start"] = {"name": Path(start).name, "sha256": draft_digest(start)}
    table["run"]["features"] = features if features == "online" else "stored"
    return table


def _file(path: str) -> dict[str, str]:
    return {"name": Path(path).name, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    return run_command(Study, argv)


if __name__ == "__main__":
    sys.exit(main())
