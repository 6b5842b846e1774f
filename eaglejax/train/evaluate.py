"""How good a draft is: on held-out text with the data's tokens fed, and by decoding for real."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from eaglejax.drafts.base import Bound
from eaglejax.drafts.tree import StaticTree
from eaglejax.errors import ConfigError
from eaglejax.models.target import Target
from eaglejax.sampling import Sampling
from eaglejax.speculate.generate import Request
from eaglejax.speculate.metrics import Stats, total
from eaglejax.train.batch import Batch
from eaglejax.train.decode import decode_requests
from eaglejax.train.family import Weights
from eaglejax.train.objective import Objective
from eaglejax.train.objectives import Head, Metrics
from eaglejax.train.packing import Features, assemble, pack, stack
from eaglejax.train.registry import training_of
from eaglejax.train.samples import Sample


def make_evaluation(
    config: Any,
    objective: Objective,
    frozen: Any,
    head: Head,
    *,
    compute_dtype: Any,
    remat: bool = False,
    mesh: Mesh | None = None,
) -> Callable[[Weights, Batch], Metrics]:
    """The jitted metrics of one batch [B, T, ...], without noise; the options as in ``make_update``."""

    family = training_of(config)

    @jax.jit
    def measure(weights: Weights, batch: Batch, frozen: Any, head: Head) -> Metrics:
        rows = family.trained_rows(objective, head, batch)
        options: dict[str, Any] = {"compute_dtype": compute_dtype, "remat": remat, "mesh": mesh}
        return family.loss(weights, config, objective, frozen, head, batch, rows, **options)[1]

    return lambda weights, batch: measure(weights, batch, frozen, head)


class HeldOut:
    """Held-out samples as batches with features: the same ones, in the same order, every time they are gone
    through. The last one is filled up with empty rows.

    ``features``: reads those of a sample, where they are stored. ``place``: puts a batch on the devices, with
    features where it has none. Batches of ``keep`` bytes together stay on the host from one time to the next,
    the others are made anew: of a large target all of them would fill the memory.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        capacity: int,
        rows: int,
        features: Callable[[Sample], Features] | None,
        place: Callable[[Batch], Batch],
        keep: int = 1 << 30,
    ) -> None:
        packed = [[samples[i] for i in group] for group in pack([len(s) for s in samples], capacity)]
        self._parts = [packed[at : at + rows] for at in range(0, len(packed), rows)]
        self._capacity, self._rows, self._features, self._place = capacity, rows, features, place
        self._kept: dict[int, Batch] = {}
        self._room = keep

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Batch]:
        for number, part in enumerate(self._parts):
            if (batch := self._kept.get(number)) is None:
                batch = self._place(self._assemble(part))
                size = sum(x.nbytes for x in jax.tree.leaves(batch))
                if size <= self._room:
                    self._room -= size
                    self._kept[number] = batch = jax.device_get(batch)
            yield batch

    def _assemble(self, part: Sequence[Sequence[Sample]]) -> Batch:
        rows = [
            assemble(chosen, self._capacity, [self._features(s) for s in chosen] if self._features else ())
            for chosen in part
        ]
        return stack(rows + [jax.tree.map(np.zeros_like, rows[0])] * (self._rows - len(rows)))


def add_up(metrics: Iterable[Metrics]) -> Metrics:
    """Sum over batches. Raises ConfigError for none."""
    items = list(metrics)
    if not items:
        raise ConfigError("there is no batch to evaluate")
    return jax.tree.map(lambda *x: np.sum([np.asarray(v, np.float64) for v in x], axis=0), *items)


def summary(metrics: Metrics) -> dict[str, Any]:
    """What is logged: per step the mean loss, top-1 accuracy (``accuracy_k``, ``conditional_k`` given that
    all earlier steps were right) and acceptance when sampled; the simulated tau."""
    m = jax.tree.map(lambda x: np.asarray(x, np.float64), metrics)
    before = np.concatenate([np.atleast_1d(m.chains), m.chain[:-1]])

    def ratio(a: np.ndarray, b: np.ndarray) -> list[float]:
        return [float(x) for x in a / np.maximum(b, 1.0)]

    return {
        "loss": ratio(m.loss, m.rows),
        "accuracy": ratio(m.hits, m.judged),
        "conditional": ratio(m.chain, before),
        "acceptance": ratio(m.accept, m.judged),
        "tau_simulated": float(1.0 + np.sum(m.chain) / max(float(m.chains), 1.0)),
        "rows": float(m.chains),
    }


def decode(
    target: Target,
    config: Any,
    weights: Weights,
    ids: np.ndarray | None,
    prompts: Sequence[Sample],
    *,
    tokens: int,
    tree: StaticTree,
    batch_size: int = 1,
) -> Stats:
    """Acceptance of greedy decoding of the samples' prompts, by the decoder itself: the definition of
    ``bench``.

    ``weights``: as trained; they run in the target's dtype.
    """
    bound = training_of(config).bound(config, weights, target, ids, tree)
    return decode_with(target, bound, prompts, tokens=tokens, batch_size=batch_size)


def decode_with(
    target: Target, bound: Bound, prompts: Sequence[Sample], *, tokens: int, batch_size: int = 1
) -> Stats:
    """The same with a draft that is bound to its target."""
    requests = [Request(tuple(p.prompt.tolist()), Sampling(), tokens) for p in prompts]
    results = [
        result
        for at in range(0, len(requests), batch_size)
        for result in decode_requests(target, requests[at : at + batch_size], bound, batch=batch_size)
    ]
    return total(r.stats for r in results)


def decoded_summary(stats: Stats) -> dict[str, Any]:
    """What is logged of a decode: tau and acceptance by position."""
    return {
        "tau": stats.mean_acceptance_length,
        "position_acceptance": stats.per_position_acceptance_rate,
        "tokens": stats.num_tokens,
    }
