"""How MTP modules are trained: the record that the trainer knows them by.

Each step is scored as EAGLE-3's are, or on the text's own tokens (FastMTP, arXiv:2509.18362: three steps of
one module with weights in proportion 1, 0.6, 0.36); the embedding and the head are the target's and stay.
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
from eaglejax.drafts.mtp import model
from eaglejax.drafts.mtp.config import MtpConfig
from eaglejax.drafts.mtp.files.load import fit, join, layer_kinds, read_weights
from eaglejax.drafts.mtp.files.read import MtpFile
from eaglejax.drafts.mtp.files.write import write_weights
from eaglejax.drafts.mtp.model import MtpParams, param_table
from eaglejax.drafts.mtp.proposer import Mtp
from eaglejax.drafts.tree import StaticTree, chain
from eaglejax.errors import ConfigError
from eaglejax.models.target import Target
from eaglejax.nn.block import GroupedQuery
from eaglejax.nn.linear import PackedWeight
from eaglejax.nn.moe import MoeConfig
from eaglejax.pytree import leaf_paths
from eaglejax.quant.online import plain
from eaglejax.train.attention import training_attention
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
from eaglejax.train.losses import balance
from eaglejax.train.objective import Objective
from eaglejax.train.objectives import Head, Metrics
from eaglejax.train.samples import Sample
from eaglejax.train.settings import DraftSettings, TrainSettings

_SHAPE = (
    *("aux", "vocab", "vocab_prior", "intermediate_size", "experts", "expert_size", "num_heads"),
    *("num_kv_heads", "head_dim", "train_head", "target_rows"),
)
"""Settings of a draft that a module has none of: it is one of its target's layers."""


class MtpTraining(TrainingFamily):
    """See the module's text."""

    name: ClassVar[str] = "MTP"
    config: ClassVar[type] = MtpConfig
    algorithms: ClassVar[tuple[str, ...]] = ("mtp",)
    method: ClassVar[str] = "mtp"

    def planned(self, settings: TrainSettings, target: Target, file: MtpFile | None = None) -> MtpConfig:
        """New modules are as the target's last layer; ``draft.num_layers`` counts them."""
        draft, default = settings.draft, DraftSettings()
        wrong = [name for name in _SHAPE if getattr(draft, name) != getattr(default, name)]
        if wrong:
            raise ConfigError(f"MTP modules are layers like the target's; draft.{wrong[0]} is not theirs")
        if file is not None:
            config = fit(file, target.config)[0]
            if draft.num_layers not in (default.num_layers, config.modules):
                raise ConfigError(f"{draft.start} keeps its {config.modules} modules when it is trained on")
            return config
        if draft.start == "fit":
            raise ConfigError(
                "draft.start 'fit' is a closed form for EAGLE drafts; MTP modules start as 'layer' (the "
                "target's last one), 'random', or as those of a folder, which may be the target's own"
            )
        return MtpConfig(
            vocab_size=target.config.vocab_size,
            hidden_size=target.config.hidden_size,
            block=next(iter(layer_kinds(target.config))),
            modules=draft.num_layers,
            embed_scale=target.config.embed_scale,
            softcap=target.config.final_softcap,
            basis=target.basis,
        )

    def prepare(
        self,
        config: MtpConfig,
        settings: TrainSettings,
        target: Target,
        samples: Sequence[Sample],
        file: MtpFile | None,
        remember: Remember,
    ) -> Draft:
        """First weights; an embedding and heads of the draft's own are kept as they are."""
        del samples, remember
        if file is not None:
            weights = read_weights(file, config, fit(file, target.config)[1], jnp.float32)
            check_basis(config, weights, target, draft=settings.draft.start)
        else:
            weights = _first_weights(config, target, settings)
        dtype = jnp.dtype(settings.run.compute_dtype)
        untrained: Weights = {}
        modules = [dict(module) for module in weights.pop("modules")]
        if config.own_head:
            untrained["heads"] = [np.asarray(module.pop("head")) for module in modules]
        untrained |= {name: np.asarray(value) for name, value in weights.items()}
        frozen = join(config, _cast_held(untrained, dtype), target)
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
        masters = jax.tree.map(lambda w: w.astype(jnp.float32), {"modules": modules})
        return Draft(config, masters, untrained, frozen, head, None)

    def taps(self, config: MtpConfig) -> tuple[int, ...]:
        """None but the final state."""
        del config
        return ()

    def loss(
        self,
        weights: Weights,
        config: MtpConfig,
        objective: Objective,
        frozen: MtpParams,
        head: Head,
        batch: Batch,
        rows: jax.Array,
        key: jax.Array | None = None,
        *,
        compute_dtype: Any,
        remat: bool = False,
        mesh: Mesh | None = None,
    ) -> tuple[jax.Array, Metrics]:
        """``chain_loss`` of the modules' steps from every position."""
        if batch.hidden is None:
            raise ConfigError("the batch lacks the target's last state, which MTP modules read")
        features = batch.hidden[:, :, None]
        features = noisy(features, objective, key)
        cast = model.cast(_complete(weights, frozen.weights), config, compute_dtype)
        params = dataclasses.replace(frozen, weights=cast)
        mixer = config.block.mixer
        windows = isinstance(mixer, GroupedQuery) and mixer.window is not None
        routed: list[list[jax.Array]] = []
        states = model.unroll(
            params,
            config,
            features,
            jnp.concatenate([batch.tokens[:, 1:], jnp.zeros_like(batch.tokens[:, :1])], axis=1),
            objective.steps,
            positions=batch.positions,
            documents=batch.documents,
            attention=training_attention(batch.documents, windows=windows, remat=remat, mesh=mesh),
            routing=routed,
        )

        def logits(params: MtpParams, state: jax.Array, step: int) -> jax.Array:
            return model.logits(params, config, step % config.modules, state)

        def spread(step: int, mask: jax.Array) -> jax.Array | float:
            feed = config.block.feed
            if not isinstance(feed, MoeConfig):
                return 0.0
            return sum((balance(r, mask, feed.top_k) for r in routed[step]), start=jnp.float32(0))

        return chain_loss(objective, head, batch, rows, params, states, logits, balance=spread)

    def trained_rows(self, objective: Objective, head: Head, batch: Batch) -> jax.Array:
        """Rows of each step that its alignment leaves."""
        return trained_rows(objective, head, batch)

    def bound(
        self, config: MtpConfig, weights: Weights, target: Target, ids: np.ndarray | None, tree: StaticTree
    ) -> Bound:
        """A greedy ``Mtp`` that grows ``tree``; a chain that the modules do not reach evenly is cut."""
        del ids
        tree = chain(config.reach(tree.depth)) if tree.is_chain else tree
        own = model.cast(_shipped(weights), config, target.dtype)
        return Bound(Mtp(config, tree), join(config, own, target))

    def write(
        self, folder: Path, config: MtpConfig, weights: Weights, ids: np.ndarray | None, *, dtype: Any
    ) -> None:
        """The project's own form."""
        del ids
        weights = _shipped(weights)
        require_whole(weights, param_table(config))
        write_weights(folder, config, jax.tree.map(np.asarray, model.cast(weights, config, dtype)))

    def cost(self, config: MtpConfig, dtype: Any) -> DraftCost:
        """Counted from its table of weights."""
        parameters = size = met = 0
        for path, info in leaf_paths(param_table(config, dtype)).items():
            count = math.prod(info.shape)
            parameters += count
            size += count * np.dtype(info.dtype).itemsize
            if len(info.shape) < 2 or path == "embed" or path.endswith(".head"):
                continue
            feed = config.block.feed
            if isinstance(feed, MoeConfig) and ".experts." in path:
                count = count * feed.top_k // feed.experts
            met += count
        step = met // config.modules + config.hidden_size * config.vocab_size
        return DraftCost(parameters, size, 2 * step)

    def size(self, config: MtpConfig, settings: TrainSettings) -> TrainingSize:
        """Counted from its table of weights and the shapes of one pass."""
        sizes = {path: math.prod(info.shape) for path, info in leaf_paths(param_table(config)).items()}
        item = 2 if settings.run.compute_dtype == "bfloat16" else 4
        layer = config.block.table(jnp.float32)
        made = sum(info.shape[-1] for info in leaf_paths(layer).values() if len(info.shape) == 2)
        a_token = (6 * config.hidden_size + made) * item + 8 * config.vocab_size
        rows = settings.run.rows * settings.data.row_tokens * settings.objective.steps
        kept = ("embed", "feature_map")
        return TrainingSize(
            shipped=sum(sizes.values()),
            trained=sum(n for p, n in sizes.items() if p not in kept and not p.endswith(".head")),
            activations=rows * a_token,
        )


