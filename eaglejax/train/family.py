"""What training knows of a family of drafts: one record, made in the family's own folder.

The trainer, plans, evaluations and sweeps ask the record alone; ``train.registry`` lists those there are.
What a family adds is a folder under ``train`` with a ``TrainingFamily``, and its entry there.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from eaglejax.drafts.base import Bound
from eaglejax.drafts.tree import StaticTree
from eaglejax.errors import EaglejaxError
from eaglejax.models.target import Target
from eaglejax.pytree import leaf_paths
from eaglejax.train.batch import Batch
from eaglejax.train.objective import Objective
from eaglejax.train.objectives import Head, Metrics
from eaglejax.train.samples import Sample
from eaglejax.train.settings import TrainSettings
from eaglejax.train.vocab import VocabMap

Weights = dict[str, Any]
"""A draft's weights, nested by name."""

Remember = Callable[[Any, Callable[[], Any]], Any]
"""``remember(key, make)``: what ``make()`` gives, or gave before under the same key."""


def make_anew(key: Any, make: Callable[[], Any]) -> Any:
    """The ``Remember`` that keeps nothing."""
    del key
    return make()


def require_whole(weights: Weights, table: Weights) -> None:
    """Raise EaglejaxError for trained ``weights`` that are not those of ``table``, by their names."""
    foreign = set(leaf_paths(weights)) ^ set(leaf_paths(table))
    if foreign:
        raise EaglejaxError(f"the trained weights lack, or should not have, {', '.join(sorted(foreign))}")


@dataclasses.dataclass(frozen=True)
class Draft:
    """A draft about to be trained.

    ``weights``: the trained masters. ``untrained``: what the draft ships besides (an embedding, a head that
    is not trained), in full. ``frozen``: what the forward uses that is not trained, the target's or those.
    ``head``: how the target is asked about the draft's tokens, in the weights that it decodes with.
    ``vocab``: None for the whole vocabulary.
    """

    config: Any
    weights: Weights
    untrained: Weights
    frozen: Any
    head: Head
    vocab: VocabMap | None

    @property
    def ids(self) -> np.ndarray | None:
        """Target id of each draft id [Vd], or None."""
        return None if self.vocab is None else self.vocab.ids

    def complete(self, weights: Weights) -> Weights:
        """Trained weights joined with the untrained ones: all that the draft ships."""
        return {**weights, **self.untrained}


@dataclasses.dataclass(frozen=True)
class DraftCost:
    """``parameters``: numbers that the draft ships, ``bytes`` what they take. ``step_flops``: operations of
    one chain step for one token (two a weight that it meets: of experts those it passes, and the head, the
    target's too where it is borrowed); attention over the text, which grows with it, is left out."""

    parameters: int
    bytes: int
    step_flops: int


@dataclasses.dataclass(frozen=True)
class TrainingSize:
    """``shipped``: numbers that the draft ships, ``trained`` those of them that are trained;
    ``activations``: bytes kept for the backward pass of one micro-batch, about."""

    shipped: int
    trained: int
    activations: int


class TrainingFamily(abc.ABC):
    """How drafts of one family are trained.

    ``name``: ``DraftFamily.name``. ``config``: the class of its configurations. ``algorithms``: values of
    ``objective.algorithm`` that train it. ``method``: as which a draft to go on from is read.
    """

    name: ClassVar[str]
    config: ClassVar[type]
    algorithms: ClassVar[tuple[str, ...]]
    method: ClassVar[str] = "auto"

    @abc.abstractmethod
    def planned(self, settings: TrainSettings, target: Target, file: Any = None) -> Any:
        """The configuration of the draft that the settings ask for: a new one, or of ``file`` (as its
        ``DraftFamily`` read it) to go on from. Raises ConfigError for what cannot be."""

    @abc.abstractmethod
    def prepare(
        self,
        config: Any,
        settings: TrainSettings,
        target: Target,
        samples: Sequence[Sample],
        file: Any,
        remember: Remember,
    ) -> Draft:
        """The planned draft with its first weights. ``remember`` keeps what other drafts on the same text
        could share."""

    @abc.abstractmethod
    def taps(self, config: Any) -> tuple[int, ...]:
        """Boundaries of the target that it reads in ``Batch.aux``; the final state is always there."""

    @abc.abstractmethod
    def loss(
        self,
        weights: Weights,
        config: Any,
        objective: Objective,
        frozen: Any,
        head: Head,
        batch: Batch,
        rows: jax.Array,
        key: jax.Array | None = None,
        *,
        compute_dtype: Any,
        remat: bool = False,
        mesh: Mesh | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """(loss [] f32, metrics) of one micro-batch; pure.

        ``weights``: trained masters, which the forward reads in ``compute_dtype``. ``rows`` [K] f32: trained
        rows of each step in the whole update, the denominators. ``key`` draws noise (None: there is none).
        ``remat``: attention's weights are computed anew in the backward pass; ``mesh``: the devices that
        share the rows.
        """

    @abc.abstractmethod
    def trained_rows(self, objective: Objective, head: Head, batch: Batch) -> jax.Array:
        """Denominators [K] f32 of one micro-batch under the normaliser; to be summed over the update."""

    @abc.abstractmethod
    def bound(
        self, config: Any, weights: Weights, target: Target, ids: np.ndarray | None, tree: StaticTree
    ) -> Bound:
        """The draft as decoding runs it, in the target's dtype; ``weights`` as ``Draft.complete`` gives."""

    @abc.abstractmethod
    def write(
        self, folder: Path, config: Any, weights: Weights, ids: np.ndarray | None, *, dtype: Any
    ) -> None:
        """Write a draft for ``load_draft`` in the project's own form. Raises EaglejaxError for weights that
        are not those of such a draft."""

    @abc.abstractmethod
    def cost(self, config: Any, dtype: Any) -> DraftCost:
        """The cost of a draft whose weights are kept in ``dtype``."""

    @abc.abstractmethod
    def size(self, config: Any, settings: TrainSettings) -> TrainingSize:
        """What its training takes."""
