"""What a comparison found, as JSON and as a text that the engineer of a device can act on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from eaglejax.interop.parity.compare import Difference
from eaglejax.interop.parity.decisions import Decision
from eaglejax.interop.parity.names import Place, parse

FORMAT = "eaglejax-parity-report/1"

CAUSES = {
    "tokens": "the input tokens: the emitted token, the tree or the prompt's chunk",
    "positions": "the positions: committed length plus depth in the tree",
    "visible": "who sees whom among the new tokens: the tree's ancestors",
    "embedding": "the embedding table, its scale, or the token ids",
    "fc": "the draft's fc, its bias, or the order [embedding, feature]",
    "feature": "the fusion of the target's features: fc, its norms, the feature adapter, or whose they are",
    "attn_norm": "the norm before the projections: its weight, epsilon or offset",
    "q": "projection, bias, norm or rotation of the queries",
    "k": "projection, bias, norm or rotation of the keys",
    "v": "projection or bias of the values",
    "attention": "queries, keys, values and cache are equal, so it is the mask (polarity, shape), the scale, "
    "the window, the softcap, or the operator itself",
    "attn_out": "the output projection, its bias, or the norm that closes the block",
    "attn_residual": "the sum of residual stream and attention",
    "mlp_norm": "the norm before the feed-forward block: its weight, epsilon or offset",
    "mlp": "gate, up or down, the activation, the router or the closing norm",
    "residual": "the sum of residual stream and feed-forward block",
    "final_norm": "the final norm: its weight, epsilon or offset",
    "aux": "the layers are equal, so it is which hidden-state boundaries the draft is given, or their order",
    "logits": "the head (transposed?), the norm before it, the softcap or the rows of a reduced vocabulary",
    "state": "the norm after the draft's layers",
    "parent": "growing the tree: order of equal scores, choice of the best nodes",
    "depth": "growing the tree: order of equal scores, choice of the best nodes",
    "valid": "which nodes are proposed: budget and confidence",
    "scores": "log-softmax and the cumulative sum of the draft's log-probabilities",
    "path": "verification: which child of which node is followed",
    "accepted": "verification: which child of which node is followed",
    "count": "where the answer ends: end-of-text ids and the budget",
}
"""What an operation is made of, given that everything before it is equal."""


@dataclasses.dataclass
class Worst:
    """The largest error of an operation over all stages and layers; ``checked``: how many tensors."""

    name: str
    relative: float
    max_abs: float
    checked: int

    def take(self, found: Difference) -> None:
        """Another tensor of the same operation."""
        self.checked += 1
        self.max_abs = max(self.max_abs, found.max_abs)
        if found.relative > self.relative:
            self.name, self.relative = found.name, found.relative


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is not equal.

    ``kind``: "fault", "near_tie" or "refused" (the device's operator does not take something). ``name``: the
    tensor, or the stage that was refused. ``difference`` where numbers differ on equal inputs, ``decision``
    where a choice differs. ``tolerance``: what the error or the gap was held against. ``text``: how it was
    judged; ``hint``: what else the numbers say.
    """

    kind: str
    prompt: str | int
    name: str
    difference: Difference | None = None
    decision: Decision | None = None
    tolerance: float = 0.0
    text: str = ""
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        """JSON-ready, with the parts of the name."""
        data: dict[str, Any] = {"kind": self.kind, "prompt": self.prompt, "name": self.name}
        if self.kind != "refused":
            place = parse(self.name)
            data |= dataclasses.asdict(place)
            data["cause"] = cause(place)
        data |= {
            "difference": None if self.difference is None else self.difference.to_json(),
            "decision": None if self.decision is None else _finite(dataclasses.asdict(self.decision)),
            "tolerance": self.tolerance,
            "text": self.text,
            "hint": self.hint,
        }
        return data


