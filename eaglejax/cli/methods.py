"""Drafting methods by name, which ``--method``, ``--methods`` and ``--speculative-config`` choose from; and
the models that commands load.

What can be refused is refused before jax is imported.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import eaglejax as ej
from eaglejax.checkpoint.sources import resolve
from eaglejax.cli import compiling, show
from eaglejax.config import AuxConvention, SpeculativeConfig, parse_speculative_config
from eaglejax.devices.dtypes import check_weight_dtype
from eaglejax.drafts import registry
from eaglejax.drafts.limits import MOST_BRANCHING, MOST_DEPTH, MOST_NGRAM, MOST_NODES
from eaglejax.drafts.limits import check_count as check_size
from eaglejax.drafts.places import draft_path
from eaglejax.engine_keys import METHODS_ELSEWHERE
from eaglejax.errors import ConfigError
from eaglejax.naming import known_name

if TYPE_CHECKING:
    from eaglejax.train.settings import TrainSettings

Build = Callable[[Any, SpeculativeConfig], Any]
"""Of a target and a config: the proposer."""


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to draft.

    ``settings``: the keys of a SpeculativeConfig that it knows, ``model`` apart. ``build`` makes the proposer
    of a checked config; None is plain autoregressive decoding. ``check``: refuses settings that cannot be.
    ``takes_draft``: a draft can be named, ``needs_draft``: it must be. ``reads_prediction``: it drafts
    from predictions. ``draws``: where rows are sampled its drafts are drawn, whatever ``draft_sample`` says.
    """

    settings: tuple[str, ...]
    build: Build
    check: Callable[[SpeculativeConfig], None] = lambda config: None
    takes_draft: bool = False
    needs_draft: bool = False
    reads_prediction: bool = False
    draws: bool = False


def _settings_as(**names: str) -> Callable[[SpeculativeConfig], dict[str, Any]]:
    """Settings of a proposer out of a config; ``names``: key of the config -> setting of the proposer."""

    def settings(config: SpeculativeConfig) -> dict[str, Any]:
        return {new: value for key, new in names.items() if (value := getattr(config, key)) is not None}

    return settings


_length = _settings_as(num_speculative_tokens="length")
_LOOKUP = {
    "num_speculative_tokens": "length",
    "prompt_lookup_max": "max_ngram",
    "prompt_lookup_min": "min_ngram",
    "tree_branching": "candidates",
    "tree_nodes": "size",
}
_SUFFIX = {
    "num_speculative_tokens": "length",
    "tree_branching": "places",
    "tree_nodes": "size",
    "suffix_decoding_max_tree_depth": "max_tree_depth",
    "suffix_decoding_max_cached_requests": "max_cached_requests",
    "suffix_decoding_max_spec_factor": "max_spec_factor",
    "suffix_decoding_min_token_prob": "min_token_prob",
}


def _lookup(config: SpeculativeConfig) -> ej.NGram:
    settings = _settings_as(**_LOOKUP)(config)
    bounds = {"max_ngram", "min_ngram"} & set(settings)
    if len(bounds) == 1:
        settings |= dict.fromkeys(("max_ngram", "min_ngram"), settings[bounds.pop()])
    return ej.NGram(**settings)


def _suffix(config: SpeculativeConfig) -> ej.Suffix:
    settings = _settings_as(**_SUFFIX)(config)
    if "length" in settings:
        # As many drafts a round as are asked for, on one path or on several.
        settings.setdefault("size", settings["length"] + 1)
    return ej.Suffix(**settings)


def _cascade(target: ej.Target, config: SpeculativeConfig) -> ej.Bound:
    parts = [proposer_from(target, part) for part in config.parts or ()]
    return ej.cascade(*parts, **_settings_as(tree_nodes="size", tree_branching="branches")(config))


def _check_cascade(config: SpeculativeConfig) -> None:
    if config.parts is None or len(config.parts) < 2:
        raise ConfigError(
            "method 'cascade' needs 'parts', a list of the configs of two methods or more, such as "
            '[{"method": "ngram"}, {"method": "eagle3", "model": "D"}]'
        )
    for part in config.parts:
        check_config(part)
        name = method_name(part.method)
        if name in ("ar", "cascade") or METHODS[name].reads_prediction:
            raise ConfigError(f"method {part.method!r} cannot be a part of a cascade on the command line")
        if wrong := [key for key in _OF_DECODING if getattr(part, key) is not None]:
            raise ConfigError(f"{wrong[0]} is said of a cascade as a whole, not of its part {part.method!r}")


