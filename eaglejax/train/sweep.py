"""What came of each run of a grid (``train.grid``).

Each combination is a run of its own in ``out/runs/<key>``, where the key is a hash of the resolved settings,
of the data's bytes and of the target, so that what was trained once is found again whatever else the grid
holds.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eaglejax import json_text
from eaglejax.checkpoint.files import read_json, write_text
from eaglejax.drafts.places import draft_path
from eaglejax.errors import ConfigError
from eaglejax.identity import digest
from eaglejax.train.curate import place
from eaglejax.train.samples import Sample, prompt_digest
from eaglejax.train.settings import STARTS, TrainSettings

RESULT = "result.json"


def run_key(settings: TrainSettings, target: str) -> str:
    """What a run depends on, 16 hexadecimal digits: settings and the bytes of its files, wherever they lie.

    ``target``: the target's fingerprint. Raises ConfigError for a data file that cannot be read.
    """
    data = dataclasses.replace(
        settings.data,
        train=tuple(dataclasses.replace(s, path=_file_digest(s.path)) for s in settings.data.train),
        decontaminate=tuple(_file_digest(path) for path in settings.data.decontaminate),
    )
    start = settings.draft.start
    draft = (
        settings.draft if start in STARTS else dataclasses.replace(settings.draft, start=draft_digest(start))
    )
    return digest(dataclasses.replace(settings, out="", data=data, draft=draft), target)[:16]


def _file_digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"data file {path} cannot be read: {error.strerror}") from error


def draft_digest(spec: str) -> str:
    """SHA-256 of a draft's configuration and weight files, 32 hexadecimal digits; ``spec`` as ``load_draft``
    has it."""
    found = hashlib.sha256()
    folder = draft_path(spec)
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        found.update(path.name.encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:32]


def common_prompts(held: Sequence[Sequence[Sample]], shares: Sequence[float], count: int) -> list[Sample]:
    """``count`` prompts that no run of a sweep trains on, the same for all runs, so that their tau compares.

    ``held``: the held-out prompts of each run's data, ``shares`` its share of them. A hash decides what is
    held out, so those below the smallest share are held out by all; they come in the order of the hash.
    Raises ConfigError for none.
    """
    least = min(shares, default=0.0)
    found = {s.group: s for samples in held for s in reversed(samples) if place(s) < least}
    if not found:
        raise ConfigError("no sample is held out to compare drafts on; raise data.validation")
    return [found[group] for group in sorted(found)[:count]]


def prompts_digest(prompts: Sequence[Sample]) -> str:
    """SHA-256 over the prompts, 32 hexadecimal digits."""
    text = " ".join(prompt_digest(sample.prompt) for sample in prompts)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_result(folder: Path) -> dict[str, Any] | None:
    """What a finished run left in its folder, None where it is not finished."""
    return read_json(folder / RESULT, default={}) or None


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Mark the run in ``folder`` as finished."""
    write_json(folder / RESULT, result)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """``value`` as a file that exists whole or not at all."""
    write_text(path, json_text.dump(value, indent=1) + "\n")
