"""Is a draft in the basis of its target? By ids where both have one, else by geometry.

A rotation moves every row of the embedding and no angle between two: E' = E Q has other rows than E and the
same Gram matrix, E' E'^T = E E^T. A draft that ships the original embedding therefore betrays a target that
was rotated without a word. Without this a rotated target drives acceptance to nothing and no error says why.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from eaglejax.errors import MismatchError
from eaglejax.models.target import Target
from eaglejax.rotation.basis import Basis
from eaglejax.rotation.tables import Tables, compare_tables


def fits_any_folding(config: Any, basis: Basis | None) -> bool:
    """Whether folding the norms, without a turn, changes nothing for a draft: it reads boundaries, which lie
    before any norm, and has a head of its own."""
    reads = config.reads
    return basis is not None and basis.identity and set(reads.features) == {"boundary"} and not reads.head


def check_basis(
    config: Any, weights: Mapping[str, Any], target: Target, *, draft: str = "the draft", look: bool = True
) -> None:
    """Refuse a draft whose basis is not the target's. Raises MismatchError with the command that mends it.

    ``config``: a ``family.DraftConfig``. Ids decide where both have one. A target without (its tool exported
    none) is compared by the draft's own embedding ``weights["embed"]``, which an aligned draft ships
    in the original basis; ``look`` False leaves out that comparison where neither has an id.
    """
    if config.basis is None and target.basis is None:
        found = _compare(weights, target) if look else None
        if found is not None and found.relation == "rotated":
            raise MismatchError(
                f"{target.name} seems to be rotated without saying so, and {draft} to be made for the "
                f"original: {found}. {_mend(draft, target, None)}"
            )
        return
    if config.basis == target.basis:
        return
    basis = target.rotation
    if config.basis is None:
        if fits_any_folding(config, basis):
            return
        raise MismatchError(
            f"{target.name} is rotated (basis {target.basis}) and {draft} was made for the original model: "
            "it would read every feature in the wrong basis and guess almost nothing. "
            + _mend(draft, target, basis)
        )
    if basis is not None:
        raise MismatchError(
            f"{draft} was aligned to basis {config.basis}, {target.name} is in basis {basis.id}; align the "
            "original draft to this target"
        )
    found = _compare(weights, target)
    if found is None or found.relation != "rotated":
        raise MismatchError(
            f"{draft} was aligned to the rotated basis {config.basis}, but {target.name} "
            + ("does not say that it is rotated" if found is None else f"is not that rotated model: {found}")
            + "; use the original draft, or align it to this target"
        )


def _compare(weights: Mapping[str, Any], target: Target) -> Tables | None:
    """Of the draft's own embedding with the target's; None where it ships none."""
    return compare_tables(weights["embed"], target.params["embed"]) if "embed" in weights else None


def _mend(draft: str, target: Target, basis: Basis | None) -> str:
    """The command that aligns ``draft`` to ``target``."""
    name = "DRAFT" if draft == "the draft" else draft
    if basis is not None:
        command = align_command(name, target)
        return f"Align it with `{command}`, or when it is loaded with load_draft(..., align=True)"
    return (
        "Its rotation was not exported; recover it from the original model T0 and align with "
        f"`{align_command(name, target, recover=True)}`"
    )


def align_command(draft: str, target: Target, *, recover: bool = False) -> str:
    """The command line that aligns ``draft``; with ``recover`` by a rotation fitted to the original T0."""
    words = ["eaglejax", "align", "--draft", draft, "--target", target.name]
    words += ["--out", f"{draft.rstrip('/')}-aligned"]
    return shlex.join(words + (["--method", "procrustes", "--original-target", "T0"] if recover else []))
