"""Expressions that come with a checkpoint: compiled, unless matching them could take for ever.

Python's matcher tries one way after the other. How many there are at the most follows from the expression: a
repetition ends at any character, an alternative is any of its branches. What repeats something ambiguous has
no useful bound and is refused.
"""

from __future__ import annotations

import math
import re
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

LONGEST = 1000
"""Characters of an expression."""

MOST_WAYS = 20_000_000
"""Ways to match a name of ``NAME`` characters that are tried at the most."""

NAME = 64
"""Characters of a module's name, about: model.layers.61.mlp.experts.255.down_proj has 44."""


def compiled(pattern: str) -> re.Pattern[str]:
    """The expression. Raises re.error for none, and ValueError for one that may not end or is too large."""
    if len(pattern) > LONGEST:
        raise ValueError(f"it is longer than {LONGEST} characters")
    try:
        ways, free = _ways(parser.parse(pattern))
    except (RecursionError, OverflowError) as error:
        raise ValueError("it is nested too deeply, or repeats too often") from error
    if ways * math.comb(NAME + free, free) > MOST_WAYS:
        raise ValueError("it can be matched in too many ways; write it with fewer repetitions")
    return re.compile(pattern)


def _ways(parsed: Any) -> tuple[float, int]:
    """(ways of bounded choices, unbounded repetitions) of an expression."""
    ways, free = 1.0, 0
    for op, argument in parsed:
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT):
            least, most, inner = argument
            of_inner, free_inner = _ways(inner)
            if most > 1 and (of_inner > 1 or free_inner):
                raise ValueError("it repeats what can be matched in several ways itself")
            if most > NAME:
                free += 1
            else:
                ways *= (most - least + 1) * of_inner
                free += free_inner
        elif op is ops.BRANCH:
            branches = [_ways(branch) for branch in argument[1]]
            ways *= sum(count for count, _ in branches)
            free += max(more for _, more in branches)
        elif op in (ops.SUBPATTERN, ops.ATOMIC_GROUP, ops.ASSERT, ops.ASSERT_NOT):
            inner = argument if op is ops.ATOMIC_GROUP else argument[-1]
            of_inner, free_inner = _ways(inner)
            ways, free = ways * of_inner, free + free_inner
        elif op in (ops.GROUPREF, ops.GROUPREF_EXISTS):
            raise ValueError("it refers to a group, which no list of modules needs")
    return ways, free
