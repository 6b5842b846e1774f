"""Which weights are quantised, and how: schemes by name, and plans that map parameter paths to schemes."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable
from typing import Any, Literal

from eaglejax.errors import ConfigError
from eaglejax.naming import known_name

Activation = Literal["dynamic", "static"]
"""How activations become int8: a scale for each token as it comes, or one calibrated scale for a tensor."""

Search = Literal["minmax", "mse"]
"""How a weight's scale is found; see ``quant.quantize``."""

QuantizedForm = Literal["eaglejax", "modelslim", "compressed-tensors"]
"""Layouts of folders with quantised weights."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Arithmetic of one linear layer.

    ``weight_bits``: 8 or 4, symmetric. ``activation``: None leaves activations in their float dtype.
    ``group_size``: input rows that share a weight scale, None for one scale an output channel.
    ``asymmetric``: static activations have an offset as well, which serves one-sided inputs. Raises
    ConfigError for what does not go together.
    """

    name: str
    weight_bits: int
    activation: Activation | None
    group_size: int | None = None
    asymmetric: bool = False

    def __post_init__(self) -> None:
        if self.weight_bits not in (4, 8):
            raise ConfigError(f"scheme {self.name}: weight_bits is {self.weight_bits!r}; it is 8 or 4")
        if self.activation not in ("dynamic", "static", None):
            raise ConfigError(
                f"scheme {self.name}: activation is {self.activation!r}; it is 'dynamic', 'static' or None"
            )
        size = self.group_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 2 or size % 2):
            raise ConfigError(
                f"scheme {self.name}: group_size is {size!r}; it is an even number of input rows, or None"
            )
        if self.asymmetric and self.activation != "static":
            raise ConfigError(
                f"scheme {self.name}: only static activations have an offset; asymmetric does not apply"
            )

    @property
    def label(self) -> str:
        """Name with the group size: ``w4a8-g32``."""
        return self.name if self.group_size is None else f"{self.name}-g{self.group_size}"


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("w8a8", 8, "dynamic"),
        Scheme("w8a8-static", 8, "static"),
        Scheme("w4a8", 4, "dynamic"),
        Scheme("w4a16", 4, None),
        Scheme("w8a16", 8, None),
    )
}
"""The schemes that have a name, one scale an output channel."""

ALIASES = {"w8a8-dynamic": "w8a8", "w8a8-linear": "w8a8", "w4a8-dynamic": "w4a8"}
"""What modelslim and those who write about it call a scheme."""


def scheme_name(name: str) -> str | None:
    """The name in ``SCHEMES`` that ``name`` means (case, hyphens and underscores apart), None for none."""
    return known_name(name, SCHEMES, ALIASES)


_GROUPED = re.compile(r"(.+)[-_][gG]([0-9]{1,9})")


