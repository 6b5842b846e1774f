"""The settings of a training run, as a TOML file says them: strict, with dotted overrides.

Every key is a field below; one that is not, or has a value of another type, is refused with its name. The
resolved settings are written beside the checkpoints and read back identically.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from eaglejax.drafts.limits import MOST_DEPTH
from eaglejax.errors import ConfigError
from eaglejax.train.objective import Objective

STARTS = ("fit", "layer", "random")
"""Words for ``draft.start``; anything else there is a draft to go on from."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """One file of training rows. ``weight``: its share of the mixture; ``limit``: first rows read."""

    path: str
    weight: float = 1.0
    limit: int | None = None


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """``train``: files of rows (see ``samples``). ``total``: samples of the mixture (None: as many as the
    weights allow without repeating one; ``mix`` False: all of all files). ``decontaminate``: evaluation files
    whose text must not occur. ``validation``: share of the samples held out. ``row_tokens`` T: length of a
    packed row; longer samples are cut into windows that share ``overlap`` tokens. ``seed``: of mixing and
    shuffling. ``supervise``: "all" trains on the tokens of prompts too, where the target's distribution is
    as good a teacher; what is held out is always judged on answers."""

    train: tuple[SourceFile, ...] = ()
    mix: bool = False
    total: int | None = None
    decontaminate: tuple[str, ...] = ()
    deduplicate: Literal["sample", "prompt", "none"] = "sample"
    validation: float = 0.05
    supervise: Literal["answers", "all"] = "answers"
    row_tokens: int = 1024
    overlap: int = 64
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class DraftSettings:
    """Shape and start of the draft; None takes the target's own size.

    ``start``: "fit" (closed form from the target's features), "layer" (the target's last layer), "random", or
    the folder or Hub id of a draft to go on from, whose shape and vocabulary are then kept (one that has
    ``target_rows`` can be given a vocabulary of another size). ``fit_tokens``: tokens of training text that
    "fit" reads, about, each passed through the target once. ``aux``: boundaries that an EAGLE-3 draft reads
    (empty: 2, n/2, n-3). ``vocab``: Vd (None: the whole vocabulary),
    chosen by supervised counts plus ``vocab_prior`` times those of all tokens, prompts included: what the
    target was asked about it will also write. ``train_head`` False keeps the target's rows as the head;
    ``target_rows`` then leaves them out of the file and borrows them from the target again. ``experts``: of
    each layer's MLP, ``experts_per_token`` of which a token passes (0: a dense MLP); ``expert_size``: width
    of one (None: ``intermediate_size`` shared out over those that a token passes).
    """

    start: str = "fit"
    fit_tokens: int = 65536
    aux: tuple[int, ...] = ()
    vocab: int | None = None
    vocab_prior: float = 0.0
    intermediate_size: int | None = None
    experts: int = 0
    experts_per_token: int = 2
    expert_size: int | None = None
    num_layers: int = 1
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    train_head: bool = False
    target_rows: bool = False


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """``name``: "adamw", or "muon" for matrices with AdamW for the rest. ``learning_rate`` at its peak,
    reached after ``warmup`` updates; ``schedule`` then falls to ``final`` times the peak, which an update
    after the last would have.
    ``clip``: largest global norm of the gradient (0: none). ``beta2`` is also the momentum of Muon, whose
    ``weight_decay`` is on matrices alone."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 5e-4
    warmup: int = 40
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip: float = 1.0


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """``updates``: optimiser steps in all. An update sees ``rows`` packed rows, ``accumulate`` times.
    ``features``: "online", or a folder made by ``eaglejax features``. ``compute_dtype``: of activations and
    of the weights' copy in the forward; masters are float32. ``remat``: attention's weights [heads, T, T] of
    each chain step are computed again in the backward pass instead of kept (always so on a GPU or TPU, where
    a kernel does it, but for drafts with windows). ``save_every``, ``evaluate_every``,
    ``log_every``: in updates. ``keep``: latest checkpoints that stay beside the best one. ``most_skipped``:
    consecutive updates that may be skipped for NaN before the run stops. ``decode_prompts``: held-out prompts
    that each evaluation decodes for the real tau (0: none), to ``decode_tokens`` tokens with a chain of
    ``decode_depth``."""

    updates: int = 1000
    rows: int = 1
    accumulate: int = 1
    features: str = "online"
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    remat: bool = False
    seed: int = 0
    save_every: int = 200
    evaluate_every: int = 200
    log_every: int = 10
    keep: int = 2
    most_skipped: int = 20
    decode_prompts: int = 0
    decode_tokens: int = 64
    decode_depth: int = 5
    tensorboard: bool = True
    wandb: bool = False


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """Everything about a run. ``target``, ``target_dtype``: see ``load_target``. ``target_quant``: the scheme
    that the target's weights are quantised with (None: as they come), whose features the draft is then
    trained on. ``out``: the run's folder."""

    target: str = "demo"
    target_dtype: str | None = None
    target_quant: str | None = None
    out: str = ""
    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    draft: DraftSettings = dataclasses.field(default_factory=DraftSettings)
    objective: Objective = dataclasses.field(default_factory=Objective)
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings)
    run: RunSettings = dataclasses.field(default_factory=RunSettings)

    def check(self) -> None:
        """Raise ConfigError for values that cannot be, alone or together."""
        if not self.out:
            raise ConfigError("out is not set; name the folder of the run")
        if not self.data.train:
            raise ConfigError("data.train names no file")
        self._check_ranges()
        self._check_limits()
        self._check_effects()
        if self.data.overlap < self.objective.steps + 1:
            raise ConfigError(
                f"data.overlap {self.data.overlap} is too small for objective.steps "
                f"{self.objective.steps}: a "
                "window must share at least one token more than there are steps"
            )
        if self.optimizer.warmup >= self.run.updates:
            raise ConfigError(
                f"optimizer.warmup {self.optimizer.warmup} leaves nothing of run.updates {self.run.updates}"
            )
        if self.draft.target_rows and (self.draft.train_head or not self.draft.vocab):
            raise ConfigError(
                "draft.target_rows borrows rows of the target's head: it needs draft.vocab and excludes "
                "draft.train_head"
            )
        if self.objective.regresses and (self.draft.vocab or self.draft.aux or self.draft.train_head):
            raise ConfigError(
                "an EAGLE-1 draft has the target's vocabulary and head and reads its final state alone"
            )

    def _check_ranges(self) -> None:
        for section, least in _LEAST.items():
            for name, bound in least.items():
                value = getattr(getattr(self, section), name)
                if value is not None and value < bound:
                    raise ConfigError(f"{section}.{name} is {value}; it must be at least {bound}")
        for source in self.data.train:
            if source.limit is not None and source.limit < 1:
                raise ConfigError(f"the limit of {source.path} is {source.limit}; it must be at least 1")
        if self.optimizer.learning_rate <= 0:
            raise ConfigError(
                f"optimizer.learning_rate is {self.optimizer.learning_rate}; it must be positive"
            )
        if self.optimizer.final > 1:
            raise ConfigError(
                f"optimizer.final is {self.optimizer.final}; the rate falls to at most 1 times its peak"
            )
        for section in ("data", "run"):
            seed = getattr(self, section).seed
            if not 0 <= seed < 1 << 32:
                raise ConfigError(f"{section}.seed is {seed}; it must lie in 0..{(1 << 32) - 1}")
        for name in ("beta1", "beta2"):
            if getattr(self.optimizer, name) >= 1:
                raise ConfigError(f"optimizer.{name} is {getattr(self.optimizer, name)}; it must be below 1")

    def _check_limits(self) -> None:
        for section, most in _MOST.items():
            for name, bound in most.items():
                value = getattr(getattr(self, section), name)
                if value is not None and value > bound:
                    raise ConfigError(f"{section}.{name} is {value!r:.80}; it must be at most {bound}")
        if len(self.draft.aux) > MOST_LAYERS:
            raise ConfigError(f"draft.aux has {len(self.draft.aux)} ids; at most {MOST_LAYERS} are read")

    def _check_effects(self) -> None:
        """Refuse settings that would change nothing."""
        paths = [source.path for source in self.data.train]
        if len(set(paths)) < len(paths):
            raise ConfigError(f"data.train names a file twice: {', '.join(paths)}")
        weighted = any(source.weight != 1 for source in self.data.train)
        if not self.data.mix and (weighted or self.data.total is not None):
            raise ConfigError("weights of files and data.total are of a mixture; set data.mix = true")
        if not self.draft.experts and self.draft.expert_size:
            raise ConfigError("draft.expert_size is the width of experts, and draft.experts is 0")
        if self.draft.expert_size and self.draft.intermediate_size:
            raise ConfigError(
                "draft.intermediate_size is shared out over experts that have no draft.expert_size; set one "
                "of the two"
            )
        if not self.draft.experts and self.draft.experts_per_token != DraftSettings.experts_per_token:
            raise ConfigError("draft.experts_per_token is of a mixture, and draft.experts is 0")
        if self.optimizer.schedule == "constant" and self.optimizer.final != OptimizerSettings.final:
            raise ConfigError("optimizer.final is where the rate falls to, and a constant one does not fall")
        if self.draft.vocab_prior and not self.draft.vocab:
            raise ConfigError("draft.vocab_prior helps to choose a reduced vocabulary; set draft.vocab")
        if self.draft.start != "fit" and self.draft.fit_tokens != DraftSettings.fit_tokens:
            raise ConfigError(f"draft.fit_tokens is for start 'fit', and draft.start is {self.draft.start!r}")


