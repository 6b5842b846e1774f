"""Curves of a run, drawn from its log alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eaglejax.checkpoint.files import write_text
from eaglejax.errors import ConfigError
from eaglejax.train.logs import SCALARS
from eaglejax.train.writing import split_lines

PANELS = (
    ("train/objective", "loss"),
    ("train/accuracy", "top-1 accuracy, training"),
    ("validation/accuracy", "top-1 accuracy, held out"),
    ("validation/tau_simulated", "tau, held out, with the text fed"),
    ("decoded/tau", "tau, held-out prompts decoded"),
    ("decoded/position_acceptance", "acceptance by position, decoded"),
)
"""Values that are drawn where the log has them, with their titles; lists become one curve an entry."""


def read_scalars(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """name -> (update, value) in order. Where a resumed run logged an update again, the later line counts.

    Raises ConfigError for a folder without a log, and for a log that is damaged.
    """
    path = folder / SCALARS
    if not path.is_file():
        raise ConfigError(f"{path} is missing; {folder} is not the folder of a run")
    series: dict[str, dict[int, Any]] = {}
    for number, line in enumerate(split_lines(path)[0], start=1):
        try:
            row = json.loads(line)
            update = row["update"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number} is no row of a run's log") from error
        for name, value in row.items():
            if name not in ("update", "time"):
                series.setdefault(name, {})[update] = value
    return {name: sorted(values.items()) for name, values in series.items()}


def plot_run(folder: Path) -> Path:
    """Draw ``curves.svg`` in the run's folder."""
    series = read_scalars(folder)
    width, height, gap = 420, 240, 50
    parts = []
    panels = [(series[name], title) for name, title in PANELS if name in series]
    for n, (points, title) in enumerate(panels):
        x, y = gap + (n % 2) * (width + gap), gap + (n // 2) * (height + gap)
        parts.append(_panel(points, title, x, y, width, height))
    rows = -(-len(panels) // 2)
    total = (2 * width + 3 * gap, rows * (height + gap) + gap)
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total[0]} {total[1]}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )
    path = folder / "curves.svg"
    write_text(path, svg)
    return path


_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")


def _panel(points: list[tuple[int, Any]], title: str, x: int, y: int, width: int, height: int) -> str:
    frame = (
        f'<text x="{x}" y="{y - 8}">{title}</text>'
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="none" stroke="#999"/>'
    )
    listed = [(update, v if isinstance(v, list) else [v]) for update, v in points]
    rows = [(update, v) for update, v in listed if None not in v]
    if not rows:
        return frame
    curves = list(zip(*(v for _, v in rows), strict=True))
    values = [v for curve in curves for v in curve]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    first, last = rows[0][0], rows[-1][0]
    stretch = (last - first) or 1
    out = [frame]
    for n, curve in enumerate(curves):
        at = " ".join(
            f"{x + width * (u - first) / stretch:.1f},{y + height * (1 - (v - low) / span):.1f}"
            for (u, _), v in zip(rows, curve, strict=True)
        )
        colour = _COLOURS[n % len(_COLOURS)]
        out.append(f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    out.append(f'<text x="{x - 4}" y="{y + 10}" text-anchor="end">{high:.3g}</text>')
    out.append(f'<text x="{x - 4}" y="{y + height}" text-anchor="end">{low:.3g}</text>')
    out.append(f'<text x="{x}" y="{y + height + 16}">update {first}</text>')
    out.append(f'<text x="{x + width}" y="{y + height + 16}" text-anchor="end">{last}</text>')
    return "".join(out)
