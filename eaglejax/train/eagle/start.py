"""The configuration and the first weights of an EAGLE draft to be trained, new or gone on from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.drafts.borrow import head_matrix, target_head
from eaglejax.drafts.detect import check_basis
from eaglejax.drafts.eagle.config import EagleConfig, default_boundaries
from eaglejax.drafts.eagle.files.load import bind, read_weights
from eaglejax.drafts.eagle.files.read import DraftFile
from eaglejax.drafts.eagle.model import Weights
from eaglejax.errors import ConfigError
from eaglejax.models.target import Target
from eaglejax.nn.linear import PackedWeight, embedding
from eaglejax.train.eagle import warm
from eaglejax.train.family import Draft, Remember
from eaglejax.train.features import boundaries
from eaglejax.train.objective import Objective
from eaglejax.train.objectives import Head
from eaglejax.train.packing import assemble, pack
from eaglejax.train.samples import Sample
from eaglejax.train.settings import DraftSettings, TrainSettings
from eaglejax.train.vocab import VocabMap, count_supervised, counted_vocab_map, given_vocab_map


def version_of(objective: Objective) -> int:
    """The EAGLE version of the drafts that an objective trains."""
    return 1 if objective.regresses else 3


def planned_config(settings: TrainSettings, target: Target, file: DraftFile | None) -> EagleConfig:
    """See ``TrainingFamily.planned``."""
    if file is None:
        version, parallel = version_of(settings.objective), settings.objective.algorithm == "peagle"
        config = draft_config(settings.draft, target, version, parallel=parallel).fit(target.config)
        if settings.draft.start != "random":
            warm.check_start(config, target, settings.draft.start)
    else:
        _check_existing(file, settings)
        config = file.config.fit(target.config)
        if config.target_rows and settings.draft.vocab:
            config = dataclasses.replace(config, draft_vocab_size=settings.draft.vocab)
    if settings.draft.train_head and not config.own_head:
        raise ConfigError(
            f"draft.train_head needs a head of the draft's own; {settings.draft.start} borrows the target's"
        )
    return config


def draft_config(
    settings: DraftSettings, target: Target, version: int, *, parallel: bool = False
) -> EagleConfig:
    """The configuration of a new draft for ``target``. ``parallel``: it guesses by masks (P-EAGLE), whose
    token is the target's end of text; what tells them apart is their feature, which is learnt."""
    model = target.config
    heads = settings.num_heads or model.num_heads
    return EagleConfig(
        version=version,
        vocab_size=model.vocab_size,
        draft_vocab_size=settings.vocab or model.vocab_size,
        hidden_size=model.hidden_size,
        target_hidden_size=model.hidden_size,
        **_mlp_shape(settings, settings.intermediate_size or model.intermediate_size),
        num_heads=heads,
        num_kv_heads=settings.num_kv_heads or (heads if settings.start == "fit" else model.num_kv_heads),
        head_dim=settings.head_dim or model.head_dim,
        num_layers=settings.num_layers,
        num_aux=(len(settings.aux) or 3) if version == 3 else 0,
        aux=(settings.aux or default_boundaries(model.num_layers)) if version == 3 else (),
        norm_eps=model.norm_eps,
        rope=model.rope,
        activation=model.activation,
        head_norm=version == 3,
        own_head=version == 3 and not settings.target_rows,
        target_rows=settings.target_rows,
        embed_scale=model.embed_scale,
        softcap=model.final_softcap,
        basis=target.basis,
        mask_id=(target.eos_ids or (0,))[0] if parallel else None,
    )


def _mlp_shape(settings: DraftSettings, width: int) -> dict[str, Any]:
    if not settings.experts:
        return {"intermediate_size": width}
    size = settings.expert_size or width // max(settings.experts_per_token, 1)
    return {
        "intermediate_size": settings.experts_per_token * size,
        "num_experts": settings.experts,
        "experts_per_token": settings.experts_per_token,
        "moe_intermediate_size": size,
    }


def new_draft(
    config: EagleConfig,
    settings: TrainSettings,
    target: Target,
    samples: Sequence[Sample],
    remember: Remember,
) -> Draft:
    """A draft of which nothing is there yet: its vocabulary is counted, its weights start as asked."""
    vocab = _count_vocab(config.draft_vocab_size, settings, target, samples) if config.reduced else None
    weights = _first_weights(config, settings, target, samples, remember)
    return _joined(config, weights, settings, target, vocab)


def _count_vocab(size: int, settings: TrainSettings, target: Target, samples: Sequence[Sample]) -> VocabMap:
    return counted_vocab_map(
        samples,
        target.config.vocab_size,
        size,
        tokenizer_hash=target.need_tokenizer().hash,
        share=settings.draft.vocab_prior,
    )


def read_fit(
    target: Target,
    aux: tuple[int, ...],
    samples: Sequence[Sample],
    capacity: int,
    tokens: int,
    remember: Remember,
) -> warm.FitData:
    """``fit_data``, asked once for all drafts that start from the same text."""
    key = (aux, [s.key for s in samples], capacity, tokens)
    return remember(key, lambda: fit_data(target, aux, samples, capacity, tokens))


