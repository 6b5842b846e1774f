"""Why is acceptance low? One test a suspect, each of which can find its own fault.

Most faults of a pair leave the text right and cost acceptance alone. Each is tried the other way round on
texts that the target wrote (``measure``): a change of the pair that makes the draft guess much better names
the fault. Where nothing helps and acceptance is low all the same, a test says ``unknown``: another fault may
hide its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from eaglejax.measure import suspects
from eaglejax.measure.findings import Finding
from eaglejax.measure.pair import Pair
from eaglejax.measure.quality import Acceptance, Texts
from eaglejax.models.target import Target

NOT_ITS_TEXT = "not this draft's text"


@dataclasses.dataclass(frozen=True)
class Report:
    """``findings``, one a test; ``measured``: acceptance as configured on each kind of text; ``verdict``: the
    cause in a word or two (see ``CAUSES``), "no fault", or "unknown"."""

    findings: tuple[Finding, ...]
    measured: Mapping[str, Acceptance]
    verdict: str = "unknown"

    @property
    def faults(self) -> list[Finding]:
        """The failures."""
        return [f for f in self.findings if f.verdict == "fail"]


def diagnose(
    target: Target,
    file: Any,
    texts: Mapping[str, Texts],
    *,
    original: Target | None = None,
    original_texts: Texts | None = None,
    usual: Texts | None = None,
) -> Report:
    """Every test on a draft checkpoint and its target; ``texts``: see ``Pair``.

    ``original``: the model that the draft was made for, where it may be another than ``target``: rotated
    since, or not this one at all; ``original_texts``: its own (None: the target's). ``usual``: texts of the
    target like those that drafts are trained on, where ``texts`` may be others. The basis is not checked
    while loading: that is one of the tests. Raises MismatchError for a draft that does not fit the target at
    all (widths, vocabulary), which needs no diagnosis, and for an original that it does not fit.
    """
    pair = Pair(target, file, texts)
    findings = [
        suspects.tokenizer(target, file),
        suspects.aux_layers(pair),
        suspects.basis(pair, original),
        suspects.positions(pair),
        suspects.vocabulary(pair),
        suspects.template(pair),
        suspects.norms(pair),
    ]
    if original is not None:
        findings.append(suspects.of_another_target(pair, original, original_texts or pair.texts))
    if usual is not None:
        findings.append(suspects.of_another_text(pair, usual))
    return Report(tuple(findings), pair.measured, _verdict(pair, findings, original is not None))


CAUSES = {
    "tokenizer": "wrong target",
    "target": "wrong target",
    "basis": "rotation",
    "aux_layers": "boundary",
    "positions": "positions",
    "vocabulary": "vocabulary",
    "norms": "norm",
    "template": "template",
    "texts": NOT_ITS_TEXT,
}
"""What the failure of each test is a sign of, the surest first."""


def _verdict(pair: Pair, findings: Sequence[Finding], with_original: bool) -> str:
    failed = {f.test for f in findings if f.verdict == "fail"}
    for test, cause in CAUSES.items():
        if test in failed:
            return cause
    if pair.healthy:
        return "no fault"
    # The pair that the draft was made for was measured as well and does no better.
    return NOT_ITS_TEXT if with_original else "unknown"
