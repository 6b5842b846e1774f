"""``eaglejax align``: a draft of the original model, for its rotated self."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

import eaglejax as ej
from eaglejax.checkpoint.files import check_output
from eaglejax.checkpoint.sources import resolve
from eaglejax.cli import methods, show
from eaglejax.cli.diagnose import PROMPTS, written_texts
from eaglejax.cli.methods import draft_reading
from eaglejax.config import AuxConvention
from eaglejax.drafts.places import draft_path
from eaglejax.drafts.registry import check_form, read_draft
from eaglejax.errors import ConfigError

if TYPE_CHECKING:
    from eaglejax.rotation.basis import Basis


@dataclasses.dataclass(frozen=True)
class Align:
    """Write a draft that reads a rotated target as it read the original one."""

    draft: Annotated[str, tyro.conf.arg(aliases=["--draft-model-path"])]
    """The draft, made for the original model: a folder or a Hub id."""
    target: Annotated[str, tyro.conf.arg(aliases=["--target-model-path"])]
    """The rotated model."""
    out: Annotated[Path, tyro.conf.arg(aliases=["--output-dir"])]
    """New folder for the aligned draft."""
    original_target: str | None = None
    """The model before the rotation: the embedding and the head that the draft borrows are taken from it. For
    --method procrustes it is needed."""
    method: Literal["export", "procrustes"] = "export"
    """Whence the rotation comes: the target's export, or a fit of its embedding to the original's."""
    form: str = "eaglejax"
    """Form of the aligned checkpoint, as in `convert`."""
    check: bool = False
    """Measure, on texts that the target writes, what the draft guesses right before and after."""
    aux_convention: AuxConvention = "auto"
    """What layer ids in the draft's config count: hidden-state boundaries, or blocks (their output is
    meant)."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else there."""

    def run(self) -> int:
        """The command. Exit status 1 when --check finds the aligned draft no better than before."""
        check_form(self.form)
        check_output(self.out)
        if self.method == "procrustes" and self.original_target is None:
            raise ConfigError("--method procrustes fits the rotation to --original-target; name that model")
        draft_path(self.draft)
        for spec in (self.target, self.original_target):
            if spec is not None:
                resolve(spec)
        family, file = read_draft(self.draft, **draft_reading(self.aux_convention))
        if family.alone:
            raise ConfigError(
                f"{self.draft} holds a {family.name}, which takes nothing from its target: no rotation "
                "concerns it, and it drafts for the rotated target as it is"
            )
        check_form(self.form, family)
        target = methods.load_target(self.target, dtype="float32")
        original = None
        if self.original_target is not None:
            original = methods.load_target(self.original_target, dtype="float32")
        basis, error = self._basis(target, original)
        done = family.write_aligned(file, self.out, target, basis, original=original, to=self.form)
        notes = [*file.notes, *done]
        report: dict[str, Any] = {
            "output": str(self.out),
            "basis": basis.id,
            "method": self.method,
            "error": error,
            "notes": notes,
            "check": self._check(target) if self.check else None,
        }
        if self.json:
            show.print_json(report)
        else:
            for note in notes:
                show.print_note(note)
            if error is not None:
                show.print_note(f"the rotation was recovered; it leaves {error:.2%} of the embedding")
            if report["check"]:
                before, after = report["check"]["before"], report["check"]["after"]
                show.print_note(f"drafts right in a row: {before:.2f} before, {after:.2f} after")
            show.print_note(f"{self.out} now holds the draft, aligned to basis {basis.id}")
        return 0 if report["check"] is None or report["check"]["better"] else 1

    def _basis(self, target: ej.Target, original: ej.Target | None) -> tuple[Basis, float | None]:
        """(basis, error of its recovery or None). An exported matrix goes before a recovered one whatever the
        method: a target and its drafts are matched by its id, which no recovery yields."""
        from eaglejax.rotation.recover import recover_basis

        exported = target.rotation
        if self.method == "procrustes":
            assert original is not None
            recovered = recover_basis(original, target)
            return _completed(exported, recovered.basis), recovered.error
        if exported is None:
            raise ConfigError(
                f"{self.target} exports no rotation: it is not rotated, or its tool kept the matrix. In the "
                "second case recover it with --method procrustes --original-target T0"
            )
        if exported.gamma is None and original is not None:
            return _completed(exported, recover_basis(original, target).basis), None
        return exported, None

    def _check(self, target: ej.Target) -> dict[str, Any]:
        """Drafts accepted a round before and after, on the same texts."""
        from eaglejax.measure.pair import Pair

        texts = written_texts(target, PROMPTS, max_new_tokens=64)
        text = next(iter(texts.values()))
        read = (read_draft(self.draft, **draft_reading(self.aux_convention)), read_draft(self.out))
        before, after = (Pair(target, file, {"check": text}).base for _, file in read)
        return {"before": before.length, "after": after.length, "better": after.beats(before)}


def _completed(exported: Basis | None, recovered: Basis) -> Basis:
    """``exported``, where there is one, with the final norm's weight: other tools export the matrix alone."""
    if exported is None:
        return recovered
    return exported if exported.gamma is not None else dataclasses.replace(exported, gamma=recovered.gamma)
