"""Names that people and other tools write, matched without regard to case, hyphens and underscores."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping


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
