"""Targets by the names of their variants: rotated, then quantised, over a cache of their own.

A name is ``float`` or a scheme as ``experiments.quantization.perplexity`` has it, followed by words with
``+`` before each: ``r1`` to ``r4`` (see ``quant.rotate``; r1 is a Hadamard matrix) and ``kv-`` with a cache
format. ``w4a8-g32+mse+r1+r2+r4`` and ``float+kv-int8+r3`` are such names.
"""

from __future__ import annotations

import dataclasses
import re

from eaglejax.errors import ConfigError
from eaglejax.kv_format import KVFormat
from eaglejax.models.target import Target
from eaglejax.quant.calibrate import Statistics
from eaglejax.rotation.rotate import Rotation, rotate_target
from experiments.quantization import perplexity

SEED = 0
"""Of the rotation's signs."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """``weights``: float or a scheme with what is done besides; ``rotations``: those of r1 to r4 that are
    applied, in order; ``cache``: format of keys and values, None for the target's dtype."""

    name: str
    weights: str
    rotations: tuple[str, ...]
    cache: str | None

    @classmethod
    def parse(cls, name: str) -> Variant:
        """The variant called ``name``. Raises ConfigError for words that mean nothing or come twice."""
        weights, *words = name.split("+")
        rotations = tuple(sorted(word for word in words if re.fullmatch("r[1-4]", word)))
        caches = [word for word in words if word.startswith("kv-")]
        besides = [word for word in words if word not in rotations and word not in caches]
        if len(set(words)) < len(words) or len(caches) > 1:
            raise ConfigError(f"variant {name!r} says something twice")
        if weights == "float" and besides:
            raise ConfigError(f"variant {name!r}: {', '.join(besides)} changes nothing of float weights")
        cache = caches[0].removeprefix("kv-") if caches else None
        if cache is not None:
            KVFormat(cache)
        return cls(name, "+".join([weights, *besides]), rotations, cache)

    @property
    def turned(self) -> str:
        """The rotations in one word, empty for none."""
        return "+".join(self.rotations)


class Targets:
    """Variants of one float target. The last rotated target is kept: variants that share a rotation come
    one after the other cheaply."""

    def __init__(self, original: Target) -> None:
        self.original = original
        self._last: tuple[tuple[str, ...], Target] = ((), original)

    def rotated(self, rotations: tuple[str, ...]) -> Target:
        """The float target with these rotations, itself for none."""
        if not rotations:
            return self.original
        if self._last[0] != rotations:
            self._last = ((), self.original)  # the one before is let go first
            r1 = Rotation("hadamard", self.original.config.hidden_size, SEED) if "r1" in rotations else None
            online = {name: name in rotations for name in ("r2", "r3", "r4")}
            self._last = (rotations, rotate_target(self.original, r1, **online))
        return self._last[1]

    def make(self, variant: Variant) -> Target:
        """The target that a variant names. Raises ConfigError where it cannot be made of this one, and for
        schemes that need calibration."""
        target = perplexity.variant(self.rotated(variant.rotations), variant.weights, Statistics({}, 0, 0))
        return target if variant.cache is None else dataclasses.replace(target, cache_format=variant.cache)
