"""The layout of compressed-tensors (llm-compressor): ``quantization_config`` in config.json, shards.

``int-quantized`` keeps ``weight`` int8 [O, I] and ``weight_scale``; ``pack-quantized`` has ``weight_packed``
int32 [O, I * bits / 32] of unsigned values offset by half their range, lowest bits first, beside
``weight_scale`` and ``weight_shape``. Which modules are quantised follows from targets and an ignore list.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from eaglejax.checkpoint.quantized.parts import Encoded, Kind, Part, Store, checked_scale, pending, require
from eaglejax.checkpoint.safetensors_io import Pending
from eaglejax.errors import CheckpointError, ConfigError

METHOD = "compressed-tensors"
INT, PACKED = "int-quantized", "pack-quantized"
_FORMATS = {INT: INT, PACKED: PACKED, "naive-quantized": INT}
"""Formats by the names that the tool has given them."""

_SUFFIXES = (
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "input_scale",
    "input_zero_point",
)
_STATUS = ("initialized", "calibration", "frozen", "compressed")
"""How far the tool was when it saved, which says nothing of the files: their tensors tell what they hold."""

_FLOATS = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Group:
    """One entry of ``config_groups``: targets, kind and file format of their matrices."""

    name: str
    targets: tuple[str, ...]
    kind: Kind
    format: str

    def covers(self, module: str) -> bool:
        return any(_matches(target, module) for target in self.targets)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A checked ``quantization_config``."""

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    where: str

    def group_of(self, module: str) -> Group | None:
        if any(_matches(pattern, module) for pattern in self.ignore):
            return None
        return next((group for group in self.groups if group.covers(module)), None)


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
        status is None or status in _STATUS,
        f"{where}: quantization_status is {status!r:.80}; it can be {', '.join(_STATUS)}",
    )
    groups = raw.get("config_groups")
    require(isinstance(groups, Mapping) and groups, f"{where}: quantization_config has no config_groups")
    for key, part in (("kv_cache_scheme", None), ("sparsity_config", "format"), ("transform_config", None)):
        value = raw.get(key)
        # The writer names the sparsity of every model, also of those that have none.
        none = not value or (isinstance(value, Mapping) and part is not None and value.get(part) == "dense")
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
                re.compile(pattern[3:])
            except re.error as error:
                raise CheckpointError(
                    f"{where}: {pattern!r:.80} is no regular expression: {error}"
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
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    require(
        weights.get("type") == "int" and bits in (4, 8) and weights.get("symmetric", True) is True,
        f"{at}.weights: {bits} bits of type {weights.get('type')!r}, symmetric "
        f"{weights.get('symmetric', True)}; symmetric int of 4 or 8 bits is read",
    )
    require(
        strategy in ("channel", "group"), f"{at}.weights: strategy {strategy!r}; channel and group are read"
    )
    require(not weights.get("actorder"), f"{at}.weights: actorder {weights.get('actorder')!r} is not read")
    size = weights.get("group_size")
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
    require(
        isinstance(form, str) and form in _FORMATS,
        f"{at}: format {form!r:.80} is not read; {INT} and {PACKED} are",
    )
    kind = Kind(bits, activation, size if strategy == "group" else None, offset)
    return Group(name, tuple(targets), kind, _FORMATS[form])


def _activation(raw: Any, at: str) -> tuple[str | None, bool]:
    """(kind of activations, whether they have a zero point)."""
    if raw is None:
        return None, False
    require(
        isinstance(raw, Mapping) and raw.get("num_bits") == 8 and raw.get("type") == "int",
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


def find(
    scheme: Scheme, store: Store, matrices: Collection[str], ignorable: Sequence[str] = ()
) -> dict[str, Encoded]:
    """Every quantised matrix by module name. ``matrices``: modules of the model that hold one; ``ignorable``:
    expressions for tensors of other towers, which are not read, quantised or not.

    Raises ``CheckpointError`` for a matrix that is described but not quantised in the files, or the reverse.
    """
    present = set(store.names())
    modules = {"lm_head", *matrices, *_modules(present)}
    unknown = [
        entry
        for entry in scheme.ignore
        # Names of classes (Linear, Embedding) begin with a capital, those of modules do not.
        if not entry.startswith("re:")
        and not entry[:1].isupper()
        and entry not in modules
        and not any(re.fullmatch(pattern, f"{entry}.weight") for pattern in ignorable)
    ]
    require(not unknown, f"{scheme.where} ignores {', '.join(unknown[:4])}, which the model does not have")
    encoded = {}
    for module in matrices:
        group = scheme.group_of(module)
        stray = [s for s in _SUFFIXES if f"{module}.{s}" in present]
        if group is None:
            require(
                not stray,
                f"{scheme.where} leaves {module} unquantised, but the files hold {module}.{stray[:1]}",
            )
        elif module == "lm_head" and "lm_head.weight" not in present and not stray:
            continue  # a tied head is no matrix of its own
        else:
            encoded[module] = _module(module, group, store, present)
    return encoded


def _modules(names: Collection[str]) -> set[str]:
    """Every module, leaf or not, that the tensors' names speak of: all of ``model.layers.0.mlp``'s parts."""
    found = set()
    for name in names:
        parts = name.split(".")
        found.update(".".join(parts[:i]) for i in range(1, len(parts)))
    return found


def _module(module: str, group: Group, store: Store, present: Collection[str]) -> Encoded:
    kind = group.kind
    packed = group.format == PACKED
    needed = ["weight_packed", "weight_scale", "weight_shape"] if packed else ["weight", "weight_scale"]
    needed += ["input_scale"] if kind.activation == "static" else []
    needed += ["input_zero_point"] if group.kind.asymmetric else []
    absent = [s for s in needed if f"{module}.{s}" not in present]
    require(
        not absent,
        f"config_groups.{group.name} quantises {module}, but the files lack {module}.{', '.join(absent)}",
    )
    extra = [s for s in ("weight", *_SUFFIXES) if s not in needed and f"{module}.{s}" in present]
    require(
        not extra,
        f"tensor '{module}.{', '.join(extra)}' has no place in {group.format} weights of config_groups."
        f"{group.name}",
    )

    def check(suffix: str, shapes: Sequence[tuple[int, ...]], *dtypes: str) -> None:
        name = f"{module}.{suffix}"
        got, dtype = store.shape(name), store.dtype(name).name
        require(got in shapes, f"tensor {name!r} has shape {got}; it should be {shapes[0]}")
        require(dtype in dtypes, f"tensor {name!r} is {dtype}; it should be {' or '.join(dtypes)}")

    if packed:
        check("weight_shape", [(2,)], "int64", "int32")
        out, width = (int(n) for n in store.array(f"{module}.weight_shape"))
        require(0 < out < 2**31 and 0 < width < 2**31, f"tensor '{module}.weight_shape' is {out}, {width}")
        check("weight_packed", [(out, -(-width * kind.bits // 32))], "int32")
    else:
        weight = store.shape(f"{module}.weight")
        require(len(weight) == 2, f"tensor '{module}.weight' has shape {weight}, a matrix has two dimensions")
        out, width = weight
        check("weight", [(out, width)], "int8")
    require(
        not kind.group or width % kind.group == 0,
        f"{module} has {width} inputs, which groups of {kind.group} do not divide",
    )
    groups = width // kind.group if kind.group else 1
    check("weight_scale", [(out, groups)], *_FLOATS)
    if kind.activation == "static":
        check("input_scale", [(1,), ()], *_FLOATS)
    if group.kind.asymmetric:
        check("input_zero_point", [(1,), ()], "int8")
    decode = functools.partial(_decode, store, module, kind, (out, width), packed)
    return Encoded(kind, (out, width), tuple(f"{module}.{s}" for s in needed), decode)


def _decode(store: Store, module: str, kind: Kind, shape: tuple[int, int], packed: bool) -> Part:
    if packed:
        values = unpack_words(store.array(f"{module}.weight_packed"), kind.bits, shape[1])
    else:
        values = store.array(f"{module}.weight")
        require(
            kind.bits == 8 or np.all((values >= -8) & (values <= 7)),
            f"tensor '{module}.weight' holds values outside [-8, 7] although its weights have 4 bits",
        )
    scale = checked_scale(store.array(f"{module}.weight_scale"), f"{module}.weight_scale")
    if kind.activation != "static":
        return Part(kind, values, scale)
    input_scale = np.float32(store.array(f"{module}.input_scale").reshape(()))
    require(
        np.isfinite(input_scale) and input_scale > 0,
        f"tensor '{module}.input_scale' is {input_scale}; it must be above 0",
    )
    if not kind.asymmetric:
        return Part(kind, values, scale, input_scale)
    zero = np.float32(store.array(f"{module}.input_zero_point").reshape(()))
    return Part(kind, values, scale, input_scale, zero)


def pack_words(values: np.ndarray, bits: int) -> np.ndarray:
    """int8 [O, I] as int32 [O, ceil(I * bits / 32)]: values raised by half their range, lowest bits first."""
    per = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % per)))
    raised = (padded.astype(np.int32) + (1 << (bits - 1))).astype(np.uint32).reshape(len(values), -1, per)
    if raised.shape[1] * per != values.shape[1]:
        raised.reshape(len(values), -1)[:, values.shape[1] :] = 0
    shifts = np.arange(per, dtype=np.uint32) * np.uint32(bits)
    return np.bitwise_or.reduce(raised << shifts, axis=2).view(np.int32)


def unpack_words(packed: np.ndarray, bits: int, width: int) -> np.ndarray:
    """Inverse of ``pack_words``: int8 [O, ``width``]."""
    per = 32 // bits
    words = packed.view(np.uint32)[..., None]
    shifts = np.arange(per, dtype=np.uint32) * np.uint32(bits)
    raised = (words >> shifts) & np.uint32((1 << bits) - 1)
    return (raised.astype(np.int16) - (1 << (bits - 1))).astype(np.int8).reshape(len(packed), -1)[:, :width]


def _format(kind: Kind) -> str:
    return PACKED if kind.activation is None else INT


def encode(module: str, kind: Kind, shape: tuple[int, int], load: Callable[[], Part]) -> dict[str, Pending]:
    """The tensors of a matrix by name; ``load`` makes the part when its turn comes.

    Raises ``ConfigError`` for what the layout cannot hold.
    """
    out, width = shape
    groups = width // kind.group if kind.group else 1
    scale = Pending((out, groups), np.dtype(np.float32), lambda: load().scale)
    if _format(kind) == PACKED:
        words = -(-width * kind.bits // 32)
        tensors = {
            "weight_packed": Pending(
                (out, words), np.dtype(np.int32), lambda: pack_words(load().values, kind.bits)
            ),
            "weight_scale": scale,
            "weight_shape": pending(np.array(shape, np.int64)),
        }
    else:
        tensors = {
            "weight": Pending(shape, np.dtype(np.int8), lambda: load().values),
            "weight_scale": scale,
        }
    if kind.activation == "static":
        part = load()
        tensors["input_scale"] = pending(np.array([part.input_scale], np.float32))
        if part.input_offset is not None:
            if part.input_offset != np.round(part.input_offset) or not -128 <= part.input_offset <= 127:
                raise ConfigError(
                    f"{module} has the input offset {part.input_offset}; the {METHOD} form keeps whole "
                    "numbers of 8 bits"
                )
            tensors["input_zero_point"] = pending(np.array([part.input_offset]).astype(np.int8))
    return {f"{module}.{suffix}": value for suffix, value in tensors.items()}


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
            "format": _format(kind),
        }
    formats = {_format(kind) for kind in by_kind}
    return {
        "quant_method": METHOD,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(plain),
        "kv_cache_scheme": None,
    }