_LEAST: dict[str, dict[str, int]] = {
    "data": {"total": 1, "row_tokens": 1},
    "draft": {"vocab": 1, "vocab_prior": 0, "intermediate_size": 1, "experts": 0, "experts_per_token": 1}
    | {"fit_tokens": 1, "expert_size": 1, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 1},
    "optimizer": dict.fromkeys(("warmup", "final", "beta1", "beta2", "weight_decay", "clip"), 0),
    "run": {"updates": 1, "rows": 1, "accumulate": 1, "save_every": 1, "evaluate_every": 1, "log_every": 1}
    # A decode of one token is the prompt's own forward, in which no draft has a part.
    | {"keep": 1, "most_skipped": 1, "decode_prompts": 0, "decode_tokens": 2, "decode_depth": 1},
}
"""Section -> setting -> the least value that it can have."""


_SIZE = 1 << 20
MOST_LAYERS = 256
_MOST: dict[str, dict[str, int]] = {
    "data": {"total": 2**31 - 1, "row_tokens": _SIZE, "overlap": _SIZE},
    "draft": {"fit_tokens": 2**31 - 1, "experts": 1 << 14, "num_layers": MOST_LAYERS}
    | dict.fromkeys(("vocab", "intermediate_size", "expert_size", "head_dim"), _SIZE)
    | dict.fromkeys(("experts_per_token", "num_heads", "num_kv_heads"), 1 << 14),
    "run": dict.fromkeys(("updates", "save_every", "evaluate_every", "log_every", "keep"), 2**31 - 1)
    | dict.fromkeys(("rows", "accumulate", "most_skipped", "decode_prompts", "decode_tokens"), _SIZE)
    | {"decode_depth": MOST_DEPTH},
}
"""Section -> setting -> the largest value that it can have: sizes that no model and no machine have, or more
steps than a program can hold."""


