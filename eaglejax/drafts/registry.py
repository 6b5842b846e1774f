"""The families of drafts there are, which of them a folder holds, and ``load_draft``.

What config.json declares goes before what the tensors look like: many kinds share names of tensors, and a
declared kind that does not run is refused as what it is. Names of methods are known without jax, which a
family's record imports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from eaglejax.drafts.dflash.methods import FORM_NAMES as DFLASH_FORMS
from eaglejax.drafts.dflash.methods import METHODS as DFLASH
from eaglejax.drafts.draft_model.methods import METHODS as WHOLE_MODEL
from eaglejax.drafts.eagle.methods import FORM_NAMES
from eaglejax.drafts.eagle.methods import METHODS as EAGLE
from eaglejax.drafts.medusa.methods import FORM_NAMES as MEDUSA_FORMS
from eaglejax.drafts.medusa.methods import METHODS as MEDUSA
from eaglejax.drafts.method import DraftMethod
from eaglejax.drafts.mtp.methods import FORM_NAMES as MTP_FORMS
from eaglejax.drafts.mtp.methods import METHODS as MTP
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.naming import known_name

if TYPE_CHECKING:
    from eaglejax.checkpoint.sources import Spec
    from eaglejax.drafts.base import Bound
    from eaglejax.drafts.family import DraftFamily
    from eaglejax.drafts.files import DraftFiles
    from eaglejax.drafts.known import KnownDraft
    from eaglejax.models.target import Target


@dataclasses.dataclass(frozen=True)
class Entry:
    """A family: its ``methods`` by name, the ``forms`` that it is written in, and its ``record``, which is
    made when it is asked for."""

    methods: Mapping[str, DraftMethod]
    forms: tuple[str, ...]
    record: Callable[[], DraftFamily]


def _mtp() -> DraftFamily:
    from eaglejax.drafts.mtp.family import MtpFamily

    return MtpFamily()


def _dflash() -> DraftFamily:
    from eaglejax.drafts.dflash.family import DFlashFamily

    return DFlashFamily()


def _medusa() -> DraftFamily:
    from eaglejax.drafts.medusa.family import MedusaFamily

    return MedusaFamily()


def _eagle() -> DraftFamily:
    from eaglejax.drafts.eagle.family import EagleFamily

    return EagleFamily()


def _whole_model() -> DraftFamily:
    from eaglejax.drafts.draft_model.family import DraftModelFamily

    return DraftModelFamily()


ENTRIES: list[Entry] = [
    Entry(MTP, MTP_FORMS, _mtp),
    Entry(DFLASH, DFLASH_FORMS, _dflash),
    Entry(MEDUSA, MEDUSA_FORMS, _medusa),
    Entry(EAGLE, FORM_NAMES, _eagle),
    Entry(WHOLE_MODEL, (), _whole_model),
]
"""In the order in which they are asked about tensors."""


def families() -> list[DraftFamily]:
    """The record of every family, in the order of ``ENTRIES``."""
    return [entry.record() for entry in ENTRIES]


@contextlib.contextmanager
def registered(family: DraftFamily) -> Iterator[None]:
    """One family more, asked first, while the body runs."""
    entry = Entry(family.methods, family.forms, lambda: family)
    ENTRIES.insert(0, entry)
    try:
        yield
    finally:
        ENTRIES.remove(entry)


def recognise(files: DraftFiles) -> DraftFamily:
    """The family of a draft. Raises CheckpointError, with its name, for a kind that does not run here."""
    from eaglejax.drafts.known import KNOWN

    for family in families():
        if family.declared(files.raw) and not any(kind.declared(files.raw) for kind in KNOWN):
            return family
    for kind in KNOWN:
        if said := kind.declared(files.raw):
            raise _refusal(files, kind, f"config.json says {said}")
    for kind in KNOWN:
        if kind.holds(files):
            raise _refusal(files, kind, "its files say so")
    for family in families():
        if family.shown(files):
            return family
    names = sorted(files.tensors.names())
    raise CheckpointError(
        f"{files.path} holds no draft of a kind that is known: its tensors are {', '.join(names[:4])}"
        f"{' ...' if len(names) > 4 else ''}. {_runs()}"
    )


def _family_for(files: DraftFiles, method: str) -> DraftFamily:
    """The family of a draft, or the one of ``method`` whose drafts a whole target's files hold too."""
    asked = next((family for family in families() if known_name(method, family.methods)), None)
    if asked is not None and not files.gguf and asked.within(files):
        return asked
    return recognise(files)


