"""A grid of training runs: every combination of a few settings' values, and what came of each.

A sweep file is a run's TOML under ``[base]`` and lists of values under ``[grid]``; a plain run file with the
grid on the command line is the same. Each combination is a run of its own in ``out/runs/<key>``, where the
key is a hash of the resolved settings, of the data's bytes and of the target, so that what was trained once
is found again whatever else the grid holds.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import json
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
from eaglejax.train.settings import STARTS, TrainSettings, override, parse, read_toml

FIXED = (
    *("target", "target_dtype", "target_quant", "out"),
    *("run.decode_prompts", "run.decode_tokens", "run.decode_depth"),
)
"""Settings that are the same in all runs: the target, and how the drafts are compared."""

RESULT = "result.json"


@dataclasses.dataclass(frozen=True)
class Point:
    """One run: its ``values`` of the grid's settings, and all ``settings`` resolved (``out`` is the
    sweep's)."""

    values: dict[str, Any]
    settings: TrainSettings

    def label(self) -> str:
        """The values for a person, data mixes by their number of files."""
        return ", ".join(f"{name}={short(value)}" for name, value in self.values.items())


def short(value: Any) -> str:
    """A grid value in few letters; a list of files by their names and weights."""
    if isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
        return "+".join(f"{v.get('weight', 1):g} {Path(str(v.get('path', '?'))).stem}" for v in value)
    return str(value)


def read_sweep(path: str | Path, overrides: Sequence[str] = (), grid: Sequence[str] = ()) -> list[Point]:
    """The points of a sweep, in the grid's order, the last setting changing fastest.

    ``overrides``: ``a.b=value`` for all runs; ``grid``: ``a.b=[values]``, beside those of the file. Raises
    ConfigError for unknown sections, settings and types, values given twice, and combinations that cannot
    be.
    """
    table = read_toml(path)
    base, axes = table, {}
    if "base" in table or "grid" in table:
        unknown = sorted(set(table) - {"base", "grid"})
        if unknown:
            raise ConfigError(f"{path}: unknown section {unknown[0]!r}; a sweep has [base] and [grid]")
        base = table.get("base", {})
        if not isinstance(base, dict) or not isinstance(table.get("grid", {}), dict):
            raise ConfigError(f"{path}: base and grid are sections")
        axes = _flat(table.get("grid", {}))
    given: dict[str, Any] = {}
    for text in grid:
        override(given, text)
    for name, values in _flat(given).items():
        if name in axes:
            raise ConfigError(f"{name} is on the grid of {path} and on the command line; give it once")
        axes[name] = values
    for text in overrides:
        override(base, text)
    _check_axes(axes)
    return [
        _point(base, dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())
    ]


def _flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested sections as dotted names."""
    out: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{before}{name}.")
        else:
            out[f"{before}{name}"] = value
    return out


def _check_axes(axes: Mapping[str, Any]) -> None:
    if not axes:
        raise ConfigError("the grid is empty; give a [grid] section or --grid 'draft.num_layers=[1, 2]'")
    for name, values in axes.items():
        if any(fixed == name or fixed.startswith(f"{name}.") for fixed in FIXED):
            raise ConfigError(f"{name} is one for the whole sweep; it cannot be on the grid")
        if not isinstance(values, list) or not values:
            raise ConfigError(f"grid {name} is {values!r}; it must be a list of values")
        seen = [json.dumps(v, sort_keys=True, default=str) for v in values]
        if len(set(seen)) < len(seen):
            raise ConfigError(f"grid {name} holds a value twice: {values}")


def _point(base: Mapping[str, Any], values: dict[str, Any]) -> Point:
    table = copy.deepcopy(dict(base))
    for name, value in values.items():
        *sections, last = name.split(".")
        here = table
        for section in sections:
            here = here.setdefault(section, {})
            if not isinstance(here, dict):
                raise ConfigError(f"grid {name}: {section} is not a section")
        here[last] = value
    settings = parse(TrainSettings, table)
    try:
        settings.check()
    except ConfigError as error:
        raise ConfigError(
            f"with {', '.join(f'{n}={short(v)}' for n, v in values.items())}: {error}"
        ) from error
    if settings.run.decode_prompts < 1:
        raise ConfigError(
            "a sweep compares drafts by decoding held-out prompts; set run.decode_prompts to 1 or more"
        )
    return Point(values, settings)


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
