"""Quantised and rotated targets: what the draft accepts, what outliers cost, how fast they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paper_figs import style
from paper_figs.results import Results

STUDY = "quantization"
TAU = "tau (1: nothing accepted)"


def draw_acceptance(results: Results) -> Any:
    """Tau and perplexity of ``quantization/acceptance``, by scheme, one series a rotation and cache."""
    found = results.need(STUDY, "acceptance")
    figure, (tau, loss) = style.panels(2)
    _bars(tau, _series(found, ("acceptance", "all", "mean_acceptance_length")))
    tau.axhline(1.0, color="#555555", linewidth=0.8)
    style.finish(tau, "Mean acceptance length of the float target's draft", "", TAU)
    _bars(loss, _series(found, ("perplexity", "perplexity")))
    loss.set_ylim(bottom=1.0)
    style.finish(loss, "Perplexity of answers", "", "perplexity")
    return figure


def draw_outliers(results: Results) -> Any:
    """Divergence from the float target in ``quantization/outliers``: a panel a scheme, a group of bars an
    injection, a series a rotation."""
    found = results.need(STUDY, "outliers")
    schemes = list(
        dict.fromkeys(_words(name)[0] for variants in found.values() for name in variants if name != "float")
    )
    figure, axes = style.panels(len(schemes))
    for axis, scheme in zip(axes, schemes, strict=True):
        table: dict[str, dict[str, float]] = {}
        for injection, variants in found.items():
            for name, measured in variants.items():
                weights, rest = _words(name)
                if weights == scheme and "perplexity" in measured:
                    table.setdefault(rest, {})[injection] = measured["perplexity"]["kl"]
        _bars(axis, table)
        axis.set_yscale("log")
        style.finish(axis, f"{scheme}: outlier channels", "", "KL from the float target, nats a token")
    return figure


def draw_speed(results: Results) -> Any:
    """Decoding speed over the float target's in ``quantization/speed``, plain and with the draft, beside what
    the bytes allow."""
    found = results.need(STUDY, "speed")
    figure, (axis,) = style.panels(1)
    labels = {"plain": "plain decoding", "eagle": "EAGLE-3"}
    _bars(axis, {text: {n: v[key]["median"] for n, v in found.items()} for key, text in labels.items()})
    bound = [v["bandwidth_ratio"] for v in found.values()]
    axis.plot(range(len(bound)), bound, "k_", markersize=18, label="bytes read, inverse ratio")
    style.finish(axis, "Speed over the float target's", "", "ratio of tokens per second")
    return figure


def draw_retrained(results: Results) -> Any:
    """Tau of drafts trained on float and on quantised features, on both targets, from
    ``quantization/retrained``."""
    found = results.need(STUDY, "retrained")
    drafts = list(dict.fromkeys(name for row in found.values() for name in row))
    figure, (axis,) = style.panels(1)
    table = {
        f"trained on {draft} features": {
            f"{target} target": row[draft]["all"]["mean_acceptance_length"]
            for target, row in found.items()
            if draft in row
        }
        for draft in drafts
    }
    _bars(axis, table)
    axis.axhline(1.0, color="#555555", linewidth=0.8)
    style.finish(axis, "Drafts trained on float and on quantised features", "", TAU)
    return figure


def _words(name: str) -> tuple[str, str]:
    """(scheme, the rotations and the cache in one word) of a variant's name."""
    weights, *words = name.split("+")
    behind = [word for word in words if word[:1] == "r" or word.startswith("kv-")]
    besides = [word for word in words if word not in behind]
    return "+".join([weights, *besides]), "+".join(behind) or "not rotated"


def _series(found: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Rotation -> scheme -> the number under ``keys``, of the variants that have it."""
    table: dict[str, dict[str, float]] = {}
    for name, value in found.items():
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            weights, rest = _words(name)
            table.setdefault(rest, {})[weights] = value
    return table


def _bars(axis: Any, table: Mapping[str, Mapping[str, float]]) -> None:
    """Grouped bars: a series for each entry of ``table``, groups by the keys of the entries."""
    groups = list(dict.fromkeys(key for series in table.values() for key in series))
    width = 0.8 / max(len(table), 1)
    for number, (label, series) in enumerate(table.items()):
        at = [groups.index(key) + (number - (len(table) - 1) / 2) * width for key in series]
        axis.bar(at, list(series.values()), width, color=style.OURS[number % len(style.OURS)], label=label)
    axis.set_xticks(range(len(groups)), groups, rotation=20, ha="right", fontsize=7)