def get_scheme(name: str, group_size: int | None = None, *, asymmetric: bool = False) -> Scheme:
    """The scheme called ``name``, with weight groups of ``group_size`` input rows.

    ``name`` may end in ``-g<rows>`` instead. Raises ConfigError with the known names.
    """
    grouped = _GROUPED.fullmatch(name) if isinstance(name, str) else None
    if grouped is not None:
        rows = int(grouped[2])
        if group_size not in (None, rows):
            raise ConfigError(f"scheme {name!r} already names a group size; {group_size} contradicts it")
        name, group_size = grouped[1], rows
    found = scheme_name(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(f"scheme {name!r} is not known; use one of {', '.join(SCHEMES)}")
    return dataclasses.replace(SCHEMES[found], group_size=group_size, asymmetric=asymmetric)


def draft_scheme(quant: str | Scheme) -> Scheme:
    """The scheme of a draft's weights, by name or as it is. Raises ConfigError for one that is not known, and
    for static activations: nothing calibrates a draft."""
    scheme = quant if isinstance(quant, Scheme) else get_scheme(quant)
    if scheme.activation == "static":
        raise ConfigError(
            f"a draft's weights cannot be quantised as {scheme.label}, whose activations are calibrated; use "
            f"one of {', '.join(name for name, s in SCHEMES.items() if s.activation != 'static')}"
        )
    return scheme


INNER = ".inner"
"""End of the path of a weight that stands inside a wrapper, one that transforms its input first."""

DEFAULT_EXCLUDE = ("embed", "head", "*.router", "mtp", "mtp.*", "*.mtp.*")
"""Parameter paths that stay float unless a plan says otherwise: tables that are read by row, the head, whose
errors reach the logits undamped, routers, whose errors change which experts speak, and multi-token-prediction
layers."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which scheme each weight gets; hashable.

    ``exclude``: globs of parameter paths (``checkpoint.tables.leaf_paths``: ``layers.3.gate``, ``head``;
    ``*`` crosses dots) that keep their float weights. ``overrides``: (glob, scheme) pairs, the first that
    matches wins over ``scheme`` but not over ``exclude``. ``search``: how weight scales are found.
    ``smooth``: strength alpha in [0, 1] with which outlier channels of the input are moved into the weight
    before that, None for not at all. ``keep``: blocks of a GGUF file stay as they are
    (see ``checkpoint.gguf.packed``). Raises ConfigError for settings that cannot be.
    """

    scheme: Scheme
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE
    overrides: tuple[tuple[str, Scheme], ...] = ()
    search: Search = "minmax"
    smooth: float | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.exclude, tuple) or not all(isinstance(glob, str) for glob in self.exclude):
            raise ConfigError(f"exclude is {self.exclude!r}; give a tuple of globs")
        if self.search not in ("minmax", "mse"):
            raise ConfigError(f"search is {self.search!r}; it is 'minmax' or 'mse'")
        if self.smooth is not None and not 0 <= self.smooth <= 1:
            raise ConfigError(f"smooth is {self.smooth!r}; it is a strength of 0 to 1, or None")
        if not isinstance(self.overrides, tuple):
            raise ConfigError(f"overrides is {self.overrides!r}; give a tuple of pairs")
        for entry in self.overrides:
            if len(entry) != 2 or not isinstance(entry[0], str) or not isinstance(entry[1], Scheme):
                raise ConfigError(f"overrides holds {entry!r}; give pairs of a glob and a Scheme")

    @property
    def label(self) -> str:
        """What ``Target.quantization`` says: the scheme's label, after what else is at work."""
        parts = ["keep"] if self.keep else []
        parts.append(self.scheme.label)
        if self.overrides:
            parts.append("mixed")
        if self.smooth is not None:
            parts.append("smooth")
        return "+".join(parts)

    @property
    def needs_statistics(self) -> bool:
        """Whether quantising takes calibration statistics."""
        schemes = (self.scheme, *(scheme for _, scheme in self.overrides))
        return self.smooth is not None or any(s.activation == "static" for s in schemes)

    def scheme_of(self, path: str) -> Scheme | None:
        """The scheme of the parameter at ``path``, None when it stays float."""
        if matches(path, self.exclude):
            return None
        return next((s for glob, s in self.overrides if matches(path, (glob,))), self.scheme)

    def check_globs(self, paths: Iterable[str]) -> None:
        """Refuse globs of the user's that no path of the model matches: they would change nothing.

        Raises ConfigError naming them.
        """
        known = list(paths)
        given = [glob for glob in self.exclude if glob not in DEFAULT_EXCLUDE]
        given += [glob for glob, _ in self.overrides]
        idle = [glob for glob in given if not any(matches(path, (glob,)) for path in known)]
        if idle:
            raise ConfigError(
                f"no weight of the model matches {', '.join(map(repr, idle))}; its weights have paths such "
                f"as {', '.join(path.removesuffix(INNER) for path in known[:4])}"
            )


def matches(path: str, globs: Iterable[str]) -> bool:
    """Whether one of the globs matches; ``*`` crosses dots, and case counts. A weight inside a wrapper goes
    by the path of the wrapper: ``*.down`` means it whether or not its input is turned."""
    return any(fnmatch.fnmatchcase(path.removesuffix(INNER), glob) for glob in globs)


KEEP = {"keep": "w8a16", "keep-a8": "w8a8"}
"""Names for keeping a GGUF file's blocks, with the scheme of what cannot be kept."""


def as_plan(quant: Any) -> Plan:
    """A plan from what a user writes: a Plan, a Scheme, a scheme's name, or a name of ``KEEP``.

    Raises ConfigError for anything else.
    """
    if isinstance(quant, Plan):
        return quant
    if isinstance(quant, Scheme):
        return Plan(quant)
    if not isinstance(quant, str):
        raise ConfigError(f"quant is {quant!r}; give the name of a scheme, a Scheme or a Plan")
    kept = known_name(quant, KEEP)
    if kept is not None:
        return Plan(get_scheme(KEEP[kept]), keep=True)
    grouped = _GROUPED.fullmatch(quant)
    if scheme_name(grouped[1] if grouped else quant) is None:
        raise ConfigError(f"quant {quant!r} is not known; use one of {', '.join((*SCHEMES, *KEEP))}")
    return Plan(get_scheme(quant))