def _check_sizes(**most: int) -> Callable[[SpeculativeConfig], None]:
    """Refuses settings beyond these limits; the proposers have them too, but no model is loaded for this."""

    def check(config: SpeculativeConfig) -> None:
        for key, limit in most.items():
            if (value := getattr(config, key)) is not None:
                check_size(key, value, limit)

    return check


_WITHOUT_DRAFT: dict[str, Method] = {
    "ar": Method((), lambda target, config: None),
    "ngram": Method(
        tuple(_LOOKUP),
        lambda target, config: _lookup(config),
        _check_sizes(
            num_speculative_tokens=MOST_DEPTH,
            prompt_lookup_max=MOST_NGRAM,
            prompt_lookup_min=MOST_NGRAM,
            tree_branching=MOST_BRANCHING,
            tree_nodes=MOST_NODES,
        ),
    ),
    "suffix": Method(
        tuple(_SUFFIX),
        lambda target, config: _suffix(config),
        _check_sizes(num_speculative_tokens=MOST_DEPTH, tree_branching=MOST_BRANCHING, tree_nodes=MOST_NODES),
    ),
    "prediction": Method(
        ("num_speculative_tokens",),
        lambda target, config: ej.Prediction(**_length(config)),
        _check_sizes(num_speculative_tokens=MOST_DEPTH),
        reads_prediction=True,
    ),
    "cascade": Method(("parts", "tree_nodes", "tree_branching"), _cascade, _check_cascade),
}


def _of_family(name: str) -> Method:
    """A method that a family of drafts brings, as the commands run it."""
    entry, method = registry.methods()[name]

    def build(target: ej.Target, config: SpeculativeConfig) -> ej.Bound:
        model = config.model or target.need_source().spec
        reads = entry.record().reading
        options = {"method": name} | method.options(config)
        reading = {k: options.pop(k) for k in ("method", *reads) if k in options}
        family, file = registry.read_draft(model, **reading)
        show.print_notes_once(str(model), file.path, file.notes)
        return family.load(file, target, dtype=target.dtype, draft=model, **options)

    return Method(
        method.settings,
        build,
        method.check,
        takes_draft=True,
        needs_draft=not method.in_target,
        draws=method.draws,
    )