@dataclasses.dataclass
class PromptResult:
    """One prompt: ``tokens`` that the JAX run emitted in the ``stages`` that were compared; ``complete``: up
    to the answer's end."""

    name: str | int
    prompt_tokens: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    stages: int = 0
    complete: bool = False
    findings: list[Finding] = dataclasses.field(default_factory=list)

    @property
    def fault(self) -> Finding | None:
        """What the comparison ended with, if it is no near tie."""
        return next((f for f in self.findings if f.kind != "near_tie"), None)

    @property
    def near_ties(self) -> list[Finding]:
        """Decisions that rounding explains."""
        return [f for f in self.findings if f.kind == "near_tie"]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready. ``identical``: the torch run's own trees, paths and tokens were the JAX run's."""
        return {
            "id": self.name,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "stages": self.stages,
            "complete": self.complete,
            "identical": self.complete and not self.findings,
            "near_ties": [f.to_json() for f in self.near_ties],
            "fault": None if self.fault is None else self.fault.to_json(),
        }


def cause(place: Place) -> str:
    """What to look at where this operation is the first that is wrong."""
    if place.part in ("tree", "verify") and place.operation == "tokens":
        return {
            "tree": "growing the tree: the best tokens, order of equal scores, ids of a reduced vocabulary",
            "verify": "verification: the largest logit, the lowest id of equal ones",
        }[place.part]
    return CAUSES[place.operation]


def build(
    prompts: Sequence[PromptResult],
    *,
    operations: Mapping[tuple[str, str], Worst],
    free: Mapping[tuple[str, str], Worst],
    about: Mapping[str, Any],
    tolerances: Mapping[str, Any],
    reproduce: str,
) -> dict[str, Any]:
    """The report as JSON-ready data; ``about`` are the sections that describe both sides.

    ``reproduce``: a command that runs the operation called ``{name}`` of prompt ``{prompt}`` alone.
    """
    faults = [p.fault for p in prompts if p.fault is not None]
    first = faults[0] if faults else None
    report: dict[str, Any] = {
        "format": FORMAT,
        "agrees": not faults,
        **about,
        "tolerances": dict(tolerances),
        "prompts": [p.to_json() for p in prompts],
        "operations": _table(operations),
        "end_to_end": _table(free),
        "first_divergence": None,
    }
    if first is not None:
        report["first_divergence"] = first.to_json()
        if first.difference is not None:
            report["first_divergence"]["reproduce"] = reproduce.format(prompt=first.prompt, name=first.name)
    return report


def _table(worst: Mapping[tuple[str, str], Worst]) -> list[dict[str, Any]]:
    return [
        {"part": part, "operation": operation, **_finite(dataclasses.asdict(row))}
        for (part, operation), row in worst.items()
    ]


def _finite(data: dict[str, Any]) -> dict[str, Any]:
    """Numbers that JSON lacks, as text."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()}


def text(report: Mapping[str, Any]) -> str:
    """The report in words, 100 columns wide."""
    lines = [f"parity: {'AGREES' if report['agrees'] else 'DIFFERS'}", ""]
    for section in ("torch_side", "jax_side", "models"):
        lines.append(f"{section.replace('_', ' ')}:")
        lines += [f"  {key}: {_plain(value)}" for key, value in report[section].items()]
    tolerances = report["tolerances"]
    lines += [
        "",
        f"tolerances for {tolerances['dtype']}: one operation {tolerances['operation']:g}, attention "
        f"{tolerances['attention']:g} (relative to a row's root mean square), near tie {tolerances['tie']:g} "
        "(logits or log-probabilities)",
    ]
    lines += _columns("each operation on equal inputs", report["operations"])
    lines += _columns("end to end, with all earlier errors", report["end_to_end"])
    lines += ["", "prompts:"]
    for prompt in report["prompts"]:
        state = "identical" if prompt["identical"] else f"{len(prompt['near_ties'])} near ties"
        if prompt["fault"] is not None:
            state = prompt["fault"]["kind"].upper()
        elif not prompt["complete"]:
            state += ", compared in part"
        extent = f"{prompt['stages']} stages, {len(prompt['tokens'])} tokens of the answer"
        lines.append(f"  {prompt['id']}: {state}; {extent}")
        for tie in prompt["near_ties"]:
            lines.append(f"    {_decision(tie)}")
    first = report["first_divergence"]
    if first is not None:
        lines += ["", *_first(first)]
    return "\n".join(lines)


def _columns(title: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = ["", f"{title}:", f"  {'operation':<24}{'checked':>8}{'max abs':>12}{'relative':>12}  worst at"]
    for row in rows:
        numbers = "".join(f"{_number(row[key]):>12}" for key in ("max_abs", "relative"))
        label = f"{row['part']} {row['operation']}"
        lines.append(f"  {label:<24}{row['checked']:>8}{numbers}  {row['name']}")
    return lines


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


def _decision(finding: Mapping[str, Any]) -> str:
    decision = finding["decision"]
    return (
        f"{finding['name']}[{decision['place']}]: {decision['expected']} in JAX, {decision['found']} in "
        f"torch, {_number(decision['gap'])} apart (near tie up to {finding['tolerance']:g})"
    )


def _first(first: Mapping[str, Any]) -> list[str]:
    """The paragraph about the first divergence."""
    if first["kind"] == "refused":
        return ["REFUSED by the device's operator", f"  stage: {first['name']}", f"  {first['text']}"]
    lines = [f"first divergence, prompt {first['prompt']}:", f"  tensor: {first['name']}"]
    found = first["difference"]
    if found is not None:
        lines += [
            f"  shape {found['shape']}, {found['dtype']}; largest difference at {found['index']}: "
            f"{_number(found['expected'])} in JAX, {_number(found['found'])} in torch",
            f"  max abs {_number(found['max_abs'])}, relative {_number(found['relative'])} "
            f"(tolerance {first['tolerance']:g}); rows that differ: {_rows(found)}",
        ]
    if first["decision"] is not None:
        lines.append(f"  {_decision(first)}")
    lines += [f"  look at: {first['cause']}"]
    lines += [f"  {first[key]}" for key in ("text", "hint") if first[key]]
    if "reproduce" in first:
        lines.append(f"  this operation alone: {first['reproduce']}")
    return lines


def _rows(found: Mapping[str, Any]) -> str:
    shown = ", ".join(map(str, found["wrong_rows"][:8]))
    more = ", ..." if len(found["wrong_rows"]) > 8 else ""
    return f"{len(found['wrong_rows'])} of {found['rows']} ({shown}{more})"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(map(_plain, value))
    return str(value)
