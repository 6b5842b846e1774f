"""Samples are cut, packed and streamed without a token lost."""

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_rows import sample_of

from eaglejax.errors import ConfigError
from eaglejax.train.batch import row_mask
from eaglejax.train.curate import (
    windows,
)
from eaglejax.train.packing import assemble, batch_stream, pack


@settings(max_examples=40, deadline=None)
@given(st.integers(30, 90), st.integers(1, 30), st.integers(12, 20), st.integers(5, 8))
def test_every_pair_of_a_cut_text_is_trained_exactly_once_at_every_step(total, answers, length, overlap):
    sample = sample_of(total, min(answers, total - 1))
    length, steps = min(length, total), overlap - 1
    for step in range(steps):
        whole = row_mask(assemble([sample], 96), step)
        seen = np.zeros(total, int)
        for part in windows(sample, length, overlap):
            assert len(part) <= length
            start = 0 if part is sample else int(part.name.split("tokens ")[1].split("-")[0])
            rows = np.flatnonzero(row_mask(assemble([part], 96), step)[0])
            np.add.at(seen, start + rows, 1)
        assert seen.tolist() == np.asarray(whole[0, :total]).astype(int).tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=40))
def test_packing_places_every_sample_once_and_wastes_less_than_half(lengths):
    rows = pack(lengths, 32)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    fill = [sum(lengths[i] for i in row) for row in rows]
    assert max(fill) <= 32
    assert sum(f <= 16 for f in fill) <= 1


def test_a_packed_row_keeps_tokens_marks_and_features_together():
    samples = [sample_of(5, 2, 1), sample_of(4, 3, 2)]
    beside = [{"hidden": s.ids[:, None] * np.ones(3, np.float32)} for s in samples]
    batch = assemble(samples, 12, beside)
    assert batch.documents[0].tolist() == [1] * 5 + [2] * 4 + [0] * 3
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0]
    assert np.array_equal(batch.hidden[0, :, 0], batch.tokens[0])
    assert np.flatnonzero(batch.supervised[0]).tolist() == [3, 4, 6, 7, 8]
    with pytest.raises(ConfigError, match="5 tokens do"):
        pack([5], 4)


def test_the_stream_goes_on_from_a_saved_position_and_reshuffles_each_epoch():
    samples = [sample_of(6, 3, n) for n in range(10)]

    def stream():
        return batch_stream(samples, capacity=6, rows=2, seed=4)

    whole = stream()
    first = [next(whole).tokens for _ in range(3)]
    state = whole.get_state()
    rest = [next(whole).tokens for _ in range(7)]
    again = stream()
    again.set_state(json.loads(json.dumps(state)))
    assert all(np.array_equal(a, next(again).tokens) for a in rest)
    epochs = np.concatenate([*first, *rest])[:, 0].reshape(2, 10)
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(int(s.ids[0]) for s in samples)
    assert epochs[0].tolist() != epochs[1].tolist()


def test_the_stream_reads_ahead_a_few_batches_and_not_hundreds():
    """A batch of a large target's features takes a gigabyte."""
    samples, read = [sample_of(6, 3, n) for n in range(10)], []

    def features(sample):
        read.append(sample)
        return {"hidden": np.zeros((len(sample), 2), np.float32)}

    stream = batch_stream(samples, capacity=6, rows=1, seed=0, features=features)
    next(stream)
    time.sleep(0.5)
    assert 1 <= len(read) <= 12
