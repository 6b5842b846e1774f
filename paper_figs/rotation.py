"""The rotation ladder: what a draft still accepts when the target under it is rotated, rung by rung."""

from __future__ import annotations

from typing import Any

from paper_figs import style
from paper_figs.results import Results


def draw(results: Results) -> Any:
    """A panel for each ladder on record, one bar a rung."""
    ladders = results.study("rotation", "ladder")
    figure, axes = style.panels(len(ladders))
    for axis, (name, found) in zip(axes, ladders.items(), strict=True):
        rungs = found["rungs"]
        axis.bar(range(len(rungs)), [rung["tau"] for rung in rungs.values()], color=style.OURS[0])
        axis.axhline(1.0, color="#555555", linewidth=0.8)
        axis.set_xticks(range(len(rungs)), list(rungs), rotation=35, ha="right", fontsize=7)
        title = f"Acceptance on a rotated target ({name})"
        style.finish(axis, title, "", "tau (1: nothing accepted)")
    return figure
