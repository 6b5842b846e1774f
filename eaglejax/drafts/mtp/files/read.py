"""Understanding MTP modules, in a folder of their own or among the tensors of the target that has them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np

from eaglejax.checkpoint.hf import MARKER as KEY
from eaglejax.checkpoint.hf import PLAIN_DTYPES
from eaglejax.drafts.files import DraftFiles, TensorFile
from eaglejax.drafts.mtp.config import Recycle
from eaglejax.drafts.mtp.files.layouts import (
    EMBEDDINGS,
    LAYOUTS,
    OWN,
    Naming,
    own_modules,
    plain_name,
)
from eaglejax.errors import CheckpointError, ConfigError

KIND = "mtp"
"""What eaglejax's own block in config.json calls such a draft."""


class ModuleStore:
    """The tensors of MTP modules under plain names. Raises CheckpointError when two get the same one."""

    def __init__(self, file: TensorFile, names: Mapping[str, str]) -> None:
        self._file, self.stored = file, names

    def names(self) -> Collection[str]:
        return self.stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(self.stored[name])

    def dtype(self, name: str) -> np.dtype:
        return self._file.dtype(self.stored[name])

    def array(self, name: str) -> np.ndarray:
        return self._file.array(self.stored[name])

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._file.rows(self.stored[name], start, stop)


@dataclasses.dataclass(frozen=True)
class MtpFile:
    """Understood modules.

    ``layout``: a name of ``LAYOUTS``, or ``OWN``. ``numbers``: of the modules as the layout counts them.
    ``embeddings``: plain names of those that the file holds. ``whole``: the tensors are part of a target's
    checkpoint, whose own are left out. ``recycle``, ``basis``: see ``MtpConfig``.
    """

    path: Path
    layout: str
    numbers: tuple[int, ...]
    store: ModuleStore
    embeddings: tuple[str, ...]
    recycle: Recycle
    raw: Mapping[str, Any]
    whole: bool = False
    basis: str | None = None
    notes: tuple[str, ...] = ()
    ids: None = None

    @property
    def naming(self) -> Naming:
        """The layout, unless it is the own form."""
        return LAYOUTS[self.layout]


def layouts_in(names: Collection[str]) -> list[str]:
    """Layouts whose modules are among plain ``names``; those of MiMo and speculators have the same."""
    found = [name for name, layout in LAYOUTS.items() if layout.found(names)]
    return [OWN] if own_modules(names) else found


def read_modules(files: DraftFiles, *, whole: bool = False, recycle: Recycle | None = None) -> MtpFile:
    """Understand the modules in ``files``; ``whole``: among a target's tensors.

    ``recycle``: instead of what config.json says, or the usual. Raises CheckpointError for files without
    modules that are known, or with modules of two layouts, and ConfigError for settings that cannot be.
    """
    where = files.path
    stored: dict[str, str] = {}
    for name in files.names:
        plain = plain_name(name)
        if plain in stored and not whole:
            raise CheckpointError(
                f"{where} holds {plain} twice: as {stored[plain]!r} and as {name!r}; keep the right one"
            )
        stored[plain] = name
    found = layouts_in(stored)
    if not found:
        raise CheckpointError(
            f"{where} holds no MTP modules of a layout that is known ({', '.join((*LAYOUTS, OWN))}): there "
            "is no projection of embedding and state such as model.layers.61.eh_proj.weight, mtp.fc.weight "
            "or model.mtp_layers.0.input_proj.weight"
        )
    notes: list[str] = []
    layout = _settle(found, files, stored, notes)
    raw = files.raw
    block = raw.get(KEY) if isinstance(raw.get(KEY), Mapping) else {}
    assert isinstance(block, Mapping)
    said = recycle or block.get("recycle") or "post_norm"
    if said not in get_args(Recycle):
        raise ConfigError(f"{where}: recycle is {said!r:.80}; it is one of {', '.join(get_args(Recycle))}")
    if layout == OWN:
        numbers = tuple(range(own_modules(stored)))
    else:
        numbers = LAYOUTS[layout].found(stored)
        _check_numbers(numbers, layout, raw, where, whole)
    wanted = [n for n in stored if any(re.fullmatch(pattern, n) for pattern in EMBEDDINGS)]
    if whole:
        naming = LAYOUTS[layout]
        # The target's own embedding and head are borrowed, not read again.
        kept = {n for n in stored if naming.owns(n, numbers)} - {"lm_head.weight"}
        stored = {n: stored[n] for n in kept}
        wanted = [n for n in wanted if n in kept]
    store = ModuleStore(files.tensors, stored)
    for name in store.names():
        if store.dtype(name).name not in PLAIN_DTYPES:
            raise CheckpointError(
                f"{where}: tensor {name!r} is {store.dtype(name).name}; MTP modules are read as "
                f"{', '.join(PLAIN_DTYPES)}"
            )
    basis = block.get("basis")
    if basis is not None and not isinstance(basis, str):
        raise ConfigError(f"{where}: {KEY}.basis is {basis!r:.80}; it is the id of a basis")
    return MtpFile(
        path=where,
        layout=layout,
        numbers=numbers,
        store=store,
        embeddings=tuple(sorted(wanted)),
        recycle=said,
        raw=raw,
        whole=whole,
        basis=basis,
        notes=tuple(notes),
    )


def _settle(found: list[str], files: DraftFiles, stored: Mapping[str, str], notes: list[str]) -> str:
    """Which of the layouts it is: what vLLM's trainer writes says so, and MiMo's modules lie in its model."""
    if set(found) == {"mimo", "speculators"}:
        if "speculators_model_type" in files.raw or "speculators_config" in files.raw:
            return "speculators"
        if not any(name.startswith("model.") for name in stored.values()):
            notes.append(
                "input_proj is taken for MiMo's, which reads [state, embedding]; a file of the speculators "
                "form says so in config.json (speculators_model_type)"
            )
        return "mimo"
    if len(found) > 1:
        raise CheckpointError(f"{files.path} holds MTP modules of several layouts: {', '.join(found)}")
    return found[0]


def _check_numbers(
    numbers: tuple[int, ...], layout: str, raw: Mapping[str, Any], where: Path, whole: bool
) -> None:
    if not numbers:
        raise CheckpointError(f"{where} lacks the layers of its MTP modules ({layout} layout)")
    counts = (raw.get(key) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    said = next((count for count in counts if count is not None), None)
    if numbers != tuple(range(numbers[0], numbers[0] + len(numbers))):
        lost = next(i for i in range(numbers[0], numbers[-1]) if i not in numbers)
        raise CheckpointError(f"{where} lacks MTP module {lost}, between {numbers[0]} and {numbers[-1]}")
    if said is not None and said != len(numbers):
        raise CheckpointError(
            f"{where}: config.json promises {said!r:.80} MTP modules, there are tensors of {len(numbers)} "
            f"({', '.join(map(str, numbers))})"
        )
    first = raw.get("num_hidden_layers")
    if whole and layout == "deepseek" and first != numbers[0]:
        raise CheckpointError(
            f"{where}: the first MTP module is layer {numbers[0]}, and the model has {first!r:.80} layers"
        )
