"""What a family of drafts is to the rest: one record, made in the family's own folder.

Commands, training and measuring know drafts through this record alone: how the files of one are recognised,
read and loaded, what it takes from its target (which is what a rotation of the target concerns), the forms it
is written in, and its settings. A family that is added is a folder, a record, and its entry in
``drafts.registry``.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

from eaglejax.drafts.align import Reads, align_params
from eaglejax.drafts.base import Bound
from eaglejax.drafts.detect import check_basis
from eaglejax.drafts.files import DraftFiles
from eaglejax.drafts.method import DraftMethod
from eaglejax.errors import ConfigError
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target
from eaglejax.rotation.tables import check_rotation


class DraftConfig(Protocol):
    """What every family's configuration of a draft says of its target. ``basis``: id of the basis that the
    features it reads are in; None for the one that the target was trained in."""

    @property
    def basis(self) -> str | None: ...

    @property
    def reads(self) -> Reads: ...

    @property
    def target_hidden_size(self) -> int: ...


class ConfiguredProposer(Protocol):
    """A proposer of a family whose drafts concern a rotation of the target."""

    @property
    def config(self) -> DraftConfig: ...


class UnderstoodFile(Protocol):
    """A draft's checkpoint as read: ``notes`` are choices that a reader could doubt, one sentence each. What
    else was understood is between the family's ``read`` and its other methods."""

    @property
    def path(self) -> Path: ...

    @property
    def notes(self) -> Sequence[str]: ...


Setup = tuple[Any, Any]
"""(configuration, parameters) of a draft."""


class Probe(Protocol):
    """What a diagnosis needs to try a draft this way and that; every choice that a draft's files make is
    tried the other way round. Names say what was changed."""

    def guesses(self, config: Any, params: Any, features: Any, tokens: Any, steps: int) -> Any:
        """Draft ids [steps, B, T - 1] on texts [B, T] with the target's ``features`` [B, T, A, H]: pass k of
        row t guesses token t + 2 + k."""

    def boundaries(self, config: Any, layers: int) -> list[tuple[int, ...]]:
        """Other boundaries that it may have been trained on."""

    def ropes(self, setup: Setup, target: Target) -> Iterable[tuple[str, Setup]]:
        """Other rotary settings."""

    def norm_choices(self, setup: Setup, file: Any) -> Iterable[tuple[str, Setup]]:
        """Other places of the norms."""

    def part_choices(self, setup: Setup, file: Any, target: Target) -> Iterable[tuple[str, Setup]]:
        """Every other choice."""

    def dtype_of(self, weights: Any) -> Any:
        """The dtype that it computes in."""


