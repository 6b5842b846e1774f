"""Names that people and other tools write, matched without regard to case, hyphens and underscores."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping


def plain(name: str) -> str:
    """``name`` in lower case and without ``-``, ``_`` and blanks: what two spellings of one name share."""
    return re.sub(r"[-_\s]", "", name.casefold())


def known_name(name: str, known: Collection[str], aliases: Mapping[str, str] | None = None) -> str | None:
    """The one of ``known`` that ``name`` means, None for no such name.

    An exact match wins; spelling is compared by ``plain`` after that. ``aliases``: names of other tools, each
    with the known one that it means.
    """
    if name in known:
        return name
    spelt = {plain(other): meant for other, meant in (aliases or {}).items()}
    spelt |= {plain(other): other for other in known}
    return spelt.get(plain(name))


def misspelt(name: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that ``name`` is a slip of the pen for, None where it is a name of its own.

    At most two letters too many, too few, wrong or in the wrong order; names that differ by a whole word
    (``v_head_dim``, ``qk_head_dim``, ``head_dim``) are other names.
    """
    best: tuple[int, str] | None = None
    for other in known:
        slips = 0 if plain(name) == plain(other) else _slips(plain(name), plain(other))
        if slips and _by_a_word(name.split("_"), other.split("_")):
            continue
        if slips <= (2 if len(other) > 6 else 1) and (best is None or slips < best[0]):
            best = slips, other
    return None if best is None else best[1]


def _by_a_word(one: list[str], other: list[str]) -> bool:
    """Whether two names differ by words: one has more of them, or one in whose place stands another, half of
    whose letters differ."""
    if len(one) != len(other):
        return set(one) >= set(other) or set(other) >= set(one)
    return any(a != b and 2 * _slips(a, b) >= max(len(a), len(b)) for a, b in zip(one, other, strict=True))


def _slips(one: str, other: str) -> int:
    """Letters inserted, left out, replaced or swapped with a neighbour between two names; 3 for more."""
    if abs(len(one) - len(other)) > 2:
        return 3
    rows = [list(range(len(other) + 1))]
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a != b)))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                row[-1] = min(row[-1], rows[-2][j - 2] + 1)
        rows.append(row)
    return min(rows[-1][-1], 3)
