"""Quantised and rotated targets: what the draft accepts, what outliers cost, how fast they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paper_figs import style
from paper_figs.results import Results, standard_error

STUDY = "quantization"


def draw_acceptance(results: Results) -> Any:
    """Tau and perplexity of ``quantization/acceptance``, by scheme, one series a rotation and cache."""
    found = results.need(STUDY, "acceptance")
    figure, (tau, loss) = style.panels(2)
    accepted = _series(found, ("acceptance", "all"))
    style.bars(
        tau,
        {name: {k: v["mean_acceptance_length"] for k, v in row.items()} for name, row in accepted.items()},
        errors={name: {k: standard_error(v) for k, v in row.items()} for name, row in accepted.items()},
        bottom=1.0,
    )
    style.finish(tau, "Tau of the float target's draft, with standard errors", "", style.FROM_ONE)
    style.bars(loss, _series(found, ("perplexity", "perplexity")), bottom=1.0)
    style.finish(loss, "Perplexity of answers", "", "perplexity (axis begins at 1)")
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
        style.bars(axis, table)
        axis.set_yscale("log")
        style.finish(axis, f"{scheme}: outlier channels", "", "KL from the float target, nats a token")
    return figure


def draw_speed(results: Results) -> Any:
    """Decoding speed over the float target's in ``quantization/speed``, plain and with the draft, beside what
    the bytes allow."""
    found = results.need(STUDY, "speed")
    figure, (axis,) = style.panels(1)
    labels = {"plain": "plain decoding", "eagle": "EAGLE-3"}
    style.bars(axis, {text: {n: v[key]["median"] for n, v in found.items()} for key, text in labels.items()})
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
            f"{target} target": row[draft]["all"] for target, row in found.items() if draft in row
        }
        for draft in drafts
    }
    style.bars(
        axis,
        {name: {k: v["mean_acceptance_length"] for k, v in row.items()} for name, row in table.items()},
        errors={name: {k: standard_error(v) for k, v in row.items()} for name, row in table.items()},
        bottom=1.0,
    )
    style.finish(axis, "Drafts trained on float and on quantised features", "", style.FROM_ONE)
    return figure


def _words(name: str) -> tuple[str, str]:
    """(scheme, the rotations and the cache in one word) of a variant's name."""
    weights, *words = name.split("+")
    behind = [word for word in words if word[:1] == "r" or word.startswith("kv-")]
    besides = [word for word in words if word not in behind]
    return "+".join([weights, *besides]), "+".join(behind) or "not rotated"


def _series(found: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Rotation -> scheme -> what stands under ``keys``, of the variants that have it."""
    table: dict[str, dict[str, Any]] = {}
    for name, value in found.items():
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            weights, rest = _words(name)
            table.setdefault(rest, {})[weights] = value
    return table
