"""How large a draft can be. What is beyond is refused in one line before anything of its size is made:
programs hold a step for each level of a draft and each token of an n-gram, and a compiler ends badly on
thousands."""

from __future__ import annotations

from eaglejax.errors import ConfigError

MOST_DEPTH = 128
"""Drafts on one path: tokens that a round can accept beside its own."""

MOST_NODES = 1024
"""Nodes of a draft, root included."""

MOST_BRANCHING = 128
"""Children of a node, and nodes that a dynamic tree expands a level."""

MOST_POOL = 1 << 15
"""Nodes that a dynamic tree scores, of which it keeps the best."""

MOST_NGRAM = 64
"""Tokens of a suffix that is searched for, or of agreement that is told apart."""

MOST_PREDICTED = 1 << 18
"""Tokens of a predicted text."""


def check_count(what: str, value: object, most: int, *, least: int = 1) -> None:
    """Refuse (ConfigError) a setting that is no integer from ``least`` to ``most``; ``what`` names it."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{what} is {value!r:.80}; it must be an integer from {least} to {most}")


def check_paths(paths: object) -> None:
    """Refuse (ConfigError) a list of a tree's paths that is too long, or holds one that is."""
    assert isinstance(paths, list | tuple)
    check_count("the number of a tree's paths", len(paths), MOST_NODES - 1, least=0)
    for path in paths:
        check_count("the length of a tree's path", len(path), MOST_DEPTH, least=0)
