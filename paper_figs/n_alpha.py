"""n-alpha of EAGLE-1 against EAGLE-3: whether acceptance lasts where a draft reads its own states."""

from __future__ import annotations

from typing import Any

from paper_figs import style
from paper_figs.results import Results, published


def draw(results: Results) -> Any:
    """Ours from greedy chains over all suites; published curves in a panel of their own."""
    figure, (own, other) = style.panels(2, columns=2)
    for number, (study, label) in enumerate((("demo_draft", "ours: EAGLE-3"), ("eagle1", "ours: EAGLE-1"))):
        rates = results.need(study, "greedy-chain")["all"]["n_alpha"]
        style.ours(own, range(1, len(rates) + 1), rates, label, number)
    for number, entry in enumerate(published("n_alpha")):
        style.theirs(other, entry["positions"], entry["values"], entry["label"], number)
    for axis, title in ((own, "One target, the same texts"), (other, "As published, other targets")):
        axis.set_ylim(0, 1)
        style.finish(axis, title, "position of the draft", "acceptance given all before")
    return figure
