"""A result that is written as it grows: what stops a long study costs the measurement at hand, no other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eaglejax.errors import ConfigError
from experiments import record

STUDY = "quantization"


class GrowingResult:
    """One result of the study, gone on with where an earlier run of the same settings left it.

    ``command``, ``config``, ``seed``: as ``record.record`` takes them. ``figures``: what is known so far.
    Raises ConfigError where a result of that name was recorded under other settings.
    """

    def __init__(
        self,
        name: str,
        *,
        command: str,
        config: Mapping[str, Any],
        seed: int | None,
        root: Path = record.ROOT,
    ) -> None:
        self.name, self.root = name, root
        self._about: dict[str, Any] = {
            "command": command,
            "config": json.loads(json.dumps(dict(config))),
            "seed": seed,
        }
        self.figures: dict[str, Any] = {}
        self._read()

    @property
    def path(self) -> Path:
        """The file."""
        return record.results_folder(STUDY, self.root) / f"{self.name}.json"

    def _read(self) -> None:
        if not self.path.is_file():
            return
        found = record.read(self.path)
        mine, theirs = (about["config"] | {"seed": about["seed"]} for about in (self._about, found))
        differ = sorted(k for k in set(mine) | set(theirs) if mine.get(k) != theirs.get(k))
        if differ:
            raise ConfigError(
                f"{self.path} was recorded under other settings: {', '.join(differ)} differ. Give this "
                "result another --name, or remove that file"
            )
        self.figures = found["figures"]

    def has(self, *keys: str) -> bool:
        """Whether something is recorded under these nested keys."""
        return self.get(*keys) is not None

    def get(self, *keys: str) -> Any:
        """What is recorded under these nested keys, None for nothing."""
        here: Any = self.figures
        for key in keys:
            here = here.get(key) if isinstance(here, Mapping) else None
        return here

    def put(self, value: Mapping[str, Any], *keys: str) -> None:
        """Record ``value`` under nested keys and write the file, keeping what other runs wrote meanwhile."""
        self._read()
        here = self.figures
        for key in keys[:-1]:
            here = here.setdefault(key, {})
        here[keys[-1]] = dict(value)
        record.record(STUDY, self.name, **self._about, figures=self.figures, root=self.root)
