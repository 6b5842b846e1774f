"""Tau against the amount of training text, at a fixed number of updates."""

from __future__ import annotations

from typing import Any

from eaglejax.errors import ConfigError
from paper_figs import style
from paper_figs.results import Results, published, standard_error

AXIS = "data.total"


def draw(results: Results) -> Any:
    """Ours over samples; published ends of curves over multiples of ShareGPT."""
    runs = results.need("data_scaling", "samples")["runs"]
    if any(AXIS not in run["values"] for run in runs):
        raise ConfigError(f"the result data_scaling/samples is no sweep over {AXIS}")
    figure, (own, other) = style.panels(2, columns=2)
    points = sorted((run["values"][AXIS], run["tau"], standard_error(run)) for run in runs)
    samples, tau, errors = zip(*points, strict=True)
    style.ours(own, samples, tau, "ours: EAGLE-3, with standard errors", errors=errors)
    multiples = set[float]()
    for number, entry in enumerate(published("data_scaling")):
        style.theirs(other, entry["multiples"], entry["tau"], entry["label"], number)
        multiples |= set(entry["multiples"])
    for axis, at, title, x in (
        (own, samples, "One target, equal updates", "training samples"),
        (other, sorted(multiples), "As published, MT-bench", "training data, multiples of ShareGPT"),
    ):
        style.doublings(axis, at)
        style.finish(axis, title, x, "tau")
    return figure
