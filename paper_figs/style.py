"""How figures look and are saved; the one place that knows matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eaglejax.errors import ConfigError

OURS = ("#0b5fa5", "#d1495b", "#2e8b57", "#edae49", "#7b4b94", "#30638e", "#8d6a4f", "#4d9078")
THEIRS = "#8a8a8a"
PANEL = (4.2, 3.2)
"""Width and height of one panel, inches."""
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
    colour = OURS[number % len(OURS)]
    axis.plot(x, y, "o-", color=colour, label=label, markersize=4)
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


def finish(axis: Any, title: str, x: str, y: str, *, below: bool = False) -> None:
    """Titles, and a legend where there are labels; ``below``: under the panel, for long ones."""
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    if axis.get_legend_handles_labels()[1]:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.22)} if below else {}
        axis.legend(fontsize=6, frameon=False, **place)


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
        figure.savefig(part, metadata=metadata)
    os.replace(part, path)
    return path