def _refusal(files: DraftFiles, kind: KnownDraft, why: str) -> CheckpointError:
    return CheckpointError(
        f"{files.path} is a draft of the kind {kind.name} ({why}), which eaglejax does not run. {_runs()}"
    )


def _runs() -> str:
    return f"Drafts that run are of these kinds: {', '.join(f.name for f in families())}"


def family_of(proposer: Any) -> DraftFamily | None:
    """The family that made a proposer, None for one without files (n-grams, a prediction)."""
    return next((family for family in families() if isinstance(proposer, family.proposer)), None)


def check_basis_of(bound: Bound, target: Target) -> None:
    """Refuse a draft, or a cascade with one among its parts, in another basis than the target's. Raises
    MismatchError."""
    from eaglejax.drafts.base import Bound
    from eaglejax.drafts.cascade.proposer import Cascade

    if isinstance(bound.proposer, Cascade):
        for part, params in zip(bound.proposer.parts, bound.params, strict=True):
            check_basis_of(Bound(part, params, bound.source), target)
    elif (family := family_of(bound.proposer)) is not None:
        family.check(bound, target)


def family_reading(file: Any) -> DraftFamily:
    """The family that understood a file. Raises ConfigError for none."""
    for family in families():
        if isinstance(file, family.file):
            return family
    raise ConfigError(f"{type(file).__name__} is the file of no family of drafts")


def methods() -> dict[str, tuple[Entry, DraftMethod]]:
    """Every family's methods by name."""
    return {name: (entry, method) for entry in ENTRIES for name, method in entry.methods.items()}


def check_form(form: str, family: DraftFamily | None = None) -> None:
    """Raises ConfigError for a form that no family (None), or not this one, is written in."""
    if family is not None:
        if form not in family.forms:
            there = ", ".join(family.forms) or "none"
            raise ConfigError(f"{family.name} drafts have no form {form!r}; they have {there}")
        return
    known = list(dict.fromkeys(name for entry in ENTRIES for name in entry.forms))
    if form not in known:
        raise ConfigError(f"drafts have no form {form!r}; they have {', '.join(known)}")


def read_draft(spec: Spec, *, method: str = "auto", **reading: Any) -> tuple[DraftFamily, Any]:
    """(family, understood file) of a draft: a folder, a Hub id or the word for a shipped one.

    ``method``: refuse a draft that cannot run so. ``reading``: the family's options of how its files are to
    be understood. Raises CheckpointError or ConfigError that names what is wrong.
    """
    from eaglejax.drafts.files import opened

    files = opened(spec)
    family = _family_for(files, method)
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
    quant: Any = None,
    **options: Any,
) -> Bound:
    """A draft of any family that runs, ready for ``generate(..., proposer=...)``.

    ``spec``: a folder or a Hub id, in any published form (see ``docs/eagle.md``), or a smaller model with the
    target's tokenizer. ``dtype``: of its weights (None: the target's). ``method``: refuse a draft that cannot
    run so ("eagle1", "eagle3", "draft_model", ...). ``align``: the draft was made for the original of this
    rotated target; map what it reads (see ``docs/rotation.md``). ``quant``: scheme in which
    an EAGLE draft's own matrices are held ("w8a8"): what a draft guesses is judged anyhow. ``options``: how
    its files are to be understood (EAGLE: ``aux_convention``, ``aux``) and the proposer's settings
    (``Eagle``: tree, sample, temperature, min_confidence, cache_dtype). Raises CheckpointError for a file
    that is not understood, MismatchError for a draft of another target or in another basis than it,
    ConfigError for options that cannot be.
    """
    from eaglejax.drafts.files import opened
    from eaglejax.models.target import weight_dtype

    files = opened(spec)
    family = _family_for(files, method)
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
        **({} if quant is None else {"quant": quant}),
        **options,
    )


def _check_options(family: DraftFamily, given: Any, known: tuple[str, ...]) -> None:
    unknown = set(given) - set(known)
    # None leaves an option to the family.
    for name in unknown:
        if given[name] is not None:
            raise ConfigError(f"{name} is no option of {family.name} drafts")
        del given[name]
