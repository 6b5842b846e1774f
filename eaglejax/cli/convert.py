"""``eaglejax convert``: a draft's checkpoint in the form that another project loads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from eaglejax.checkpoint.target import load_target
from eaglejax.cli import show
from eaglejax.cli.methods import draft_reading
from eaglejax.config import AuxConvention
from eaglejax.drafts.registry import read_draft
from eaglejax.errors import ConfigError


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
        family, file = read_draft(self.draft, **draft_reading(self.aux_convention, self.aux))
        if self.to not in family.forms:
            raise ConfigError(
                f"{family.name} drafts have no form {self.to!r}; they have "
                f"{', '.join(family.forms) or 'none'}"
            )
        target = None if self.target is None else load_target(self.target, dtype="float32")
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
