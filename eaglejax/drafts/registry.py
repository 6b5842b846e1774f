"""The families of drafts there are, which of them a folder holds, and ``load_draft``.

What config.json declares goes before what the tensors look like: many kinds share names of tensors, and a
declared kind that does not run is refused as what it is.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from eaglejax.checkpoint.sources import Spec
from eaglejax.drafts.base import Bound
from eaglejax.drafts.draft_model.family import DraftModelFamily
from eaglejax.drafts.eagle.family import EagleFamily
from eaglejax.drafts.family import DraftFamily, DraftMethod
from eaglejax.drafts.files import DraftFiles, opened
from eaglejax.drafts.known import KNOWN, KnownDraft
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.models.target import Target, weight_dtype
from eaglejax.naming import known_name

FAMILIES: list[DraftFamily] = [EagleFamily(), DraftModelFamily()]
"""In the order in which they are asked about tensors."""


@contextlib.contextmanager
def registered(family: DraftFamily) -> Iterator[None]:
    """One family more, asked first, while the body runs."""
    FAMILIES.insert(0, family)
    try:
        yield
    finally:
        FAMILIES.remove(family)


def recognise(files: DraftFiles) -> DraftFamily:
    """The family of a draft. Raises CheckpointError, with its name, for a kind that does not run here."""
    for family in FAMILIES:
        if family.declared(files.raw) and not any(kind.declared(files.raw) for kind in KNOWN):
            return family
    for kind in KNOWN:
        if said := kind.declared(files.raw):
            raise _refusal(files, kind, f"config.json says {said}")
    for kind in KNOWN:
        if kind.holds(files):
            raise _refusal(files, kind, "its files say so")
    for family in FAMILIES:
        if family.shown(files):
            return family
    names = sorted(files.tensors.names())
    raise CheckpointError(
        f"{files.path} holds no draft of a kind that is known: its tensors are {', '.join(names[:4])}"
        f"{' ...' if len(names) > 4 else ''}. {_runs()}"
    )


def _refusal(files: DraftFiles, kind: KnownDraft, why: str) -> CheckpointError:
    return CheckpointError(
        f"{files.path} is a draft of the kind {kind.name} ({why}), which eaglejax does not run. {_runs()}"
    )


def _runs() -> str:
    return f"Drafts that run are of these kinds: {', '.join(f.name for f in FAMILIES)}"


def family_of(proposer: Any) -> DraftFamily | None:
    """The family that made a proposer, None for one without files (n-grams, a prediction)."""
    return next((family for family in FAMILIES if isinstance(proposer, family.proposer)), None)


def family_reading(file: Any) -> DraftFamily:
    """The family that understood a file. Raises ConfigError for none."""
    for family in FAMILIES:
        if isinstance(file, family.file):
            return family
    raise ConfigError(f"{type(file).__name__} is the file of no family of drafts")


def methods() -> dict[str, tuple[DraftFamily, DraftMethod]]:
    """Every family's methods by name."""
    return {name: (family, method) for family in FAMILIES for name, method in family.methods.items()}


def read_draft(spec: Spec, *, method: str = "auto", **reading: Any) -> tuple[DraftFamily, Any]:
    """(family, understood file) of a draft: a folder, a Hub id or the word for a shipped one.

    ``method``: refuse a draft that cannot run so. ``reading``: the family's options of how its files are to
    be understood. Raises CheckpointError or ConfigError that names what is wrong.
    """
    files = opened(spec)
    family = recognise(files)
    known = known_name(method, (*family.methods, "auto"))
    if known is None:
        raise ConfigError(
            f"{files.path} holds a draft of the kind {family.name}; it cannot run as {method}, but as "
            f"{' or '.join(family.methods)}"
        )
    _check_options(family, reading, family.reading)
    return family, family.read(files, method=known, **reading)


def load_draft(
    spec: Spec,
    target: Target,
    *,
    dtype: Any = None,
    method: str = "auto",
    align: bool = False,
    **options: Any,
) -> Bound:
    """A draft of any family that runs, ready for ``generate(..., proposer=...)``.

    ``spec``: a folder or a Hub id, in any published form (see ``docs/eagle.md``), or a smaller model with the
    target's tokenizer. ``dtype``: of its weights (None: the target's). ``method``: refuse a draft that cannot
    run so ("eagle1", "eagle3", "draft_model", ...). ``align``: the draft was made for the original of this
    rotated target; map what it reads (see ``docs/rotation.md``). ``options``: how its files are to be
    understood (EAGLE: ``aux_convention``, ``aux``) and the proposer's settings (``Eagle``: tree, sample,
    temperature, min_confidence, cache_dtype). Raises CheckpointError for a file that is not understood,
    MismatchError for a draft of another target or in another basis than it, ConfigError for options that
    cannot be.
    """
    files = opened(spec)
    family = recognise(files)
    reading = {name: options.pop(name) for name in family.reading if name in options}
    family, file = read_draft(spec, method=method, **reading)
    for doubt in family.doubts(file):
        warnings.warn(f"{files.spec}: {doubt}", stacklevel=2)
    return family.load(
        file,
        target,
        dtype=target.dtype if dtype is None else weight_dtype(dtype),
        align=align,
        draft=files.spec,
        **options,
    )


def _check_options(family: DraftFamily, given: Any, known: tuple[str, ...]) -> None:
    unknown = set(given) - set(known)
    # None leaves an option to the family.
    for name in unknown:
        if given[name] is not None:
            raise ConfigError(f"{name} is no option of {family.name} drafts")
        del given[name]
