"""What a diagnosis says, in terms that are known before jax starts."""

from __future__ import annotations

import dataclasses
from typing import Literal

Verdict = Literal["pass", "fail", "unknown"]
STEPS = 3
"""Drafts in a row that are judged."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The verdict of one test, what it rests on, and what to do about a failure."""

    test: str
    verdict: Verdict
    evidence: str
    remedy: str | None = None
