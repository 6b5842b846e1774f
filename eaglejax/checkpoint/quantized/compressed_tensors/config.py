"""The ``quantization_config`` of compressed-tensors (llm-compressor): which modules are quantised, and how.

That follows from targets and an ignore list, by class, name or expression.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eaglejax.checkpoint.quantized.compressed_tensors.patterns import compiled
from eaglejax.checkpoint.quantized.parts import Kind, require
from eaglejax.errors import CheckpointError
from eaglejax.naming import known_name

METHOD = "compressed-tensors"


INT, PACKED = "int-quantized", "pack-quantized"


_FORMATS = {INT: INT, PACKED: PACKED, "naive-quantized": INT}
"""Formats by the names that the tool has given them."""


_STATUS = ("initialized", "calibration", "frozen", "compressed")
"""How far the tool was when it saved, which says nothing of the files: their tensors tell what they hold."""


_ORDERS = ("weight", "static")
"""Orders in which columns were quantised that leave no trace in the files; that of ``group`` moves columns
between groups, which ``weight_g_idx`` would tell."""


@dataclasses.dataclass(frozen=True)
class Group:
    """One entry of ``config_groups``: targets, kind and file format of their matrices; format None: as the
    tensors have it."""

    name: str
    targets: tuple[str, ...]
    kind: Kind
    format: str | None

    def covers(self, *spelt: str) -> bool:
        """Whether a module is meant, by any of its names."""
        return any(_matches(target, module) for target in self.targets for module in spelt)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A checked ``quantization_config``."""

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    where: str

    def group_of(self, *spelt: str) -> Group | None:
        """The group of a module: of its name in ``*ForCausalLM``, and as the files spell it, which is what
        expressions were written for."""
        if any(_matches(pattern, module) for pattern in self.ignore for module in spelt):
            return None
        return next((group for group in self.groups if group.covers(*spelt)), None)


def _matches(pattern: str, module: str) -> bool:
    """A target or ignore entry: a class (every matrix here is a ``Linear``), ``re:`` and an expression, or a
    module's name."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern in ("Linear", module)


def parse_config(raw: Mapping[str, Any], where: str, plain: Callable[[str], str]) -> Scheme:
    """Check a ``quantization_config``; ``plain`` maps names to those of ``*ForCausalLM``.

    Raises ``CheckpointError`` for settings that are not read.
    """
    status = raw.get("quantization_status")
    require(
        status is None or (isinstance(status, str) and known_name(status, _STATUS)),
        f"{where}: quantization_status is {status!r:.80}; it can be {', '.join(_STATUS)}",
    )
    groups = raw.get("config_groups")
    require(isinstance(groups, Mapping) and groups, f"{where}: quantization_config has no config_groups")
    # The writer names the sparsity and the transforms of every model, also of those that have none.
    nothing = {
        "kv_cache_scheme": lambda value: False,
        "sparsity_config": lambda value: str(value.get("format")).lower() == "dense",
        "transform_config": lambda value: not value.get("config_groups"),
    }
    for key, is_nothing in nothing.items():
        value = raw.get(key)
        none = not value or (isinstance(value, Mapping) and is_nothing(value))
        require(none, f"{where}: quantization_config sets {key}, which is not read")
    ignore = raw.get("ignore") or ()
    require(
        isinstance(ignore, list | tuple) and all(isinstance(i, str) for i in ignore),
        f"{where}: ignore is {ignore!r}; it must be a list of names",
    )
    assert isinstance(groups, Mapping)
    found = tuple(_group(name, group, raw.get("format"), where) for name, group in groups.items())

    def settle(pattern: str) -> str:
        if pattern.startswith("re:"):
            try:
                compiled(pattern[3:])
            except (re.error, ValueError) as error:
                raise CheckpointError(
                    f"{where}: {pattern!r:.80} is no regular expression that can be used: {error}"
                ) from error
        return pattern if pattern.startswith("re:") else plain(pattern + ".weight").removesuffix(".weight")

    return Scheme(
        tuple(dataclasses.replace(g, targets=tuple(map(settle, g.targets))) for g in found),
        tuple(map(settle, ignore)),
        where,
    )


def _group(name: str, raw: Any, default_format: Any, where: str) -> Group:
    at = f"{where}: config_groups.{name}"
    require(isinstance(raw, Mapping), f"{at} must be an object")
    targets, weights = raw.get("targets"), raw.get("weights")
    require(
        isinstance(targets, list) and targets and all(isinstance(t, str) for t in targets),
        f"{at}.targets is {targets!r}; it must be a list of names",
    )
    require(isinstance(weights, Mapping), f"{at} does not say how weights are quantised")
    require(not raw.get("output_activations"), f"{at} quantises outputs, which is not supported")
    weights, size = _filled(weights), weights.get("group_size")
    bits, strategy = weights["num_bits"], weights["strategy"]
    require(
        weights["type"] == "int" and bits in (4, 8) and weights.get("symmetric", True) is True,
        f"{at}.weights: {bits} bits of type {weights['type']!r}, symmetric "
        f"{weights.get('symmetric', True)}; symmetric int of 4 or 8 bits is read",
    )
    require(
        strategy in ("channel", "group"), f"{at}.weights: strategy {strategy!r}; channel and group are read"
    )
    order = weights.get("actorder")
    require(
        not order or (isinstance(order, str) and known_name(order, _ORDERS)),
        f"{at}.weights: actorder {order!r} is not read",
    )
    require(
        strategy == "channel" or (isinstance(size, int) and not isinstance(size, bool) and size > 0),
        f"{at}.weights: group_size is {size!r}; groups need a positive whole number",
    )
    activation, offset = _activation(raw.get("input_activations"), at)
    require(
        activation != "static" or (bits == 8 and strategy == "channel"),
        f"{at}: static activations go with 8-bit weights by channel",
    )
    form = raw.get("format") or default_format
    known = known_name(form, _FORMATS) if isinstance(form, str) else None
    require(
        form is None or known is not None,
        f"{at}: format {form!r:.80} is not read; {INT} and {PACKED} are",
    )
    kind = Kind(bits, activation, size if strategy == "group" else None, offset)
    return Group(name, tuple(targets), kind, None if known is None else _FORMATS[known])


def _filled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of weights or activations with what the tool takes for those that are left out."""
    given = {key: value for key, value in settings.items() if value is not None}
    size = given.get("group_size")
    by_size = "tensor" if size is None else "channel" if size == -1 else "group"
    usual = "token" if given.get("dynamic") else by_size
    return {"num_bits": 8, "type": "int", "strategy": usual, **given}


