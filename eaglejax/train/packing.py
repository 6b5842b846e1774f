"""Samples packed into rows of one static length, and the stream of batches that a checkpoint can stand in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from eaglejax.errors import ConfigError
from eaglejax.train.batch import Batch
from eaglejax.train.samples import Sample

_AHEAD = 4
"""Batches that are made before they are asked for."""

Features = dict[str, np.ndarray]
"""Arrays that stand beside a sample's tokens, each [T, ...]: ``aux``, ``hidden``, ``top``, ``log_norm``."""


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Groups of indices whose lengths fit ``capacity`` together: longest first into the fullest row that
    still has room (best fit decreasing). Raises ConfigError for a sample that fits no row."""
    too_long = [n for n in lengths if n > capacity]
    if too_long:
        raise ConfigError(f"a sample of {max(too_long)} tokens does not fit rows of {capacity}; cut it first")
    rows: list[list[int]] = []
    room: dict[int, list[int]] = {}  # free tokens -> rows with that much
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        size = lengths[index]
        free = min((f for f in room if f >= size and room[f]), default=None)
        if free is None:
            rows.append([])
            row, free = len(rows) - 1, capacity
        else:
            row = room[free].pop()
        rows[row].append(index)
        room.setdefault(free - size, []).append(row)
    return rows


def assemble(samples: Sequence[Sample], capacity: int, features: Sequence[Features] = ()) -> Batch:
    """One packed row as a Batch of numpy arrays with B = 1; ``features`` one a sample, or none."""
    tokens = np.zeros((1, capacity), np.int32)
    documents, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    supervised = np.zeros((1, capacity), bool)
    beside: dict[str, Any] = {}
    at = 0
    for number, sample in enumerate(samples):
        here = slice(at, at + len(sample))
        tokens[0, here], supervised[0, here] = sample.ids, sample.supervised
        documents[0, here], positions[0, here] = number + 1, np.arange(len(sample))
        if features:
            for name, values in features[number].items():
                if name not in beside:
                    beside[name] = np.zeros((1, capacity, *values.shape[1:]), values.dtype)
                beside[name][0, here] = values
        at += len(sample)
    return Batch(tokens, documents, positions, supervised, **beside)


def stack(rows: Sequence[Batch]) -> Batch:
    """Packed rows one under another."""
    fields = {f.name: [getattr(r, f.name) for r in rows] for f in dataclasses.fields(Batch)}
    return Batch(**{name: None if v[0] is None else np.concatenate(v) for name, v in fields.items()})


def batch_stream(
    samples: Sequence[Sample],
    *,
    capacity: int,
    rows: int,
    seed: int,
    features: Callable[[Sample], Features] | None = None,
) -> grain.DatasetIterator:
    """Batches of ``rows`` packed rows without end, reshuffled every epoch.

    Which samples share a row is fixed; the order of the rows changes with the epoch. A few batches are made
    ahead, which with features is a few times what a batch of them takes. The iterator's
    ``get_state`` and ``set_state`` are part of a checkpoint: a restored run sees exactly the batches that
    were left. An epoch's rows that fill no whole batch run on into the next epoch.
    """
    groups = pack([len(s) for s in samples], capacity)

    def build(group: Sequence[int]) -> Batch:
        chosen = [samples[i] for i in group]
        beside = [features(s) for s in chosen] if features is not None else ()
        return assemble(chosen, capacity, beside)

    dataset = grain.MapDataset.source(groups).seed(seed).shuffle().repeat()
    batches = dataset.map(build).batch(rows, drop_remainder=True, batch_fn=stack)
    # Grain would make 500 ahead: a batch of features can take a gigabyte.
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=_AHEAD, prefetch_buffer_size=_AHEAD)))