def _first_weights(config: MtpConfig, target: Target, settings: TrainSettings) -> Weights:
    """Random ones; with start 'layer' each module's layer is the target's last one of that kind, and its
    projection hands on the state."""
    weights: Weights = pytree.initialize(param_table(config), jax.random.key(settings.run.seed))
    if settings.draft.start == "random":
        return weights
    alike = [i for i in range(target.config.num_layers) if target.config.block(i) == config.block]
    layer = jax.tree.map(
        lambda w: plain(w, jnp.float32),
        target.params["layers"][alike[-1]],
        is_leaf=lambda x: isinstance(x, PackedWeight),
    )
    eye = jnp.eye(config.hidden_size)
    for module in weights["modules"]:
        module["layer"] = layer
        module["fc"] = module["fc"].at[config.hidden_size :].set(eye)
        module["norm"] = target.params["norm"].astype(jnp.float32)
    return weights


def _cast_held(untrained: Weights, dtype: Any) -> Weights:
    """What a draft ships untrained, as the forward holds it."""
    held: Weights = {}
    if "embed" in untrained:
        held["embed"] = jnp.asarray(untrained["embed"], dtype)
    if "feature_map" in untrained:
        held["feature_map"] = jnp.asarray(untrained["feature_map"], jnp.float32)
    if "heads" in untrained:
        held["heads"] = [jnp.asarray(h, dtype) for h in untrained["heads"]]
    return held


def _complete(weights: Weights, held: Weights) -> Weights:
    """Trained modules joined with what the draft ships besides."""
    return _shipped({**weights, **held})


def _shipped(weights: Weights) -> Weights:
    """Weights as ``param_table`` has them: heads that are not trained lie within their modules."""
    rest = {k: v for k, v in weights.items() if k != "heads"}
    if "heads" not in weights:
        return rest
    modules = [{**m, "head": h} for m, h in zip(rest["modules"], weights["heads"], strict=True)]
    return {**rest, "modules": modules}