def _activation(raw: Any, at: str) -> tuple[str | None, bool]:
    """(kind of activations, whether they have a zero point)."""
    if raw is None:
        return None, False
    require(isinstance(raw, Mapping), f"{at}.input_activations is {raw!r:.80}; it must be an object")
    raw = _filled(raw)
    require(
        raw["num_bits"] == 8 and raw["type"] == "int",
        f"{at}.input_activations must be int of 8 bits",
    )
    symmetric = raw.get("symmetric", True)
    if raw.get("dynamic"):
        require(
            raw.get("strategy") == "token" and symmetric,
            f"{at}.input_activations: dynamic ones are read by token and symmetric",
        )
        return "dynamic", False
    require(raw.get("strategy") == "tensor", f"{at}.input_activations: static ones are read by tensor")
    return "static", not symmetric


def format_of(kind: Kind) -> str:
    """The format in which a matrix of this kind is written."""
    return PACKED if kind.activation is None else INT


def config_of(kinds: Mapping[str, Kind], plain: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of matrices by module; ``plain``: those left as they are."""
    by_kind: dict[Kind, list[str]] = {}
    for module, kind in kinds.items():
        by_kind.setdefault(kind, []).append(module)
    groups = {}
    for number, (kind, modules) in enumerate(by_kind.items()):
        activation = None
        if kind.activation is not None:
            dynamic = kind.activation == "dynamic"
            activation = {
                "num_bits": 8,
                "type": "int",
                "symmetric": not kind.asymmetric,
                "strategy": "token" if dynamic else "tensor",
                "dynamic": dynamic,
            }
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(by_kind) == 1 else modules,
            "weights": {
                "num_bits": kind.bits,
                "type": "int",
                "symmetric": True,
                "strategy": "group" if kind.group else "channel",
                "group_size": kind.group,
                "dynamic": False,
            },
            "input_activations": activation,
            "output_activations": None,
            "format": format_of(kind),
        }
    formats = {format_of(kind) for kind in by_kind}
    return {
        "quant_method": METHOD,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(plain),
        "kv_cache_scheme": None,
    }
