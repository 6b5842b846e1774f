"""How DFlash drafts are trained: the record that the trainer knows them by.

Every position begins a block, whose guesses are scored as the steps of a chain are: ``objective.steps``
counts them, so that a block is one token more. The published recipe is ``loss = "hard_ce"`` with weights that
fall as exp(-k / 7) (``step_decay = 0.867``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eaglejax import pytree
from eaglejax.drafts.base import Bound
from eaglejax.drafts.borrow import head_matrix, target_head
from eaglejax.drafts.detect import check_basis
from eaglejax.drafts.dflash import model
from eaglejax.drafts.dflash.config import DFlashConfig
from eaglejax.drafts.dflash.files import DFlashFile, join, read_weights, write_weights
from eaglejax.drafts.dflash.model import DFlashParams, param_table
from eaglejax.drafts.dflash.probe import blocks
from eaglejax.drafts.dflash.proposer import DFlash
from eaglejax.drafts.tree import StaticTree, chain
from eaglejax.errors import ConfigError
from eaglejax.models.target import Target
from eaglejax.nn.linear import PackedWeight
from eaglejax.pytree import leaf_paths
from eaglejax.train.batch import Batch
from eaglejax.train.chain import chain_loss, noisy, trained_rows
from eaglejax.train.family import (
    Draft,
    DraftCost,
    Remember,
    TrainingFamily,
    TrainingSize,
    Weights,
    require_whole,
)
from eaglejax.train.objective import Objective
from eaglejax.train.objectives import Head, Metrics
from eaglejax.train.samples import Sample
from eaglejax.train.settings import DraftSettings, TrainSettings

_FOREIGN = ("vocab", "vocab_prior", "experts", "expert_size", "train_head", "target_rows")
"""Settings of a draft that have no meaning here."""


class DFlashTraining(TrainingFamily):
    """See the module's text."""

    name: ClassVar[str] = "DFlash"
    config: ClassVar[type] = DFlashConfig
    algorithms: ClassVar[tuple[str, ...]] = ("dflash",)

    def planned(
        self, settings: TrainSettings, target: Target, file: DFlashFile | None = None
    ) -> DFlashConfig:
        """A new draft has the target's shape where the settings say nothing, and reads boundaries spread over
        it; its masks have a vector of their own."""
        draft, default, steps = settings.draft, DraftSettings(), settings.objective.steps
        wrong = [name for name in _FOREIGN if getattr(draft, name) != getattr(default, name)]
        if wrong:
            raise ConfigError(
                f"DFlash drafts have the target's whole vocabulary and a dense MLP; not draft.{wrong[0]}"
            )
        if file is not None:
            config = file.config.fit(target.config)
            if steps != config.block - 1:
                raise ConfigError(
                    f"objective.steps is {steps}; a block of {config.block} tokens guesses {config.block - 1}"
                )
            return config
        if draft.start != "random":
            raise ConfigError(
                f"draft.start {draft.start!r} is for EAGLE drafts; new DFlash drafts start 'random'"
            )
        of = target.config
        heads = draft.num_heads or of.num_heads
        return DFlashConfig(
            vocab_size=of.vocab_size,
            hidden_size=of.hidden_size,
            target_hidden_size=of.hidden_size,
            intermediate_size=draft.intermediate_size or of.intermediate_size,
            num_heads=heads,
            num_kv_heads=draft.num_kv_heads or min(of.num_kv_heads, heads),
            head_dim=draft.head_dim or of.head_dim,
            num_layers=draft.num_layers,
            aux=draft.aux or _spread(of.num_layers),
            block=steps + 1,
            mask_vector=True,
            norm_eps=of.norm_eps,
            rope=of.rope,
            activation=of.activation,
            embed_scale=of.embed_scale,
            softcap=of.final_softcap,
            basis=target.basis,
        )

    def prepare(
        self,
        config: DFlashConfig,
        settings: TrainSettings,
        target: Target,
        samples: Sequence[Sample],
        file: DFlashFile | None,
        remember: Remember,
    ) -> Draft:
        """First weights; an embedding and a head of the draft's own are kept as they are."""
        del samples, remember
        if file is not None:
            weights = read_weights(file, jnp.float32)
            check_basis(config, weights, target, draft=settings.draft.start)
        else:
            weights = pytree.initialize(param_table(config), jax.random.key(settings.run.seed))
            weights["mask"] = 0.02 * jax.random.normal(
                jax.random.key(settings.run.seed + 1), (config.hidden_size,)
            )
        dtype = jnp.dtype(settings.run.compute_dtype)
        untrained: dict[str, Any] = {
            name: np.asarray(weights.pop(name)) for name in ("embed", "head") if name in weights
        }
        frozen = join(config, {k: jnp.asarray(v, dtype) for k, v in untrained.items()}, target)
        asked, tied = target_head(target)
        packed = isinstance(asked, PackedWeight)
        if packed and not config.own_head:
            # Integers multiply rounded states, through which nothing is learnt: a step function has no slope.
            frozen = dataclasses.replace(frozen, head=head_matrix(target).astype(dtype), tied=False)
        head = Head(
            asked if packed else head_matrix(target).astype(target.dtype),
            softcap=target.config.final_softcap,
            tied=packed and tied,
        )
        masters = jax.tree.map(lambda w: w.astype(jnp.float32), weights)
        return Draft(config, masters, untrained, frozen, head, None)

    def taps(self, config: DFlashConfig) -> tuple[int, ...]:
        """The boundaries that it fuses."""
        return config.aux

    def loss(
        self,
        weights: Weights,
        config: DFlashConfig,
        objective: Objective,
        frozen: DFlashParams,
        head: Head,
        batch: Batch,
        rows: jax.Array,
        key: jax.Array | None = None,
        *,
        compute_dtype: Any,
        remat: bool = False,
        mesh: Mesh | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """``chain_loss`` of the guesses of the blocks that begin at every position."""
        del remat, mesh  # blocks are always computed again in the backward pass
        if batch.aux is None:
            raise ConfigError("the batch lacks the target's boundaries, which a DFlash draft reads")
        features = batch.aux
        features = noisy(features, objective, key)
        cast = jax.tree.map(lambda w: w.astype(compute_dtype), weights)
        params = dataclasses.replace(frozen, weights={**frozen.weights, **cast})
        states = blocks(
            params,
            config,
            features,
            jnp.concatenate([batch.tokens[:, 1:], jnp.zeros_like(batch.tokens[:, :1])], axis=1),
            objective.steps,
            positions=batch.positions,
            documents=batch.documents,
        )

        def logits(params: DFlashParams, state: jax.Array, step: int) -> jax.Array:
            del step
            return model.logits(params, config, state)

        return chain_loss(objective, head, batch, rows, params, states, logits)

    def trained_rows(self, objective: Objective, head: Head, batch: Batch) -> jax.Array:
        """Rows of each guess that its alignment leaves."""
        return trained_rows(objective, head, batch)

    def bound(
        self, config: DFlashConfig, weights: Weights, target: Target, ids: np.ndarray | None, tree: StaticTree
    ) -> Bound:
        """A greedy ``DFlash`` that grows ``tree``; a chain longer than the block is cut."""
        del ids
        tree = chain(config.reach(tree.depth)) if tree.is_chain else tree
        own = jax.tree.map(lambda w: jnp.asarray(w, target.dtype), weights)
        return Bound(DFlash(config, tree), join(config, own, target))

    def write(
        self, folder: Path, config: DFlashConfig, weights: Weights, ids: np.ndarray | None, *, dtype: Any
    ) -> None:
        """The form of its authors; of a draft that reads the embedding, that of speculators."""
        del ids
        require_whole(weights, param_table(config))
        held = jax.tree.map(lambda w: np.asarray(jnp.asarray(w, dtype)), weights)
        write_weights(folder, config, held, to="speculators" if 0 in config.aux else "dflash")

    def cost(self, config: DFlashConfig, dtype: Any) -> DraftCost:
        """Counted from its table of weights; a step is a token of the block."""
        infos = leaf_paths(param_table(config, dtype))
        counts = {path: math.prod(info.shape) for path, info in infos.items()}
        size = sum(counts[path] * np.dtype(info.dtype).itemsize for path, info in infos.items())
        met = sum(
            n for path, n in counts.items() if path.startswith("layers.") and len(infos[path].shape) > 1
        )
        return DraftCost(sum(counts.values()), size, 2 * (met + config.hidden_size * config.vocab_size))

    def size(self, config: DFlashConfig, settings: TrainSettings) -> TrainingSize:
        """Counted from its table of weights and the shapes of one pass."""
        sizes = {path: math.prod(info.shape) for path, info in leaf_paths(param_table(config)).items()}
        item = 2 if settings.run.compute_dtype == "bfloat16" else 4
        tokens = settings.run.rows * settings.data.row_tokens
        states = tokens * settings.objective.steps * (config.hidden_size * item + 8 * config.vocab_size)
        sides = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return TrainingSize(
            shipped=sum(sizes.values()),
            trained=sum(n for path, n in sizes.items() if path not in ("embed", "head")),
            activations=states + tokens * (sides + config.hidden_size) * item,
        )


def _spread(layers: int) -> tuple[int, ...]:
    """Boundaries spread evenly from 2 to three before the last, five or as many as there are."""
    last = max(layers - 2, 1)
    return tuple(sorted({round(i) for i in np.linspace(min(2, last), last, 5)}))
