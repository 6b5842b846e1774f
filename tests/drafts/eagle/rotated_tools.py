"""A trained draft beside its target turned: what every family of drafts has to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from eaglejax.drafts.registry import load_draft, read_draft
from eaglejax.errors import MismatchError
from eaglejax.measure.diagnose import diagnose
from eaglejax.measure.quality import Texts
from eaglejax.models.target import Target
from eaglejax.rotation.rotate import Rotation, rotate_target


def check_rotated(
    target: Target, prompt: Sequence[int], answer: Sequence[int], folder: Path, out: Path, form: str
) -> None:
    """A draft in ``folder`` that knows ``answer`` by heart is refused beside the turned target, its diagnosis
    names the basis and nothing else, and aligned on disk (``form``) it is sound again."""
    rotated = rotate_target(target, Rotation("random", target.config.hidden_size, seed=3))
    with pytest.raises(MismatchError, match=r"is rotated .*eaglejax align"):
        load_draft(folder, rotated)
    family, file = read_draft(folder)
    texts = {"plain": Texts.of([(prompt, answer)])}
    ill = diagnose(rotated, file, texts)
    assert ill.measured["plain"].length < 1.5, "the rotation costs nothing here"
    assert [fault.test for fault in ill.faults] == ["basis"], ill.findings
    assert ill.verdict == "rotation"
    assert "eaglejax align" in (ill.faults[0].remedy or "")
    family.write_aligned(file, out, rotated, rotated.rotation, original=None, to=form)
    well = diagnose(rotated, read_draft(out)[1], texts)
    assert well.measured["plain"].rates[0] > 0.9
    assert not well.faults, well.findings
