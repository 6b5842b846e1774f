"""The draft's reduced vocabulary: which of the target's tokens it can propose."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from eaglejax.errors import ConfigError
from eaglejax.train.samples import Sample


@dataclasses.dataclass(frozen=True, eq=False)
class VocabMap:
    """``ids`` [Vd] int32, ascending: the target id of each draft id. ``coverage``: the share of the
    supervised tokens of the counted data that the draft knows. ``key`` binds the map to data, tokenizer and
    sizes."""

    ids: np.ndarray
    coverage: float
    key: str


def count_supervised(samples: Iterable[Sample], vocab_size: int) -> np.ndarray:
    """How often each target id is supervised, [V] int64."""
    counts = np.zeros(vocab_size, np.int64)
    for sample in samples:
        counts += np.bincount(sample.ids[sample.supervised], minlength=vocab_size)
    return counts


def count_all(samples: Iterable[Sample], vocab_size: int) -> np.ndarray:
    """How often each target id occurs, supervised or not, [V] int64."""
    counts = np.zeros(vocab_size, np.int64)
    for sample in samples:
        counts += np.bincount(sample.ids, minlength=vocab_size)
    return counts


def build_vocab_map(
    counts: np.ndarray, size: int, *, tokenizer_hash: str, prior: np.ndarray | None = None
) -> VocabMap:
    """The ``size`` most frequent ids of ``counts`` [V] plus ``prior`` [V].

    Ties and places left over go to the lowest ids, which in a merge-ordered vocabulary are the commonest. The
    coverage is that of ``counts``. Raises ConfigError for sizes that cannot be.
    """
    vocab_size = len(counts)
    if not 1 <= size <= vocab_size:
        raise ConfigError(f"the draft vocabulary is {size}; it must lie in 1..{vocab_size}")
    total = int(counts.sum())
    if total == 0:
        raise ConfigError("no token is supervised, so no draft vocabulary can be counted")
    weights = counts if prior is None else counts + prior
    order = np.argsort(-weights, kind="stable")
    ids = np.sort(order[:size]).astype(np.int32)
    digest = hashlib.sha256(counts.astype("<i8").tobytes())
    if prior is not None:
        digest.update(np.asarray(prior, "<f8").tobytes())
    digest.update(f"{tokenizer_hash} {size} {vocab_size}".encode())
    return VocabMap(ids, float(counts[ids].sum() / total), digest.hexdigest()[:32])


def counted_vocab_map(
    samples: Sequence[Sample], vocab_size: int, size: int, *, tokenizer_hash: str, share: float
) -> VocabMap:
    """The ``size`` ids that ``samples`` supervise most often, plus ``share`` times how often they occur; see
    ``build_vocab_map``."""
    prior = share * count_all(samples, vocab_size) if share else None
    counts = count_supervised(samples, vocab_size)
    return build_vocab_map(counts, size, tokenizer_hash=tokenizer_hash, prior=prior)


def given_vocab_map(ids: np.ndarray, counts: np.ndarray) -> VocabMap:
    """The map of an existing draft, kept as it is (a new one would scramble its head), with its coverage of
    this data."""
    total = max(int(counts.sum()), 1)
    return VocabMap(
        np.asarray(ids, np.int32),
        float(counts[ids].sum() / total),
        hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()[:32],
    )
