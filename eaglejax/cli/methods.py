"""Drafting methods by name: what ``--method``, ``--methods`` and ``--speculative-config`` choose from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import eaglejax as ej
from eaglejax.cli import show
from eaglejax.config import AuxConvention, SpeculativeConfig, parse_speculative_config
from eaglejax.errors import ConfigError
from eaglejax.kv_format import kv_format, uncalibrated_format
from eaglejax.naming import known_name

Build = Callable[[Any, SpeculativeConfig], Any]
"""Of a target and a config: the proposer."""


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to draft.

    ``settings``: the keys of a SpeculativeConfig that it knows, ``model`` apart. ``build`` makes the proposer
    of a checked config; None is plain autoregressive decoding. ``needs_draft``: a draft must be named.
    ``reads_prediction``: it drafts from predictions.
    """

    settings: tuple[str, ...]
    build: Build
    needs_draft: bool = False
    reads_prediction: bool = False


def _settings_as(**names: str) -> Callable[[SpeculativeConfig], dict[str, Any]]:
    """Settings of a proposer out of a config; ``names``: key of the config -> setting of the proposer."""

    def settings(config: SpeculativeConfig) -> dict[str, Any]:
        return {new: value for key, new in names.items() if (value := getattr(config, key)) is not None}

    return settings


_length = _settings_as(num_speculative_tokens="length")
_decoding = _settings_as(num_speculative_tokens="length", kv_cache_dtype="cache_dtype")
_lookup = _settings_as(
    num_speculative_tokens="length", prompt_lookup_max="max_ngram", prompt_lookup_min="min_ngram"
)
_drafting = _settings_as(
    draft_sample="sample",
    draft_temperature="temperature",
    min_confidence="min_confidence",
    kv_cache_dtype="cache_dtype",
)


def _eagle(version: Literal["auto", "eagle1", "eagle3"], default: Literal["dynamic", "static"]) -> Build:
    def build(target: ej.Target, config: SpeculativeConfig) -> ej.Bound:
        from eaglejax.cli import trees
        from eaglejax.drafts.eagle.files.load import draft_folder
        from eaglejax.drafts.eagle.files.read import read_draft

        assert config.model is not None
        convention: AuxConvention = config.aux_convention or "auto"  # type: ignore[assignment]
        for note in read_draft(draft_folder(config.model), aux_convention=convention, method=version).notes:
            show.print_note(f"{config.model}: {note}")
        return ej.load_draft(
            config.model,
            target,
            method=version,
            aux_convention=convention,
            tree=trees.tree_of(config, default),
            **_drafting(config),
        )

    return build


def _draft_model(target: ej.Target, config: SpeculativeConfig) -> ej.Bound:
    assert config.model is not None
    return ej.load_draft_model(config.model, target, **_decoding(config))


_STATIC = ("num_speculative_tokens", "speculative_token_tree", "draft_sample", "draft_temperature")
_DYNAMIC = ("tree_depth", "tree_branching", "tree_nodes")
_EAGLE = ("min_confidence", "kv_cache_dtype")
_ANY_EAGLE = (*_STATIC, *_DYNAMIC, *_EAGLE, "aux_convention")

METHODS: dict[str, Method] = {
    "ar": Method((), lambda target, config: None),
    "ngram": Method(
        ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
        lambda target, config: ej.NGram(**_lookup(config)),
    ),
    "prediction": Method(
        ("num_speculative_tokens",),
        lambda target, config: ej.Prediction(**_length(config)),
        reads_prediction=True,
    ),
    "draft_model": Method(("num_speculative_tokens", "kv_cache_dtype"), _draft_model, needs_draft=True),
    "eagle": Method(_ANY_EAGLE, _eagle("auto", "dynamic"), needs_draft=True),
    "eagle1": Method((*_STATIC, *_EAGLE), _eagle("eagle1", "static"), needs_draft=True),
    "eagle2": Method((*_DYNAMIC, *_EAGLE), _eagle("eagle1", "dynamic"), needs_draft=True),
    "eagle3": Method(_ANY_EAGLE, _eagle("eagle3", "dynamic"), needs_draft=True),
}


ALIASES = {
    "none": "ar",
    "autoregressive": "ar",
    "vanilla": "ar",
    "ngram_gpu": "ngram",
    "[ngram]": "ngram",
    "prompt_lookup": "ngram",
    "draft": "draft_model",
    "standalone": "draft_model",
}
"""What other engines call some methods (vLLM, vLLM-Ascend, SGLang)."""


def method_name(name: str) -> str:
    """How the method of that name is called here, whatever its case and hyphens; raises ConfigError, with the
    names there are."""
    known = known_name(name, METHODS, ALIASES)
    if known is None:
        raise ConfigError(f"method {name!r} is not known; methods are {', '.join(METHODS)}")
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
    """What a draft alone asks for: ``eagle`` or ``draft_model``, by its tensors, and ``ar`` without one."""
    if draft is None:
        return "ar"
    from eaglejax.drafts.draft_model.load import is_eagle

    return "eagle" if is_eagle(draft) else "draft_model"


def check_config(config: SpeculativeConfig) -> None:
    """Refuse what can be refused before a model is loaded. Raises ConfigError."""
    method = method_named(config.method)
    for key in config.given():
        if key != "model" and key not in method.settings:
            raise ConfigError(f"method {config.method!r} has no setting {key!r}; it has {_settings(method)}")
    if config.model is not None and not method.needs_draft:
        raise ConfigError(f"method {config.method!r} uses no draft, but {config.model!r} is given as one")
    if config.model is None and method.needs_draft:
        raise ConfigError(f"method {config.method!r} needs a draft; name one with --draft")
    if config.aux_convention not in (None, *get_args(AuxConvention)):
        raise ConfigError(
            f"aux_convention is {config.aux_convention!r}; it is one of {', '.join(get_args(AuxConvention))}"
        )
    if config.kv_cache_dtype is not None:
        uncalibrated_format(config.kv_cache_dtype)
    if set(config.given()) - {"model", "prompt_lookup_max", "prompt_lookup_min"}:
        from eaglejax.cli import trees

        trees.check(config)


def _settings(method: Method) -> str:
    names = [*method.settings, *(["model"] if method.needs_draft else [])]
    return ", ".join(names) or "none"


def with_cache(target: ej.Target, format: str | None) -> ej.Target:
    """``target`` with keys and values in ``format``; None: in the one that its files ask for, or its dtype.

    Raises ConfigError for a format that is not known, and for int8-static without calibrated scales.
    """
    if format is None:
        return target
    form = kv_format(format)
    if form.static and target.cache_scales is None:
        raise ConfigError(
            f"{target.name} brings no scales for an int8-static cache; quantise it with `eaglejax quantize` "
            "and --calib-prompts, or use int8, whose scales come with the tokens"
        )
    return dataclasses.replace(target, cache_format=form.name)


def token_names(names: Sequence[str]) -> list[int | str]:
    """Tokens as options name them, by id or by text."""
    return [int(name) if name.isascii() and name.isdigit() else name for name in names]


def proposer_from(target: ej.Target, config: SpeculativeConfig) -> Any:
    """The proposer of a checked config, bound to its weights where it has any; None for plain decoding."""
    return method_named(config.method).build(target, config)
