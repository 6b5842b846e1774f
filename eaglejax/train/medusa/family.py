"""How Medusa heads are trained: the record that the trainer knows them by.

Medusa-1 (Cai et al., arXiv:2401.10774): the target stays as it is, head k learns what stands k + 2 places
behind a token from the target's state of that token, and later heads weigh less. The default loss compares
with what the target says there; the paper's own is ``loss = "hard_ce"``, on the text's tokens.
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
from eaglejax.drafts.medusa import model
from eaglejax.drafts.medusa.config import MedusaConfig
from eaglejax.drafts.medusa.files.load import bind, fit, read_weights
from eaglejax.drafts.medusa.files.read import MedusaFile
from eaglejax.drafts.medusa.files.write import write_heads
from eaglejax.drafts.medusa.model import MedusaParams, param_table
from eaglejax.drafts.medusa.proposer import Medusa
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
from eaglejax.train.vocab import VocabMap, count_supervised, counted_vocab_map, given_vocab_map

_SHAPE = (
    *("aux", "intermediate_size", "experts", "expert_size", "num_heads", "num_kv_heads", "head_dim"),
    "target_rows",
)
"""Settings of a draft that heads have none of."""


class MedusaTraining(TrainingFamily):
    """See the module's text. ``draft.num_layers`` counts the residual blocks of a head; with
    ``draft.train_head`` each has a matrix to the vocabulary of its own, else they borrow the target's."""

    name: ClassVar[str] = "Medusa"
    config: ClassVar[type] = MedusaConfig
    algorithms: ClassVar[tuple[str, ...]] = ("medusa",)

    def planned(
        self, settings: TrainSettings, target: Target, file: MedusaFile | None = None
    ) -> MedusaConfig:
        """One head a step of the objective."""
        draft, default, steps = settings.draft, DraftSettings(), settings.objective.steps
        wrong = [name for name in _SHAPE if getattr(draft, name) != getattr(default, name)]
        if wrong:
            raise ConfigError(f"Medusa heads have no draft.{wrong[0]}; leave it out")
        if file is not None:
            config = fit(file, target.config)
            found = {"objective.steps": (steps, config.heads)}
            if draft.num_layers != default.num_layers:
                found["draft.num_layers"] = (draft.num_layers, config.layers)
            if draft.vocab is not None:
                found["draft.vocab"] = (draft.vocab, config.draft_vocab_size)
            for name, (asked, has) in found.items():
                if asked != has:
                    raise ConfigError(
                        f"{draft.start} keeps its shape when it is trained on: {name} is {asked} and the "
                        f"draft's {has}"
                    )
            if draft.train_head and config.output != "each":
                raise ConfigError(
                    f"draft.train_head needs a matrix to the vocabulary for each head; {draft.start} has "
                    + ("one for all" if config.output == "shared" else "none")
                )
            return config
        if draft.start == "fit":
            raise ConfigError(
                "draft.start 'fit' is a closed form for EAGLE drafts; Medusa heads start as 'layer' (blocks "
                "of zero before the target's matrix to the vocabulary), 'random', or as those of a folder"
            )
        return MedusaConfig(
            vocab_size=target.config.vocab_size,
            draft_vocab_size=draft.vocab or target.config.vocab_size,
            hidden_size=target.config.hidden_size,
            heads=steps,
            layers=draft.num_layers,
            output="each" if draft.train_head else "target",
            softcap=target.config.final_softcap,
            basis=target.basis,
        )

    def prepare(
        self,
        config: MedusaConfig,
        settings: TrainSettings,
        target: Target,
        samples: Sequence[Sample],
        file: MedusaFile | None,
        remember: Remember,
    ) -> Draft:
        """First weights; matrices to the vocabulary are trained with ``draft.train_head`` alone."""
        del remember
        vocab, weights = _start(config, settings, target, samples, file)
        ids = None if vocab is None else vocab.ids
        dtype = jnp.dtype(settings.run.compute_dtype)
        untrained: Weights = {}
        heads = [dict(head) for head in weights.pop("heads")]
        if config.output == "each" and not settings.draft.train_head:
            untrained["outs"] = [np.asarray(head.pop("out")) for head in heads]
        untrained |= {name: np.asarray(value) for name, value in weights.items()}
        frozen = bind(config, _held(untrained, dtype), target, ids)
        asked, tied = target_head(target, ids)
        packed = isinstance(asked, PackedWeight)
        theirs = head_matrix(target, ids)
        if config.output == "target":
            # Integers multiply rounded states, through which nothing is learnt: a step function has no slope.
            frozen = dataclasses.replace(frozen, head=theirs.astype(dtype), tied=False)
        head = Head(
            asked if packed else theirs.astype(target.dtype),
            None if ids is None else jnp.asarray(ids),
            softcap=target.config.final_softcap,
            tied=packed and tied,
        )
        masters = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), {"heads": heads})
        return Draft(config, masters, untrained, frozen, head, vocab)

    def taps(self, config: MedusaConfig) -> tuple[int, ...]:
        """None but the final state."""
        del config
        return ()

    def loss(
        self,
        weights: Weights,
        config: MedusaConfig,
        objective: Objective,
        frozen: MedusaParams,
        head: Head,
        batch: Batch,
        rows: jax.Array,
        key: jax.Array | None = None,
        *,
        compute_dtype: Any,
        remat: bool = False,
        mesh: Mesh | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """``chain_loss`` of the heads, each a step of its own from the same state."""
        del remat, mesh
        if batch.hidden is None:
            raise ConfigError("the batch lacks the target's last state, which Medusa heads read")
        features = batch.hidden
        features = noisy(features, objective, key)
        whole = _shipped({**weights, **frozen.weights})
        params = dataclasses.replace(frozen, weights=model.cast(whole, config, compute_dtype))
        read = model.read_target(params, config, features[:, :, None])
        states = [model.state(params, k, read) for k in range(objective.steps)]

        def logits(params: MedusaParams, state: jax.Array, step: int) -> jax.Array:
            return model.logits(params, config, step, state)

        return chain_loss(objective, head, batch, rows, params, states, logits)

    def trained_rows(self, objective: Objective, head: Head, batch: Batch) -> jax.Array:
        """Rows of each head that the alignment and the heads' vocabulary leave."""
        return trained_rows(objective, head, batch)

    def bound(
        self, config: MedusaConfig, weights: Weights, target: Target, ids: np.ndarray | None, tree: StaticTree
    ) -> Bound:
        """Greedy heads on ``tree``; a chain beyond the last head is cut."""
        tree = chain(config.reach(tree.depth)) if tree.is_chain else tree
        own = model.cast(_shipped(weights), config, target.dtype)
        return Bound(Medusa(config, tree), bind(config, own, target, ids))

    def write(
        self, folder: Path, config: MedusaConfig, weights: Weights, ids: np.ndarray | None, *, dtype: Any
    ) -> None:
        """The project's own form."""
        weights = _shipped(weights)
        require_whole(weights, param_table(config))
        write_heads(folder, config, jax.tree.map(np.asarray, model.cast(weights, config, dtype)), ids)

    def cost(self, config: MedusaConfig, dtype: Any) -> DraftCost:
        """Counted from its table of weights; a step is one head."""
        parameters = size = 0
        for info in leaf_paths(param_table(config, dtype)).values():
            count = math.prod(info.shape)
            parameters += count
            size += count * np.dtype(info.dtype).itemsize
        step = config.hidden_size * (config.layers * config.hidden_size + config.draft_vocab_size)
        return DraftCost(parameters, size, 2 * step)

    def size(self, config: MedusaConfig, settings: TrainSettings) -> TrainingSize:
        """Counted from its table of weights and the shapes of one pass."""
        sizes = {path: math.prod(info.shape) for path, info in leaf_paths(param_table(config)).items()}
        item = 2 if settings.run.compute_dtype == "bfloat16" else 4
        a_token = 3 * config.layers * config.hidden_size * item + 8 * config.draft_vocab_size
        outs = not settings.draft.train_head

        def kept(path: str) -> bool:
            return path in ("feature_map", "out") or (outs and path.endswith(".out"))

        return TrainingSize(
            shipped=sum(sizes.values()),
            trained=sum(size for path, size in sizes.items() if not kept(path)),
            activations=settings.run.rows * settings.data.row_tokens * config.heads * a_token,
        )


def _start(
    config: MedusaConfig,
    settings: TrainSettings,
    target: Target,
    samples: Sequence[Sample],
    file: MedusaFile | None,
) -> tuple[VocabMap | None, Weights]:
    """(vocabulary, first weights) of new heads, or of those in ``file``."""
    if file is not None:
        weights = read_weights(file, jnp.float32)
        check_basis(config, {}, target, draft=settings.draft.start)
        if file.ids is None:
            return None, weights
        return given_vocab_map(file.ids, count_supervised(samples, target.config.vocab_size)), weights
    vocab = None
    if config.reduced:
        vocab = counted_vocab_map(
            samples,
            target.config.vocab_size,
            config.draft_vocab_size,
            tokenizer_hash=target.need_tokenizer().hash,
            share=settings.draft.vocab_prior,
        )
    weights = pytree.initialize(param_table(config), jax.random.key(settings.run.seed))
    if config.output == "each":
        out = head_matrix(target, None if vocab is None else vocab.ids, jnp.float32)
        weights["heads"] = [{**head, "out": out} for head in weights["heads"]]
    if settings.draft.start == "random":
        scale = 1.0 / math.sqrt(config.hidden_size)
        keys = jax.random.split(jax.random.key(settings.run.seed), config.heads)
        for head, key in zip(weights["heads"], keys, strict=True):
            for layer, sub in zip(head["layers"], jax.random.split(key, max(config.layers, 1)), strict=False):
                layer["w"] = scale * jax.random.normal(sub, layer["w"].shape)
    return vocab, weights


def _held(untrained: Weights, dtype: Any) -> Weights:
    """What heads ship untrained, as the forward holds it."""
    held: Weights = {}
    for name, value in untrained.items():
        if name == "outs":
            held[name] = [jnp.asarray(out, dtype) for out in value]
        else:
            held[name] = jnp.asarray(value, jnp.float32 if name == "feature_map" else dtype)
    return held


def _shipped(weights: Weights) -> Weights:
    """Weights as ``param_table`` has them: matrices that are not trained lie within their heads."""
    rest = {name: value for name, value in weights.items() if name != "outs"}
    if "outs" not in weights:
        return rest
    heads = [{**head, "out": out} for head, out in zip(rest["heads"], weights["outs"], strict=True)]
    return {**rest, "heads": heads}
