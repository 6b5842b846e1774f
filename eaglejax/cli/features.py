"""``eaglejax features``: the target's features of a run's data, on disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tyro

from eaglejax.checkpoint.files import progress
from eaglejax.cli import methods, show


@dataclasses.dataclass(frozen=True)
class Features:
    """Compute the target's features of a run's data once and keep them on disk."""

    config: str
    """The run's TOML file; its target, data and draft boundaries decide what is computed."""
    out: str
    """The folder; one with features of the same kind is completed."""
    overrides: tyro.conf.Positional[tuple[str, ...]] = ()
    """Settings that replace those of the file, as `section.key=value`."""

    def run(self) -> int:
        """The command."""
        from eaglejax.train.settings import load_settings

        settings = load_settings(self.config, self.overrides)
        target = methods.load_target_of(settings)
        from eaglejax.checkpoint.files import require_disk
        from eaglejax.train.feature_cache import write_features
        from eaglejax.train.prepare import planned_config, prepare_data
        from eaglejax.train.registry import training_of

        config = planned_config(settings, target)
        taps = training_of(config).taps(config)
        data = prepare_data(settings.data, target)
        samples = [*data.train, *data.validation]
        width = target.config.hidden_size * target.dtype.itemsize
        size = sum(len(s) for s in samples) * (len(taps) + 1) * width
        require_disk(Path(self.out), size, "all features together")
        with progress("features", sum(len(s) for s in samples)) as advance:
            count = write_features(
                self.out, target, samples, taps, capacity=settings.data.row_tokens, advance=advance
            )
        show.print_note(f"{count} samples computed, {len(samples)} in all, in {self.out}")
        return 0
