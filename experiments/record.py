"""The one writer and reader of experiment results: JSON that says what ran, on what, and what came out.

``experiments/<study>/results/<name>.json`` holds ``study``, ``name``, ``command`` (which makes it again),
``config`` (the settings as resolved), ``seed``, ``figures`` (what was measured), ``machine`` and its
``versions`` (see ``devices.machine.describe``). Figures and tables are drawn from these files alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eaglejax.checkpoint.files import read_json, write_text
from eaglejax.devices import machine
from eaglejax.errors import ConfigError

ROOT = Path(__file__).parent
FIELDS = ("study", "name", "command", "config", "seed", "figures", "machine")


def results_folder(study: str, root: Path = ROOT) -> Path:
    """Where a study's results lie."""
    return root / study / "results"


def record(
    study: str,
    name: str,
    *,
    command: str,
    config: Mapping[str, Any],
    seed: int | None,
    figures: Mapping[str, Any],
    root: Path = ROOT,
) -> Path:
    """Write one result, replacing an earlier one of that name; its path.

    Raises ConfigError for a name that is no plain file name, and for values that JSON has no place for (NaN
    included).
    """
    if not re.fullmatch(r"[\w.+-]+", name) or name.startswith("."):
        raise ConfigError(f"{name!r} cannot name a result; use letters, digits, '.', '_', '+' and '-'")
    document = {
        "study": study,
        "name": name,
        "command": command,
        "config": dict(config),
        "seed": seed,
        "figures": dict(figures),
        "machine": machine.describe(),
    }
    try:
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the result {study}/{name} holds a value that JSON cannot: {error}") from error
    path = results_folder(study, root) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text + "\n")
    return path


def command(program: str, config: str, *arguments: str) -> str:
    """The line that makes a result again: ``python -m experiments.PROGRAM`` with a study's file and further
    ``arguments``, as a shell has them."""
    return " ".join((f"python -m experiments.{program} --config experiments/{config}", *arguments))


def read(path: Path) -> dict[str, Any]:
    """One result. Raises CheckpointError or ConfigError for a file that is none."""
    document = read_json(path)
    missing = [name for name in FIELDS if name not in document]
    if missing:
        raise ConfigError(f"{path} is no result of an experiment: it lacks {', '.join(missing)}")
    return document


def read_study(study: str, root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """All results of a study by name, {} where there are none."""
    return {path.stem: read(path) for path in sorted(results_folder(study, root).glob("*.json"))}
