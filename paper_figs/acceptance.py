"""Tau by suite, and acceptance by position by suite and by language, of the shipped draft on a tree."""

from __future__ import annotations

from typing import Any

from paper_figs import style
from paper_figs.results import Results, published, standard_error

SUITES = {"humaneval_eagle80": "humaneval"}
"""Our name of a suite -> the name under which it was published."""


def draw(results: Results) -> Any:
    """Three panels from ``demo_draft``'s results on a tree, greedy and sampled."""
    conditions = {name: results.need("demo_draft", f"{name}-tree") for name in ("greedy", "sampled-t1")}
    figure, (bars, suites, languages) = style.panels(3)
    names = list(conditions["greedy"]["suites"])
    style.bars(
        bars,
        {
            f"ours: {condition}": {n: figures["suites"][n]["mean_acceptance_length"] for n in names}
            for condition, figures in conditions.items()
        },
        errors={
            f"ours: {condition}": {n: standard_error(figures["suites"][n]) for n in names}
            for condition, figures in conditions.items()
        },
        bottom=1.0,
    )
    for number, entry in enumerate(published("tau")):
        known = [(i, entry["suites"].get(SUITES.get(name, name))) for i, name in enumerate(names)]
        shown = [(i, value) for i, value in known if value is not None]
        if shown:
            label = f"{entry['label']}, T={entry['temperature']:g}"
            style.theirs(bars, *zip(*shown, strict=True), label, number, line="none")
    bars.set_ylim(bottom=1.0)
    style.finish(bars, "Mean acceptance length, with standard errors", "", style.FROM_ONE)
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