class DraftFamily(abc.ABC):
    """One family of drafts; subclasses say what differs.

    ``name``: as people write it. ``proposer``: the class of its proposers, ``file`` that of what ``read``
    gives. ``methods`` by name, ``default`` is the one that a draft alone asks for. ``reading``: options of
    ``load_draft`` that say how files are to be understood; the others are the proposer's. ``forms``: those
    that ``write`` knows. ``probe``: what a diagnosis measures it with, None where there is no way.
    ``alone``: it takes nothing from its target, so that no rotation of one concerns it.
    """

    name: ClassVar[str]
    proposer: ClassVar[type]
    file: ClassVar[type]
    methods: ClassVar[Mapping[str, DraftMethod]]
    default: ClassVar[str]
    reading: ClassVar[tuple[str, ...]] = ()
    forms: ClassVar[tuple[str, ...]] = ()
    probe: ClassVar[Probe | None] = None
    alone: ClassVar[bool] = False

    def declared(self, raw: Mapping[str, Any]) -> str | None:
        """What in config.json says that a draft is of this family, None where nothing does."""
        return None

    @abc.abstractmethod
    def shown(self, files: DraftFiles) -> bool:
        """Whether the tensors are those of such a draft; asked where no config declares another family."""

    def within(self, files: DraftFiles) -> bool:
        """Whether files of another kind, a whole target's, hold such a draft too."""
        del files
        return False

    @abc.abstractmethod
    def read(self, files: DraftFiles, *, method: str = "auto", **reading: Any) -> UnderstoodFile:
        """Understand the files. Raises CheckpointError or ConfigError that names what is wrong."""

    def bind(self, file: Any, target: Target, dtype: Any) -> tuple[Any, Any]:
        """(configuration on this target, parameters joined with what they borrow of it)."""
        raise NotImplementedError

    def make(self, config: Any, options: Mapping[str, Any]) -> Any:
        """The proposer of a configuration and its options."""
        return self.proposer(config, **options)

    def reach(self, config: Any, length: int) -> int:
        """Drafts of the longest chain of up to ``length`` that a draft of ``config`` can make."""
        del config
        return length

    def own_embedding(self, params: Any) -> Any:
        """The embedding that the draft ships, None where it borrows the target's."""
        return None

    def load(
        self,
        file: Any,
        target: Target,
        *,
        dtype: Any = None,
        align: bool = False,
        draft: str = "",
        quant: Any = None,
        **options: Any,
    ) -> Bound:
        """A read draft, ready for ``target``; see ``registry.load_draft``."""
        config, params = self.bind(file, target, dtype)
        embed = self.own_embedding(params)
        if not align:
            check_basis(config, _table(embed), target, draft=draft or str(file.path))
            if quant is not None:
                params = self.quantize(params, quant)
            return Bound(self.make(config, options), params, source=draft or str(file.path))
        basis = target.rotation
        if basis is None:
            raise ConfigError(
                f"align is asked for, but {target.name} "
                + ("comes without the matrix of its rotation" if target.basis else "is not rotated")
            )
        if embed is not None:
            check_rotation(embed, target, basis, whose="the draft's embedding")
        params = self.align(params, config, basis)
        if quant is not None:
            params = self.quantize(params, quant)
        config = dataclasses.replace(config, basis=basis.id)
        return Bound(self.make(config, options), params, source=draft or str(file.path))

    def align(self, params: Any, config: Any, basis: Any) -> Any:
        """Parameters that read the rotated target as they read the original; see ``align.align_params``."""
        return align_params(params, config, basis)

    def quantize(self, params: Any, quant: Any) -> Any:
        """Parameters with the draft's own matrices in a scheme, by name or as it is (``draft_scheme``).
        Raises ConfigError where that cannot be."""
        del params
        raise ConfigError(
            f"the weights of {self.name} drafts stay as they are; quant {quant!r} is for EAGLE's"
        )

    def check(self, bound: Bound, target: Target) -> None:
        """Refuse a draft in another basis than the target's before anything is decoded. Raises
        MismatchError."""
        check_basis(
            cast(ConfiguredProposer, bound.proposer).config,
            _table(self.own_embedding(bound.params)),
            target,
            draft=bound.source or "the draft",
            look=False,
        )

    def doubts(self, file: Any) -> Sequence[str]:
        """Those notes on a read draft that may mean another draft than the one read: whoever loads it without
        seeing its notes is warned of them."""
        return ()

    def report(self, file: Any, target: ModelConfig | None) -> dict[str, Any]:
        """The object that ``inspect --json`` prints; ``rows`` is what a person sees of it."""
        return {"path": str(file.path), "method": self.default, "notes": list(file.notes), "target": None}

    def rows(self, report: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(heading, text) of ``inspect``'s table."""
        return [("method", str(report["method"])), *(("note", note) for note in report["notes"])]

    def write(
        self, file: Any, out: Path, *, to: str, target: Target | None, verifier: str | None
    ) -> list[str]:
        """Write a read draft in another form; sentences on what was decided."""
        raise ConfigError(f"{file.path} holds a {self.name} draft, which is written in no other form")

    def write_aligned(
        self, file: Any, out: Path, target: Target, basis: Any, *, original: Target | None, to: str
    ) -> list[str]:
        """Align a read draft to ``target`` and write it; sentences on what was done."""
        raise ConfigError(
            f"{file.path} holds a {self.name} draft, which is aligned when it is loaded (align=True), not on "
            "disk"
        )


def _table(embed: Any) -> dict[str, Any]:
    return {} if embed is None else {"embed": embed}
