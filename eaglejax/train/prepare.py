"""From settings to everything that a run needs: samples, the draft's configuration, vocabulary and first
weights."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.drafts.detect import check_basis
from eaglejax.drafts.eagle.config import EagleConfig, default_boundaries
from eaglejax.drafts.eagle.files.load import bind, head_matrix, read_weights, target_head
from eaglejax.drafts.eagle.files.read import DraftFile
from eaglejax.drafts.eagle.model import EagleParams, Weights
from eaglejax.drafts.registry import read_draft
from eaglejax.errors import ConfigError
from eaglejax.models.target import Target
from eaglejax.nn.linear import PackedWeight, embedding
from eaglejax.train import curate, warm
from eaglejax.train.features import boundaries
from eaglejax.train.logs import import_wandb
from eaglejax.train.objectives import OBJECTIVES, Head
from eaglejax.train.packing import assemble, pack
from eaglejax.train.samples import Report, Sample, read_samples
from eaglejax.train.settings import DataSettings, DraftSettings, TrainSettings
from eaglejax.train.vocab import VocabMap, build_vocab_map, count_all, count_supervised, given_vocab_map

STARTS = ("fit", "layer", "random")


@dataclasses.dataclass(frozen=True)
class Data:
    """Samples to train on and to validate on, none longer than a packed row, and what was left out.
    ``prompts``: of those to validate on, uncut, the ones whose prompt the target can be asked."""

    train: list[Sample]
    validation: list[Sample]
    report: Report
    prompts: list[Sample] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Draft:
    """A draft about to be trained.

    ``weights``: the trained masters. ``untrained``: what the draft ships besides (an embedding, a head that
    is not trained), in full. ``frozen``: what the forward uses that is not trained, the target's or those.
    ``head``: how the target is asked about the draft's tokens, in the weights that it decodes with.
    ``vocab``: None for the whole vocabulary.
    """

    config: EagleConfig
    weights: Weights
    untrained: Weights
    frozen: EagleParams
    head: Head
    vocab: VocabMap | None

    @property
    def ids(self) -> np.ndarray | None:
        """Target id of each draft id [Vd], or None."""
        return None if self.vocab is None else self.vocab.ids

    def complete(self, weights: Weights) -> Weights:
        """Trained weights joined with the untrained ones, in the layout of ``param_table``."""
        return {**weights, **self.untrained}


def prepare_data(settings: DataSettings, target: Target) -> Data:
    """Read, curate, split and cut the files that the settings name."""
    tokenizer = target.need_tokenizer()
    if settings.row_tokens > target.context:
        raise ConfigError(
            f"data.row_tokens is {settings.row_tokens}; texts of more than the target's context of "
            f"{target.context} tokens have no features that serving would see"
        )
    report = Report()
    sources: dict[str, list[Sample]] = {}
    for source in settings.train:
        found, one = read_samples(
            source.path, tokenizer, vocab_size=target.config.vocab_size, limit=source.limit
        )
        report.rows += one.rows
        for reason, count in one.dropped.items():
            report.drop(reason, one.first[reason], count)
        sources.setdefault(source.path, []).extend(found)
    every = [s for samples in sources.values() for s in samples]
    if settings.deduplicate != "none":
        every = curate.deduplicate(every, report, by=settings.deduplicate)
    if settings.decontaminate:
        texts = [t for path in settings.decontaminate for t in curate.evaluation_texts(path)]
        every = curate.decontaminate(every, curate.Contamination(texts), tokenizer, report)
    train, validation = curate.split_validation(every, settings.validation)
    if settings.mix:
        kept = {id(s) for s in train}
        parts = {path: [s for s in samples if id(s) in kept] for path, samples in sources.items()}
        weights = {source.path: source.weight for source in settings.train}
        train = curate.mix(parts, weights, seed=settings.seed, total=settings.total)
        origin = {id(s): path for path, samples in parts.items() for s in samples}
        taken = Counter(origin[id(s)] for s in train)
        report.notes += [
            f"{path} is gone through {taken[path] / len(samples):.2f} times"
            for path, samples in parts.items()
            if taken[path] > len(samples)
        ]

    if settings.supervise == "all":
        train = [dataclasses.replace(s, supervised=np.ones_like(s.supervised)) for s in train]

    def cut(samples: Sequence[Sample]) -> list[Sample]:
        return [w for s in samples for w in curate.windows(s, settings.row_tokens, settings.overlap)]

    prompts = [s for s in validation if 0 < len(s.prompt) < target.context]
    train, validation = cut(train), cut(validation)
    if not train:
        raise ConfigError(
            "no sample is left to train on: " + ("; ".join(report.lines()) or "all were held out")
        )
    return Data(train, validation, report, prompts)


def check_run(settings: TrainSettings, data: Data) -> None:
    """Raise ConfigError for a run that could not begin: without prompts for evaluations that are to decode
    some, or without the package that it is to log to."""
    if settings.run.wandb:
        import_wandb()
    if settings.run.decode_prompts and not data.prompts:
        raise ConfigError(
            f"run.decode_prompts is {settings.run.decode_prompts}, and no prompt is held out to be decoded; "
            "raise data.validation, or set run.decode_prompts to 0"
        )


def planned_config(settings: TrainSettings, target: Target) -> EagleConfig:
    """The configuration of the draft that the settings ask for, without its weights.

    Raises ConfigError where they ask of an existing draft what it is not, and for a start that this draft
    cannot have from this target.
    """
    if settings.draft.start in STARTS:
        config = draft_config(settings.draft, target, settings.objective.version).fit(target.config)
        if settings.draft.start != "random":
            warm.check_start(config, target, settings.draft.start)
    else:
        config = _read_existing(settings).config.fit(target.config)
        if config.target_rows and settings.draft.vocab:
            config = dataclasses.replace(config, draft_vocab_size=settings.draft.vocab)
    if settings.draft.train_head and not config.own_head:
        raise ConfigError(
            f"draft.train_head needs a head of the draft's own; {settings.draft.start} borrows the target's"
        )
    return config


def draft_config(settings: DraftSettings, target: Target, version: int) -> EagleConfig:
    """The configuration of a new draft for ``target``."""
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


FitReader = Callable[[Target, tuple[int, ...], Sequence[Sample], int, int], warm.FitData]


def prepare_draft(
    settings: TrainSettings, target: Target, data: Data, *, read_fit: FitReader | None = None
) -> Draft:
    """The draft that the settings ask for, new or going on from an existing one.

    ``read_fit``: ``fit_data`` (None), or what remembers its answers for several drafts on the same text.
    """
    config = planned_config(settings, target)
    if settings.draft.start not in STARTS:
        return _existing(config, settings, target, data)
    vocab = _count_vocab(config.draft_vocab_size, settings, target, data) if config.reduced else None
    weights = _first_weights(config, settings, target, data.train, read_fit or fit_data)
    return _draft(config, weights, settings, target, vocab)


def _count_vocab(size: int, settings: TrainSettings, target: Target, data: Data) -> VocabMap:
    tokenizer, share = target.need_tokenizer(), settings.draft.vocab_prior
    counts = count_supervised(data.train, target.config.vocab_size)
    prior = share * count_all(data.train, target.config.vocab_size) if share else None
    return build_vocab_map(counts, size, tokenizer_hash=tokenizer.hash, prior=prior)


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
    read_fit: FitReader,
) -> Weights:
    seed = settings.run.seed
    if settings.draft.start == "random":
        weights = warm.random_weights(config, target, seed)
    elif settings.draft.start == "layer":
        weights = warm.layer_weights(config, target, seed)
    else:
        found = read_fit(target, config.aux, samples, settings.data.row_tokens, settings.draft.fit_tokens)
        weights = warm.fitted_weights(config, target, found, seed)
    weights.pop("head", None)
    return weights


def _existing(config: EagleConfig, settings: TrainSettings, target: Target, data: Data) -> Draft:
    """Go on from a published or earlier draft: its shape, vocabulary and weights. The vocabulary of one that
    reads the target's rows is counted anew where another size is asked for."""
    file = _read_existing(settings)
    weights = read_weights(file, jnp.float32)
    check_basis(config, weights, target, draft=settings.draft.start)
    vocab = None
    if file.ids is not None and len(file.ids) != config.draft_vocab_size:
        vocab = _count_vocab(config.draft_vocab_size, settings, target, data)
    elif file.ids is not None:
        counts = count_supervised(data.train, target.config.vocab_size)
        vocab = given_vocab_map(np.asarray(file.ids), counts)
    return _draft(config, weights, settings, target, vocab)


def _read_existing(settings: TrainSettings) -> DraftFile:
    """The file of the draft to go on from, with the boundaries that the settings name, if they do."""
    wanted, start = settings.draft, settings.draft.start
    family, file = read_draft(start, aux=wanted.aux or None)
    if family.name not in OBJECTIVES:
        raise ConfigError(
            f"{start} holds a {family.name}, which there is no objective to train with; go on from a draft "
            f"of the kind {' or '.join(OBJECTIVES)}"
        )
    config = file.config
    if config.version != settings.objective.version:
        raise ConfigError(
            f"{start} is an EAGLE-{config.version} draft; objective.algorithm "
            f"{settings.objective.algorithm!r} trains EAGLE-{settings.objective.version}"
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
    return file


def _draft(
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