def fit_data(
    target: Target, aux: tuple[int, ...], samples: Sequence[Sample], capacity: int, tokens: int
) -> warm.FitData:
    """Rows of training text for the closed-form start, from samples of about ``tokens`` at most."""
    chosen: list[Sample] = []
    for sample in samples:
        if sum(len(s) for s in chosen) >= tokens:
            break
        chosen.append(sample)
    params, config = warm.split_last_block(target)
    layers = target.config.num_layers
    read = (*(layers + 1 if i == layers else i for i in aux), layers + 1, layers)
    look_up = jax.jit(embedding)  # op by op, each row of texts would cost a copy of the whole table
    skip = 4  # a text's first tokens carry outsized states that a linear map must not be bent by
    parts = []
    for row in pack([len(s) for s in chosen], capacity):
        members = [chosen[i] for i in row]
        batch = assemble(members, capacity)
        found = np.asarray(boundaries(params, config, batch, read)[0].astype(jnp.float32))
        states, after = found[:, :-1], found[:, -1]
        documents = np.asarray(batch.documents[0])
        at = np.flatnonzero((documents[:-1] == documents[1:]) & (np.asarray(batch.positions[0, :-1]) >= skip))
        rows = np.asarray(look_up(target.params["embed"], batch.tokens[0]).astype(jnp.float32))
        parts.append(warm.FitData(states[at, :-1], states[at, -1], after[at + 1], rows[at + 1]))
    data = warm.concatenate(parts)
    if not len(data.last):
        raise ConfigError(
            f"start 'fit' needs texts of more than {skip + 1} tokens, and the first {len(chosen)} samples "
            "are shorter; use start 'layer'"
        )
    return data


def _first_weights(
    config: EagleConfig,
    settings: TrainSettings,
    target: Target,
    samples: Sequence[Sample],
    remember: Remember,
) -> Weights:
    seed = settings.run.seed
    if settings.draft.start == "random":
        weights = warm.random_weights(config, target, seed)
    elif settings.draft.start == "layer":
        weights = warm.layer_weights(config, target, seed)
    else:
        found = read_fit(
            target, config.aux, samples, settings.data.row_tokens, settings.draft.fit_tokens, remember
        )
        weights = warm.fitted_weights(config, target, found, seed)
    weights.pop("head", None)
    return weights


def existing_draft(
    config: EagleConfig, settings: TrainSettings, target: Target, samples: Sequence[Sample], file: DraftFile
) -> Draft:
    """Go on from a published or earlier draft: its shape, vocabulary and weights. The vocabulary of one that
    reads the target's rows is counted anew where another size is asked for."""
    weights = read_weights(file, jnp.float32)
    check_basis(config, weights, target, draft=settings.draft.start)
    vocab = None
    if file.ids is not None and len(file.ids) != config.draft_vocab_size:
        vocab = _count_vocab(config.draft_vocab_size, settings, target, samples)
    elif file.ids is not None:
        counts = count_supervised(samples, target.config.vocab_size)
        vocab = given_vocab_map(np.asarray(file.ids), counts)
    return _joined(config, weights, settings, target, vocab)


def _check_existing(file: DraftFile, settings: TrainSettings) -> None:
    """Refuse another version than the objective's, and another shape than the file's."""
    wanted, start = settings.draft, settings.draft.start
    config = file.config
    if config.version != version_of(settings.objective):
        raise ConfigError(
            f"{start} is an EAGLE-{config.version} draft; objective.algorithm "
            f"{settings.objective.algorithm!r} trains EAGLE-{version_of(settings.objective)}"
        )
    if config.parallel != (settings.objective.algorithm == "peagle"):
        kind = "guesses in parallel" if config.parallel else "guesses one token after another"
        right = "peagle" if config.parallel else "eagle3"
        raise ConfigError(
            f"{start} {kind}; objective.algorithm {settings.objective.algorithm!r} is not for it: use "
            f"{right!r}"
        )
    found = {
        "vocab": wanted.vocab if config.target_rows else config.draft_vocab_size,
        "intermediate_size": config.intermediate_size,
        "experts": config.num_experts,
        "expert_size": config.moe_intermediate_size,
        "target_rows": config.target_rows,
        **{name: getattr(config, name) for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim")},
    }
    if wanted.experts:
        found["intermediate_size"] = wanted.intermediate_size
        found["experts_per_token"] = config.experts_per_token
    default = DraftSettings()
    wrong = [
        f"draft.{name} is {getattr(wanted, name)} and the draft's {value}"
        for name, value in found.items()
        if getattr(wanted, name) not in (getattr(default, name), value)
    ]
    if wrong:
        raise ConfigError(f"{start} keeps its shape when it is trained on: {'; '.join(wrong)}")


def _joined(
    config: EagleConfig, weights: Weights, settings: TrainSettings, target: Target, vocab: VocabMap | None
) -> Draft:
    dtype = jnp.dtype(settings.run.compute_dtype)
    ids = None if vocab is None else vocab.ids
    weights, untrained = dict(weights), dict[str, Any]()
    asked, tied = target_head(target, ids)
    packed = isinstance(asked, PackedWeight)
    theirs = head_matrix(target, ids)
    own = weights.pop("head", None)
    frozen = bind(config, {}, target, ids)
    if packed and not config.own_head:
        # Integers multiply rounded states, through which nothing is learnt: a step function has no slope.
        frozen = dataclasses.replace(frozen, head=theirs.astype(dtype), tied=False)
    if config.own_head:
        own = theirs if own is None else own
        if settings.draft.train_head:
            weights["head"] = own
        else:
            untrained["head"] = np.asarray(own)
            frozen = dataclasses.replace(frozen, head=own.astype(dtype))
    if config.own_embedding:
        # As in every published recipe it is not trained.
        untrained["embed"] = np.asarray(weights.pop("embed"))
        frozen = dataclasses.replace(frozen, embed=jnp.asarray(untrained["embed"], dtype))
    head = Head(
        asked if packed else theirs.astype(target.dtype),
        None if ids is None else jnp.asarray(ids),
        softcap=target.config.final_softcap,
        tied=packed and tied,
    )
    masters = jax.tree.map(lambda w: w.astype(jnp.float32), weights)
    return Draft(config, masters, untrained, frozen, head, vocab)
