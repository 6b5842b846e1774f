"""How the tokens of one row are chosen, as a user writes it; checked without starting jax."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

from eaglejax.errors import ConfigError

MOST_BIAS = 1e9
"""Largest size of a number in ``logit_bias``; ``-inf`` bans a token."""

MOST_PENALTY = 1000.0
"""Largest size of a presence or frequency penalty, and of a repetition penalty and its inverse."""


def _number(name: str, value: Any, low: float, high: float, allowed: str, *, whole: bool = False) -> None:
    # numpy's numbers are registered as such, its booleans are not.
    good = isinstance(value, numbers.Integral if whole else numbers.Real) and not isinstance(value, bool)
    if not good or not low <= value <= high:  # NaN fails every comparison
        raise ConfigError(f"{name}={value!r} cannot be; it must be {allowed}")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of one row are chosen. Raises ConfigError for a value that cannot be.

    ``temperature`` 0 is greedy: the lowest id among the largest processed logits, whatever the filters say.
    ``top_k`` 0 or None, ``top_p`` 1 and ``min_p`` 0 are off; a ``top_k`` past the vocabulary is off too.
    ``min_p`` is relative to the largest probability. ``repetition_penalty`` (0.001 to 1000) divides positive
    and multiplies negative logits of every token in the prompt or the text so far (CTRL, arXiv:1909.05858);
    ``presence_penalty`` and ``frequency_penalty`` (-1000 to 1000) are subtracted from generated tokens once,
    or once an occurrence. ``logit_bias`` maps a token id to a number (-1e9 to 1e9) added to its logit
    (``-inf`` bans it). Beyond these ranges, far wider than use, logits would overflow or lose themselves in
    subnormal numbers, which programs round differently. ``seed`` None: a fresh one for every run.
    """

    temperature: float = 0.0
    top_k: int | None = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        big = 3.4028234663852886e38  # f32's largest number
        _number("temperature", self.temperature, 0.0, big, "a finite number, 0 (greedy) or more")
        if self.top_k is not None:
            whole = "a whole number, 0 or None (off) or more"
            _number("top_k", self.top_k, 0, 2**31 - 1, whole, whole=True)
        _number("top_p", self.top_p, 0.0, 1.0, "a number above 0 and at most 1 (off)")
        if self.top_p <= 0.0:
            raise ConfigError(f"top_p={self.top_p!r} keeps no token; it must be above 0 and at most 1 (off)")
        _number("min_p", self.min_p, 0.0, 1.0, "a number from 0 (off) to 1")
        least, most = 1 / MOST_PENALTY, MOST_PENALTY
        allowed = f"a number from {least:g} to {most:g} (1 is off)"
        _number("repetition_penalty", self.repetition_penalty, least, most, allowed)
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -most, most, f"a number from {-most:g} to {most:g} (0 is off)")
        if self.seed is not None:
            _number("seed", self.seed, 0, 2**64 - 1, "None or a whole number from 0 to 2**64 - 1", whole=True)
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))

    @property
    def penalised(self) -> bool:
        """Some penalty is on."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def filtered(self) -> bool:
        """Some filter of the distribution is on."""
        return bool(self.top_k) or self.top_p < 1.0 or self.min_p > 0.0


def _bias_pairs(bias: Any) -> tuple[tuple[int, float], ...] | None:
    """Pairs sorted by token id, so that equal settings are equal and hashable."""
    if not bias:
        return None
    try:
        pairs = dict(bias).items()
    except (TypeError, ValueError):
        raise ConfigError(f"logit_bias={bias!r} cannot be; it must map token ids to numbers") from None
    for token, value in pairs:
        _number(
            "logit_bias token", token, 0, 2**31 - 1, "a token id, a whole number of 0 or more", whole=True
        )
        allowed = f"a number from {-MOST_BIAS:g} to {MOST_BIAS:g}, or -inf to ban the token"
        _number(f"logit_bias[{token}]", value, -math.inf, MOST_BIAS, allowed)
        if -math.inf < value < -MOST_BIAS:
            raise ConfigError(f"logit_bias[{token}]={value!r} cannot be; it must be {allowed}")
    return tuple(sorted((int(token), float(value)) for token, value in pairs))
