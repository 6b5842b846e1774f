"""A target and a draft under test: how well the draft guesses as configured, and with something changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.drafts.registry import family_reading
from eaglejax.errors import ConfigError
from eaglejax.measure.findings import STEPS, Finding
from eaglejax.measure.quality import Acceptance, Features, Texts, acceptance
from eaglejax.models.target import Target

HEALTHY = 0.3
"""First-draft rate from which on no fault can be hiding the others; trained drafts reach 0.5 to 0.8."""


class Pair:
    """A target and a draft as configured, on texts of the first kind; alternatives are measured against it.

    ``file``: the draft's checkpoint as its family understood it. ``texts``: kinds of text by name, ``chat``
    (through the chat template) or ``plain``; the first is what the pair is used on. ``probe``: the family's
    (see ``drafts.family.Probe``). Raises ConfigError for a family without one.
    """

    def __init__(self, target: Target, file: Any, texts: Mapping[str, Texts]) -> None:
        self.target, self.file, self.texts = target, file, next(iter(texts.values()))
        self.family = family_reading(file)
        probe = self.family.probe
        if probe is None:
            raise ConfigError(
                f"{file.path} holds a {self.family.name}; there is no way to diagnose such a draft"
            )
        self.probe = probe
        self.config, self.params = self.family.bind(file, target, target.dtype)
        self.ids = file.ids
        self.features = Features.of(target, self.texts)
        self.drafted = self._guesses(
            self.config, self.params, self.features.read(self.config.taps), self.texts
        )
        self.base = acceptance(self.drafted, self.texts, self.ids)
        self.measured = {name: self.base if t is self.texts else self.on(t) for name, t in texts.items()}

    def _guesses(self, config: Any, params: Any, features: jax.Array, texts: Texts) -> np.ndarray:
        return self.probe.guesses(config, params, features, jnp.asarray(texts.tokens), STEPS)

    def on(self, texts: Texts) -> Acceptance:
        """Acceptance on other texts of the same target."""
        features = Features.of(self.target, texts).read(self.config.taps)
        return acceptance(self._guesses(self.config, self.params, features, texts), texts, self.ids)

    def with_target(self, other: Target, texts: Texts) -> Acceptance:
        """Acceptance of the draft beside another target, on that target's texts."""
        config, params = self.family.bind(self.file, other, other.dtype)
        features = Features.of(other, texts).read(config.taps)
        return acceptance(self._guesses(config, params, features, texts), texts, self.ids)

    def try_(
        self, *, config: Any = None, params: Any = None, features: jax.Array | None = None
    ) -> Acceptance:
        """Acceptance with something changed."""
        features = self.features.read(self.config.taps) if features is None else features
        drafted = self._guesses(config or self.config, params or self.params, features, self.texts)
        return acceptance(drafted, self.texts, self.ids)

    def try_each(self, setups: Iterable[tuple[str, tuple[Any, Any]]]) -> dict[str, Acceptance]:
        """Acceptance of each (name, (configuration, parameters))."""
        return {name: self.try_(config=config, params=params) for name, (config, params) in setups}

    @property
    def healthy(self) -> bool:
        """Whether enough drafts are right that no fault can be hiding the others."""
        return self.base.rates[0] >= HEALTHY

    def judge(self, test: str, tried: Mapping[str, Acceptance], remedy: str, ok: str) -> Finding:
        """The finding of alternatives: a failure when the best of them beats the pair as it is. A pass names
        what was tried and nothing else."""
        if tried:
            name, best = max(tried.items(), key=lambda item: item[1].length)
            if best.beats(self.base):
                text = f"{name}: {best} of drafts 1, 2, ... are right, as configured {self.base}"
                return Finding(test, "fail", text, remedy)
        said = f"; tried and no better: {'; '.join(tried)}" if tried else ""
        if self.healthy or not tried:
            return Finding(test, "pass", ok + said)
        return Finding(test, "unknown", f"the {self.base} as configured{said}")
