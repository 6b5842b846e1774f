"""The rotation ladder: what a draft still accepts when the target under it is rotated, rung by rung.

Drawn from ``experiments/rotation/results/ladder.json``, whose ``figures`` hold ``rungs``: objects with a
``name`` and a ``tau``.
"""

from __future__ import annotations

from typing import Any

from paper_figs import style
from paper_figs.results import Results


def draw(results: Results) -> Any:
    """One bar a rung."""
    rungs = results.need("rotation", "ladder")["rungs"]
    figure, (axis,) = style.panels(1)
    axis.bar(range(len(rungs)), [rung["tau"] for rung in rungs], color=style.OURS[0])
    axis.axhline(1.0, color="#555555", linewidth=0.8)
    axis.set_xticks(range(len(rungs)), [rung["name"] for rung in rungs], rotation=35, ha="right", fontsize=7)
    style.finish(axis, "Mean acceptance length under rotation", "", "tau (1: nothing accepted)")
    return figure
