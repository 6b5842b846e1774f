"""What a run will do, before it does it: sizes, memory, disk and length."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import rich.table

from eaglejax.checkpoint.files import require_disk
from eaglejax.models.memory import require_free
from eaglejax.models.target import Target
from eaglejax.train.packing import pack
from eaglejax.train.prepare import Data, check_run, planned_config
from eaglejax.train.registry import training_of
from eaglejax.train.settings import TrainSettings


@dataclasses.dataclass(frozen=True)
class Plan:
    """Counts and sizes of a run; sizes in bytes. ``disk_bytes``: most that its checkpoints take together,
    while one more than is kept is written. ``device_bytes`` is an estimate of the peak: target, masters,
    optimiser, gradients, the features of an update and the activations of one micro-batch."""

    samples: int
    held_out: int
    tokens: int
    supervised: int
    rows: int
    fill: float
    updates: int
    epochs: float
    trained_parameters: int
    draft_bytes: int
    checkpoint_bytes: int
    disk_bytes: int
    feature_bytes: int
    device_bytes: int

    def table(self) -> rich.table.Table:
        """For a person."""
        table = rich.table.Table(title="plan", show_header=False)
        gb = 1e9
        for name, value in (
            ("samples (held out)", f"{self.samples} ({self.held_out})"),
            ("tokens (supervised)", f"{self.tokens} ({self.supervised})"),
            ("packed rows (filled)", f"{self.rows} ({100 * self.fill:.1f} %)"),
            ("updates (epochs)", f"{self.updates} ({self.epochs:.2f})"),
            ("trained parameters", f"{self.trained_parameters / 1e6:.2f} M"),
            ("exported draft", f"{self.draft_bytes / 1e6:.1f} MB"),
            ("a checkpoint (all)", f"{self.checkpoint_bytes / gb:.2f} ({self.disk_bytes / gb:.2f}) GB"),
            ("features on disk", f"{self.feature_bytes / gb:.2f} GB"),
            ("memory, about", f"{self.device_bytes / gb:.1f} GB"),
        ):
            table.add_row(name, value)
        return table

    def check_room(self, target: Target, settings: TrainSettings) -> None:
        """Raise ConfigError or CheckpointError for a run that needs more memory or disk than there is."""
        require_free(
            "the run, its target apart,",
            self.device_bytes - target.nbytes,
            "take fewer or shorter rows (run.rows, data.row_tokens), a smaller run.accumulate or "
            "objective.steps, run.remat = true, or a smaller draft",
        )
        require_disk(Path(settings.out), self.disk_bytes, "all checkpoints of the run together")

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        return dataclasses.asdict(self)


def make_plan(settings: TrainSettings, target: Target, data: Data) -> Plan:
    """The plan of a run over ``data``. Raises ConfigError for one that could not start."""
    check_run(settings, data)
    config = planned_config(settings, target)
    run, length = settings.run, settings.data.row_tokens
    rows = len(pack([len(s) for s in data.train], length))
    tokens, held = (sum(len(s) for s in samples) for samples in (data.train, data.validation))
    family = training_of(config)
    size = family.size(config, settings)
    width = target.config.hidden_size * target.dtype.itemsize
    a_token = (len(family.taps(config)) + 1) * width
    return Plan(
        samples=len(data.train),
        held_out=len(data.validation),
        tokens=tokens,
        supervised=sum(int(np.sum(s.supervised)) for s in data.train),
        rows=rows,
        fill=tokens / (rows * length),
        updates=run.updates,
        epochs=run.updates * run.rows * run.accumulate / rows,
        trained_parameters=size.trained,
        draft_bytes=size.shipped * target.dtype.itemsize,
        checkpoint_bytes=size.trained * 12,
        # The best one stays beside the latest, and a new one is whole before an old one goes.
        disk_bytes=size.trained * 12 * (run.keep + 2),
        feature_bytes=0 if run.features == "online" else (tokens + held) * a_token,
        device_bytes=target.nbytes
        + size.trained * 16
        + run.accumulate * run.rows * length * a_token
        + size.activations,
    )
