"""What a configuration is, in a form that outlives the code: what has its default value is left out.

Caches, checkpoints and sweeps are kept under such a description or its digest. A field that is added later,
with a default that means what was computed before, leaves every one of them valid.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

VERSION = 1
"""Of the description. Raise it when a default comes to mean something else."""


def described(value: Any) -> Any:
    """``value`` as JSON: a dataclass is the object of its fields that differ from their defaults.

    Knows None, booleans, numbers, texts, lists, tuples, mappings and dataclasses, however nested. Raises
    TypeError for anything else, whose text need not be stable.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if not _is_default(value, f)]
        return {f.name: described(getattr(value, f.name)) for f in fields}
    if isinstance(value, Mapping):
        return {str(key): described(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [described(part) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} has no description")


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    has = getattr(value, field.name)
    if field.default is not dataclasses.MISSING:
        return type(has) is type(field.default) and has == field.default
    return field.default_factory is not dataclasses.MISSING and has == field.default_factory()


def digest(*values: Any) -> str:
    """SHA-256 over the descriptions of ``values``, 32 hexadecimal digits."""
    text = json.dumps([VERSION, *map(described, values)], sort_keys=True, allow_nan=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


_VALUES = 256
"""Of each weight that go into a digest: evenly spaced, so that any training or conversion changes some."""


def model_digest(config: Any, params: Any) -> str:
    """SHA-256 over a configuration and over evenly spaced values of every weight, 32 hexadecimal digits.
    Another dtype or other weights have another digest."""
    import jax

    found = hashlib.sha256(digest(config).encode())
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        flat = leaf.reshape(-1)
        sample = np.asarray(flat[:: max(1, flat.shape[0] // _VALUES)])
        found.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        found.update(sample.tobytes())
    return found.hexdigest()[:32]