def load_settings(path: str | Path, overrides: Sequence[str] = ()) -> TrainSettings:
    """Settings from a TOML file with ``a.b=value`` overrides (values as in TOML; bare words are texts).

    Raises ConfigError for unknown keys, wrong types and values that cannot be.
    """
    settings = parse(TrainSettings, read_toml(path, overrides))
    settings.check()
    return settings


def read_toml(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The table in a TOML file with ``a.b=value`` overrides put into it."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        # Beside its own errors the parser lets through those of numbers of too many digits, and of nesting.
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for text in overrides:
        override(table, text)
    return table


def override(table: dict[str, Any], text: str) -> None:
    """Put one ``a.b=value`` into a nested table."""
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(f"override {text!a} is not UTF-8")
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise ConfigError(f"override {text!r} is not of the form section.key=value")
    *sections, last = name.strip().split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {text!r}: {section} is not a section")
    try:
        table[last] = tomllib.loads(f"v = {value}")["v"]
    except (ValueError, RecursionError):
        table[last] = value.strip()


def parse(cls: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """A settings dataclass from a table, every key and type checked. Raises ConfigError."""
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    unknown = sorted(set(table) - set(names))
    if unknown:
        raise ConfigError(f"unknown key {where}{unknown[0]!s}; known are {', '.join(names)}")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in table:
            raise ConfigError(f"{where}{field.name} is not given")
    return cls(**{name: _value(hints[name], table[name], f"{where}{name}") for name in table})


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value == "none" and type(None) in args:
            return None
        return _value(next(a for a in args if a is not type(None)), value, where)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where} is {value!r}; it is one of {', '.join(map(repr, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} is a list, not {value!r}")
        return tuple(_value(args[0], v, f"{where}[{n}]") for n, v in enumerate(value))
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is a section, not {value!r}")
        return parse(typing.cast(type, hint), value, f"{where}.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        # An integer of hundreds of digits is no float.
        value = float(value) if abs(value) <= sys.float_info.max else math.inf
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where} is {value!r}; it must be a finite number")
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} is {value!r}; it must be of type {hint.__name__}")
    return value


def to_toml(settings: Any) -> str:
    """A settings dataclass as TOML that ``parse`` reads back to an equal one. None is written "none"."""
    lines: list[str] = []
    _write(settings, "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write(settings: Any, section: str, lines: list[str]) -> None:
    inner = []
    if section:
        lines.append(f"\n[{section}]")
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        name = f"{section}.{field.name}" if section else field.name
        if dataclasses.is_dataclass(value):
            inner.append((name, value))
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            items = [", ".join(f"{k} = {_toml(v)}" for k, v in dataclasses.asdict(i).items()) for i in value]
            lines.append(f"{field.name} = [{', '.join('{ ' + i + ' }' for i in items)}]")
        else:
            lines.append(f"{field.name} = {_toml(value)}")
    for name, value in inner:
        _write(value, name, lines)


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(v) for v in value)}]"
    if isinstance(value, str):
        # JSON's strings are TOML's, but that TOML escapes one character more.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
