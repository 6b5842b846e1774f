"""``eaglejax convert``: a draft's checkpoint in the form that another project loads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from eaglejax.checkpoint.files import check_output
from eaglejax.checkpoint.sources import resolve
from eaglejax.cli import methods, show
from eaglejax.cli.methods import draft_reading
from eaglejax.config import AuxConvention
from eaglejax.drafts.places import draft_path
from eaglejax.drafts.registry import check_form, read_draft


@dataclasses.dataclass(frozen=True)
class Convert:
    """Write a draft checkpoint in another producer's form; its tensors keep their values and dtypes."""

    draft: Annotated[str, tyro.conf.Positional]
    """Folder or Hub id of the draft."""
    to: str
    """The form: safeailab (EaModel), sglang (SGLang, SpecForge), speculators (vLLM), modelopt, or eaglejax,
    which holds every draft as it is."""
    output: Path
    """New folder for config.json and model.safetensors."""
    target: str | None = None
    """The draft's target, for parts that it borrows or that the form leaves to the target."""
    verifier: str | None = None
    """Name of the target to record where the form has a place for it (default: what was recorded before)."""
    aux_convention: AuxConvention = "auto"
    """What layer ids in the draft's config count: hidden-state boundaries, or blocks (their output is
    meant)."""
    aux: tuple[int, ...] | None = None
    """Hidden-state boundaries that are read instead of what the draft's config says (0 = embedding)."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else there."""

    def run(self) -> int:
        """The command."""
        check_form(self.to)
        check_output(self.output)
        draft_path(self.draft)
        if self.target is not None:
            resolve(self.target)
        family, file = read_draft(self.draft, **draft_reading(self.aux_convention, self.aux))
        check_form(self.to, family)
        target = None if self.target is None else methods.load_target(self.target, dtype="float32")
        notes = family.write(
            file, self.output, to=self.to, target=target, verifier=self.verifier or self.target
        )
        notes = [*file.notes, *notes]
        if self.json:
            show.print_json({"output": str(self.output), "form": self.to, "notes": notes})
        else:
            for note in notes:
                show.print_note(note)
            show.print_note(f"{self.output} now holds the draft in the {self.to} form")
        return 0