def draft_reading(aux_convention: AuxConvention, aux: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Options of ``read_draft`` for what a command was told of how a draft's files are to be understood; what
    it was not told is left out, because a family without that option would refuse it."""
    told: dict[str, Any] = {} if aux is None else {"aux": aux}
    return told if aux_convention == "auto" else told | {"aux_convention": aux_convention}


class _Methods(Mapping[str, Method]):
    """Those without a draft and those of whatever families are registered at the moment."""

    def __getitem__(self, name: str) -> Method:
        return _WITHOUT_DRAFT[name] if name in _WITHOUT_DRAFT else _of_family(name)

    def __iter__(self) -> Iterator[str]:
        return iter((*_WITHOUT_DRAFT, *registry.methods()))

    def __len__(self) -> int:
        return len(_WITHOUT_DRAFT) + len(registry.methods())


METHODS: Mapping[str, Method] = _Methods()
"""Every method by name."""


ALIASES = {
    "none": "ar",
    "autoregressive": "ar",
    "vanilla": "ar",
    "ngram_gpu": "ngram",
    "[ngram]": "ngram",
    "prompt_lookup": "ngram",
    "suffix_decoding": "suffix",
    "draft": "draft_model",
    "standalone": "draft_model",
    "nextn": "mtp",
    **dict.fromkeys(("peagle", "p_eagle"), "eagle3"),
    **dict.fromkeys(
        (
            *("deepseek_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "glm_ocr_mtp"),
            *("qwen3_next_mtp", "qwen3_5_mtp", "ernie_mtp", "longcat_flash_mtp", "nemotron_h_mtp"),
            *("exaone_moe_mtp", "exaone4_5_mtp", "minimax_m3_mtp", "bailing_hybrid_mtp", "step3p5_mtp"),
            *("pangu_ultra_moe_mtp", "hy_v3_mtp", "gemma4_mtp", "inkling_mtp"),
        ),
        "mtp",
    ),
}
"""What other engines call some methods (vLLM, vLLM-Ascend, SGLang)."""


def method_name(name: str) -> str:
    """How the method of that name is called here, whatever its case and hyphens; raises ConfigError, with the
    reason for one of another engine, and with the names there are."""
    known = known_name(name, METHODS, ALIASES)
    if known is None:
        elsewhere = known_name(name, METHODS_ELSEWHERE)
        why = "is not known" if elsewhere is None else f"is not run here: {METHODS_ELSEWHERE[elsewhere]}"
        raise ConfigError(f"method {name!r} {why}; methods are {', '.join(METHODS)}")
    return known


def method_named(name: str) -> Method:
    """The method of that name; raises ConfigError, with the names there are."""
    return METHODS[method_name(name)]


def speculation(
    text: str | None,
    *,
    method: str | None = None,
    draft: str | None = None,
    default: str | None = None,
    **settings: Any,
) -> SpeculativeConfig:
    """The checked config that ``--speculative-config`` (a JSON text), ``--method``, ``--draft`` and options
    of single settings ask for together. ``default``: the method where none is named (None: what the draft
    is). Raises ConfigError where they contradict each other."""
    method = None if method is None else method_name(method)
    if text is None:
        config = SpeculativeConfig(method or "")
    else:
        config = parse_speculative_config(text, method=method or "")
        if config.method:
            config = dataclasses.replace(config, method=method_name(config.method))
        if method not in (None, config.method):
            raise ConfigError(f"--method says {method!r}, --speculative-config says {config.method!r}")
        if draft is not None and config.model not in (None, draft):
            raise ConfigError(f"--draft says {draft!r}, --speculative-config says {config.model!r}")
    config = dataclasses.replace(config, model=config.model or draft)
    if not config.method:
        config = dataclasses.replace(config, method=default or method_for(config.model))
    config = dataclasses.replace(config, **{k: v for k, v in settings.items() if v is not None})
    check_config(config)
    return config


def method_for(draft: str | None) -> str:
    """What a draft alone asks for, by the family that its files are of, and ``ar`` without one."""
    if draft is None:
        return "ar"
    # A draft that is not there is refused before jax is imported.
    draft_path(draft)
    from eaglejax.drafts.files import opened

    return registry.recognise(opened(draft)).default


def check_config(config: SpeculativeConfig) -> None:
    """Refuse what can be refused before a model is loaded. Raises ConfigError, and CheckpointError for a
    draft that is not there."""
    method = method_named(config.method)
    for key, value in config.given().items():
        # What it does in any case may be said.
        if key == "draft_sample" and key not in method.settings and value is method.draws:
            continue
        if key not in ("model", *_OF_DECODING) and key not in method.settings:
            raise ConfigError(f"method {config.method!r} has no setting {key!r}; it has {_settings(method)}")
    _check_decoding(config, method)
    config = _scheduled(config)
    if config.model is not None and not method.takes_draft:
        raise ConfigError(f"method {config.method!r} uses no draft, but {config.model!r} is given as one")
    if config.model is None and method.needs_draft:
        raise ConfigError(f"method {config.method!r} needs a draft; name one with --draft")
    method.check(config)
    if config.model is not None:
        draft_path(config.model)


_OF_DECODING = ("verification", "num_speculative_tokens_per_batch_size")
"""Settings of how drafts are judged, whoever makes them."""
_OF_TREES = ("speculative_token_tree", "tree_depth", "tree_branching", "tree_nodes")


def _check_decoding(config: SpeculativeConfig, method: Method) -> None:
    """Refuse what cannot be judged as the config asks."""
    if config.verification not in (None, "token", "block"):
        raise ConfigError(f"verification is {config.verification!r}; it is 'token' or 'block'")
    if config.num_speculative_tokens_per_batch_size is None:
        return
    key = "num_speculative_tokens_per_batch_size"
    if "num_speculative_tokens" not in method.settings:
        raise ConfigError(f"method {config.method!r} has no number of drafts that {key} could choose")
    trees = [name for name in _OF_TREES if getattr(config, name) is not None]
    if trees:
        raise ConfigError(f"{key} counts the drafts of a chain, and {trees[0]} asks for a tree; give one")


def _scheduled(config: SpeculativeConfig) -> SpeculativeConfig:
    """Where numbers of drafts are named by batch size alone, the most of them are what is drafted."""
    ranges = config.num_speculative_tokens_per_batch_size
    if ranges is None or config.num_speculative_tokens is not None:
        return config
    return dataclasses.replace(config, num_speculative_tokens=max(drafts for *_, drafts in ranges))


def decoding(
    config: SpeculativeConfig,
    *,
    sampled: bool = False,
    verification: str | None = None,
    speculation: str | None = None,
) -> dict[str, Any]:
    """Options of ``generate`` that a config asks for. ``verification``, ``speculation``: what options ask
    for; ``sampled``: whether rows are. Raises ConfigError where these contradict the config, and for drafts
    that are drawn by numbers that follow the batch: a seed would give another text in another batch."""
    if None not in (verification, config.verification) and verification != config.verification:
        raise ConfigError(
            f"--verification says {verification!r}, --speculative-config says {config.verification!r}"
        )
    out: dict[str, Any] = given(verification=verification or config.verification)
    ranges = config.num_speculative_tokens_per_batch_size
    if ranges is None:
        return out
    if speculation == "adaptive":
        raise ConfigError(
            "--speculation adaptive chooses how many drafts are judged, and so does "
            "num_speculative_tokens_per_batch_size; give one"
        )
    if sampled and (config.draft_sample or method_named(config.method).draws):
        raise ConfigError(
            "num_speculative_tokens_per_batch_size beside a temperature needs drafts that are not drawn "
            f"(method {config.method!r} draws them): a seed would give another text in another batch"
        )
    from eaglejax.speculate.by_batch import ByBatch

    policy = ByBatch(ranges)
    return out | {"policy": policy, "widths": policy.widths, "speculation": "fixed"}


def check_plain_decoding(config: SpeculativeConfig, command: str) -> None:
    """For a command that judges whole drafts token by token. Raises ConfigError where a config asks for
    another way."""
    asked = [name for name, value in decoding(config).items() if value != "token"]
    if asked:
        raise ConfigError(f"{command} judges whole drafts token by token; {asked[0]} cannot be set for it")


def _settings(method: Method) -> str:
    names = [*method.settings, *(["model"] if method.takes_draft else [])]
    return ", ".join(names) or "none"


def given(**options: Any) -> dict[str, Any]:
    """The options that were given; the library has its defaults for those that are None."""
    return {name: value for name, value in options.items() if value is not None}


def check_count(option: str, value: int | None) -> None:
    """Raises ConfigError for a number of things that is not 1 or more; None is no number."""
    if value is not None and value < 1:
        raise ConfigError(f"{option} is {value}; it must be 1 or more")


def load_target(
    spec: str,
    *,
    dtype: str | None = None,
    context: int | None = None,
    quant: str | None = None,
    eos: Sequence[str] = (),
    kv_cache_dtype: str | None = None,
) -> ej.Target:
    """The model that ``--target`` and the options about it name; keys and values in ``kv_cache_dtype`` (None:
    in the form that its files ask for, or its dtype).

    Raises ConfigError for options that cannot be, int8-static without calibrated scales among them, and
    CheckpointError for a model that is not there; both before it is loaded where that can be told.
    """
    if dtype is not None:
        check_weight_dtype(dtype)
    check_count("--context", context)
    if quant is not None:
        from eaglejax.quant.schemes import as_plan

        as_plan(quant)
    form = None
    if kv_cache_dtype is not None:
        from eaglejax.kv_format import kv_format

        form = kv_format(kv_cache_dtype)
    source = resolve(spec)
    with show.status(f"loading {spec}"):
        compiling.watch()
        target = ej.load_target(source, dtype=dtype, context=context, quant=quant, eos=token_names(eos))
    if form is None:
        return target
    if form.static and target.cache_scales is None:
        raise ConfigError(
            f"{target.name} brings no scales for an int8-static cache; quantise it with `eaglejax quantize` "
            "and --calib-prompts, or use int8, whose scales come with the tokens"
        )
    return dataclasses.replace(target, cache_format=form.name)


def check_files(settings: TrainSettings) -> None:
    """Raise ConfigError for data files of a training run that are not there, and CheckpointError for a draft
    to go on from that is not."""
    from eaglejax.train.settings import STARTS

    for name in (*(source.path for source in settings.data.train), *settings.data.decontaminate):
        if not os.access(name, os.R_OK) or os.path.isdir(name):
            raise ConfigError(f"data file {name} cannot be read")
    if settings.draft.start not in STARTS:
        draft_path(settings.draft.start)


def load_target_of(settings: TrainSettings) -> ej.Target:
    """The target of a training run, whose other files are there: what is not is refused before jax is
    imported."""
    check_files(settings)
    return load_target(settings.target, dtype=settings.target_dtype, quant=settings.target_quant)


def say_memory(target: ej.Target) -> None:
    """Say what the weights take, what a row's tokens will take, and what is left for them."""
    from eaglejax.devices import machine
    from eaglejax.models.memory import cache_bytes_per_token, gib
    from eaglejax.speculate.options import cache_form

    a_token = cache_bytes_per_token(target.config, cache_form(target)[0])
    show.print_note(
        f"memory: the weights take {gib(target.nbytes)}, a thousand tokens of a row "
        f"{1000 * a_token / 2**20:.1f} MiB of cache; {gib(machine.free_bytes())} are free"
    )


def token_names(names: Sequence[str]) -> list[int | str]:
    """Tokens as options name them, by id or by text."""
    return [int(name) if name.isascii() and name.isdigit() else name for name in names]


def proposer_from(target: ej.Target, config: SpeculativeConfig) -> Any:
    """The proposer of a checked config, bound to its weights where it has any; None for plain decoding."""
    return method_named(config.method).build(target, _scheduled(config))
