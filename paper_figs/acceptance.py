"""Tau by suite, and acceptance by position by suite and by language, of the shipped draft on a tree."""

from __future__ import annotations

from typing import Any

from paper_figs import style
from paper_figs.results import Results, published

SUITES = {"humaneval_eagle80": "humaneval"}
"""Our name of a suite -> the name under which it was published."""


def draw(results: Results) -> Any:
    """Three panels from ``demo_draft``'s results on a tree, greedy and sampled."""
    conditions = {name: results.need("demo_draft", f"{name}-tree") for name in ("greedy", "sampled-t1")}
    figure, (bars, suites, languages) = style.panels(3)
    names = list(conditions["greedy"]["suites"])
    width = 0.8 / len(conditions)
    for number, (condition, figures) in enumerate(conditions.items()):
        values = [figures["suites"][name]["mean_acceptance_length"] for name in names]
        at = [i + (number - 0.5) * width for i in range(len(names))]
        bars.bar(at, values, width, color=style.OURS[number], label=f"ours: {condition}")
    for number, entry in enumerate(published("tau")):
        known = [(i, entry["suites"].get(SUITES.get(name, name))) for i, name in enumerate(names)]
        shown = [(i, value) for i, value in known if value is not None]
        if shown:
            label = f"{entry['label']}, T={entry['temperature']:g}"
            style.theirs(bars, *zip(*shown, strict=True), label, number, line="none")
    bars.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=7)
    bars.set_ylim(0, 1.5 * bars.get_ylim()[1])  # room for the legend above the published points
    style.finish(bars, "Mean acceptance length", "", "tau")
    for axis, part in ((suites, "suites"), (languages, "languages")):
        for number, (name, values) in enumerate(conditions["greedy"][part].items()):
            rates = values["per_position_acceptance_rate"]
            style.ours(axis, range(1, len(rates) + 1), rates, name, number)
        axis.set_ylim(0, 1)
        style.finish(
            axis,
            f"Acceptance by position and {part[:-1]}, greedy",
            "position of the draft",
            "share of rounds",
        )
    return figure
