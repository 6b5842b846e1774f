"""How figures look and are saved; the one place that knows matplotlib."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eaglejax.errors import ConfigError

OURS = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#000000")
"""The colours of Okabe and Ito, which colour-blind readers tell apart."""
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "---", "+++")
"""Of bars, for prints without colour."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
THEIRS = "#767676"
PANEL = (4.2, 3.4)
"""Width and height of one panel, inches."""
DPI = 200
"""Of figures made of pixels: 840 a panel, enough for a column in print."""
FROM_ONE = "tau (axis begins at 1)"
"""Label of a tau axis whose bars stand on 1, where nothing is accepted."""
THEIR_MARKERS = ("s", "D", "^", "v")


def panels(count: int, columns: int = 3) -> tuple[Any, list[Any]]:
    """A new figure and its ``count`` axes. Raises ConfigError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "figures need matplotlib; install it with: pip install 'eaglejax[figures]'"
        ) from error
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).reshape(-1).tolist()
    for axis in axes[count:]:
        axis.set_visible(False)
    for axis in axes[:count]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, axes[:count]


def ours(
    axis: Any,
    x: Sequence[float],
    y: Sequence[float],
    label: str,
    number: int = 0,
    errors: Sequence[float] | None = None,
) -> None:
    """A solid curve of our own measurements, with bars of ``errors`` up and down."""
    colour, marker = OURS[number % len(OURS)], MARKERS[number % len(MARKERS)]
    axis.plot(x, y, marker + "-", color=colour, label=label, markersize=4)
    if errors is not None:
        axis.errorbar(x, y, errors, fmt="none", ecolor=colour, capsize=2)


def theirs(
    axis: Any, x: Sequence[float], y: Sequence[float], label: str, number: int = 0, line: str = "--"
) -> None:
    """A published curve: grey, broken, hollow marks."""
    marker = THEIR_MARKERS[number % len(THEIR_MARKERS)]
    axis.plot(
        x, y, marker=marker, linestyle=line, color=THEIRS, label=label, markerfacecolor="white", markersize=5
    )


def bars(
    axis: Any,
    table: Mapping[str, Mapping[str, float]],
    *,
    errors: Mapping[str, Mapping[str, float]] | None = None,
    bottom: float = 0.0,
) -> list[str]:
    """Grouped bars that stand on ``bottom``: a series for each entry of ``table``, groups by the keys of the
    entries, with bars of ``errors`` up and down where there are such. Returns the groups from left to right.
    """
    groups = list(dict.fromkeys(key for series in table.values() for key in series))
    width = 0.8 / max(len(table), 1)
    for number, (label, series) in enumerate(table.items()):
        at = [groups.index(key) + (number - (len(table) - 1) / 2) * width for key in series]
        up = None if errors is None else [errors[label][key] for key in series]
        axis.bar(
            at,
            [value - bottom for value in series.values()],
            width,
            bottom=bottom,
            yerr=up,
            error_kw={"elinewidth": 0.8, "capsize": 1.5},
            color=OURS[number % len(OURS)],
            hatch=HATCHES[number % len(HATCHES)],
            edgecolor="white",
            linewidth=0.4,
            label=label,
        )
    axis.set_xticks(range(len(groups)), groups, rotation=30, ha="right", fontsize=8)
    return groups


def finish(axis: Any, title: str, x: str, y: str) -> None:
    """Titles, and where there are labels a legend under the panel, where it covers nothing."""
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    count = len(axis.get_legend_handles_labels()[1])
    if count:
        longest = max(len(label) for label in axis.get_legend_handles_labels()[1])
        axis.legend(
            fontsize=7,
            frameon=False,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.28),
            ncols=1 if longest > 24 else min(count, 3),
        )


def doublings(axis: Any, at: Sequence[float]) -> None:
    """A logarithmic x axis with marks at ``at`` alone, in plain numbers."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(at, [f"{value:g}" for value in at])
    axis.minorticks_off()


def save(figure: Any, path: Path) -> Path:
    """Write the figure; the same figure gives the same bytes."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(path.suffix[1:])
    with matplotlib.rc_context({"svg.hashsalt": "eaglejax"}):
        figure.savefig(part, metadata=metadata, dpi=DPI)
    os.replace(part, path)
    return path
