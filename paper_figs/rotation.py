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
        style.bars(axis, {"": {rung: figures["tau"] for rung, figures in rungs.items()}}, bottom=1.0)
        style.finish(axis, f"Acceptance on a rotated target ({name})", "", style.FROM_ONE)
    return figure
