"""Drafting methods by name: what ``--method``, ``--methods`` and ``--speculative-config`` choose from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import eaglejax as ej
from eaglejax.config import SpeculativeConfig
from eaglejax.drafts.draft_model import DraftModel
from eaglejax.errors import ConfigError, MismatchError


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to draft.

    ``settings``: key of a SpeculativeConfig -> setting of the proposer. ``build(target, draft, **settings)``
    makes the proposer; None is plain autoregressive decoding. ``needs_draft``: a draft must be named.
    ``reads_prediction``: it drafts from predictions.
    """

    settings: Mapping[str, str]
    build: Callable[..., Any]
    needs_draft: bool = False
    reads_prediction: bool = False


def _draft_model(target: ej.Target, draft: str, **settings: int) -> ej.Bound:
    loaded = ej.load_target(draft, dtype=target.dtype)
    if loaded.need_tokenizer().hash != target.need_tokenizer().hash:
        raise MismatchError(
            f"the draft {draft} has another tokenizer than the target {target.name}; their token ids mean "
            "different text. Name a draft of the same family"
        )
    proposer = DraftModel(loaded.config, vocab_size=target.config.vocab_size, **settings)
    return ej.Bound(proposer, loaded.params)


METHODS: dict[str, Method] = {
    "ar": Method({}, lambda target, draft: None),
    "ngram": Method(
        {
            "num_speculative_tokens": "length",
            "prompt_lookup_max": "max_ngram",
            "prompt_lookup_min": "min_ngram",
        },
        lambda target, draft, **settings: ej.NGram(**settings),
    ),
    "prediction": Method(
        {"num_speculative_tokens": "length"},
        lambda target, draft, **settings: ej.Prediction(**settings),
        reads_prediction=True,
    ),
    "draft_model": Method({"num_speculative_tokens": "length"}, _draft_model, needs_draft=True),
}


def method_named(name: str) -> Method:
    """The method of that name; raises ConfigError, with the names there are."""
    if name not in METHODS:
        raise ConfigError(f"method {name!r} is not known; methods are {', '.join(METHODS)}")
    return METHODS[name]


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


def _settings(method: Method) -> str:
    names = [*method.settings, *(["model"] if method.needs_draft else [])]
    return ", ".join(names) or "none"


def proposer_from(target: ej.Target, config: SpeculativeConfig) -> Any:
    """The proposer of a checked config, bound to its weights where it has any; None for plain decoding."""
    method = method_named(config.method)
    settings = {method.settings[k]: v for k, v in config.given().items() if k != "model"}
    return method.build(target, config.model, **settings)
