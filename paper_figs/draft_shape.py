"""The draft-shape ablation: tau against what a chain step costs, one panel a setting."""

from __future__ import annotations

from typing import Any

from paper_figs import style
from paper_figs.results import Results


def draw(results: Results) -> Any:
    """A panel for each sweep on record; the points carry the setting's values."""
    sweeps = results.study("draft_shape", "width")
    figure, axes = style.panels(len(sweeps))
    for number, (axis, (name, figures)) in enumerate(zip(axes, sorted(sweeps.items()), strict=True)):
        runs = sorted(figures["runs"], key=lambda run: run["step_flops"])
        x, y = [run["step_flops"] / 1e6 for run in runs], [run["tau"] for run in runs]
        style.ours(axis, x, y, "", number)
        for run, at in zip(runs, zip(x, y, strict=True), strict=True):
            text = ", ".join(str(value) for value in run["values"].values())
            axis.annotate(text, at, xytext=(3, 4), textcoords="offset points", fontsize=7)
        settings = ", ".join(runs[0]["values"])
        style.finish(axis, f"{name}: {settings}", "MFLOP of a chain step", "tau")
    return figure
