"""The draft-shape ablation: tau against what a chain step costs, one panel a setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paper_figs import style
from paper_figs.results import Results, standard_error


def draw(results: Results) -> Any:
    """A panel for each sweep on record; the points carry the setting's values, and bars of a standard error.

    All panels span the same range of tau, so that what is noise in one does not look like an effect. A
    setting that changes the cost by less than a hundredth stands on the x axis itself.
    """
    sweeps = sorted(results.study("draft_shape", "width").items())
    figure, axes = style.panels(len(sweeps))
    span = 1.3 * max(_high(figures["runs"]) - _low(figures["runs"]) for _, figures in sweeps)
    for number, (axis, (name, figures)) in enumerate(zip(axes, sweeps, strict=True)):
        costs = [run["step_flops"] for run in figures["runs"]]
        settings = ", ".join(figures["runs"][0]["values"])
        free = max(costs) < 1.01 * min(costs) and len(figures["runs"][0]["values"]) == 1

        def place(run: Mapping[str, Any], free: bool = free) -> float:
            (value, *_) = run["values"].values()
            return float(value) if free else run["step_flops"] / 1e6

        runs = sorted(figures["runs"], key=place)
        x, y = [place(run) for run in runs], [run["tau"] for run in runs]
        style.ours(axis, x, y, "", number, errors=[standard_error(run) for run in runs])
        for (number_of_run, run), at in zip(enumerate(runs), zip(x, y, strict=True), strict=True):
            text = ", ".join(str(value) for value in run["values"].values())
            # Labels of neighbours stand above and below in turn, so that close points keep theirs apart.
            above = 6 if number_of_run % 2 == 0 else -12
            axis.annotate(text, at, xytext=(4, above), textcoords="offset points", fontsize=7)
        middle = (_high(runs) + _low(runs)) / 2
        axis.set_ylim(middle - span / 2, middle + span / 2)
        style.finish(axis, f"{name}: {settings}", settings if free else "MFLOP of a chain step", "tau")
    return figure


def _high(runs: Any) -> float:
    return max(run["tau"] + standard_error(run) for run in runs)


def _low(runs: Any) -> float:
    return min(run["tau"] - standard_error(run) for run in runs)
