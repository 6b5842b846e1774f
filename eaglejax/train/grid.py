"""A grid of training runs: every combination of a few settings' values.

A sweep file is a run's TOML under ``[base]`` and lists of values under ``[grid]``; a plain run file with the
grid on the command line is the same. Nothing here imports jax: a file is refused before.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.train.settings import TrainSettings, override, parse, read_toml

FIXED = (
    *("target", "target_dtype", "target_quant", "out"),
    *("run.decode_prompts", "run.decode_tokens", "run.decode_depth"),
)
"""Settings that are the same in all runs: the target, and how the drafts are compared."""


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
