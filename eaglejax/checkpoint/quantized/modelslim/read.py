"""Reading msModelSlim's layout: its description checked against the files, and its matrices decoded."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.checkpoint.basis_file import named_rotation
from eaglejax.checkpoint.quantized.modelslim.layout import (
    FLOAT,
    KV,
    KV_TYPES,
    SECOND,
    SETTINGS,
    SYMMETRIC,
    TYPES,
    UNREAD,
    VERSION,
    quant_bias,
    scale_bias,
    splits,
    unpack_channels,
)
from eaglejax.checkpoint.quantized.parts import Encoded, Kind, Part, Store, checked_scale, require
from eaglejax.naming import known_name
from eaglejax.nn.cache import CacheScales

BIAS = "bias"


@dataclasses.dataclass(frozen=True)
class Description:
    """A checked description: type of every tensor by plain name, and the settings beside them."""

    types: Mapping[str, str]
    settings: Mapping[str, Any]
    where: str

    def is_symmetric(self, module: str) -> bool:
        """Whether the static inputs of a module are said to have no offset."""
        metadata = self.settings.get("metadata")
        listed = metadata.get(SYMMETRIC, ()) if isinstance(metadata, Mapping) else ()
        return isinstance(listed, list) and module in listed

    @property
    def cache_names(self) -> tuple[str, ...]:
        """Tensors that belong to an int8 cache."""
        return tuple(sorted(name for name, label in self.types.items() if label in KV_TYPES))

    @property
    def group_size(self) -> int:
        return int(self.settings.get("group_size") or 0)

    @property
    def exported(self) -> bool:
        """Whether a rotation was exported."""
        return named_rotation(self.settings) is not None

    @property
    def rotated(self) -> bool:
        """Whether the weights are said to be rotated, with or without an export of the matrix."""
        metadata = self.settings.get("metadata")
        quarot = isinstance(metadata, Mapping) and "quarot" in metadata
        return bool(self.settings.get("is_rot_used")) or self.exported or quarot


def parse_description(raw: Mapping[str, Any], where: str, plain: Callable[[str], str]) -> Description:
    """Check a description. ``plain`` maps a tensor's name to that of ``*ForCausalLM``.

    Raises ``CheckpointError`` naming settings and types that are not understood.
    """
    types: dict[str, str] = {}
    for key, value in raw.items():
        if key in UNREAD or key.endswith(".quant_type"):
            require(not value, f"{where}: {key} = {value!r} asks for arithmetic that is not supported")
        elif key not in SETTINGS:
            label = _type_name(value, key, raw)
            require(
                label is not None,
                f"{where} gives {key!r} the type {value!r:.80}, which is not read; known are "
                f"{', '.join((FLOAT, *TYPES, *KV_TYPES))}",
            )
            assert label is not None
            require(plain(key) not in types, f"{where} describes {plain(key)!r} twice")
            types[plain(key)] = label
    size = raw.get("group_size", 0)
    require(
        size is None or (isinstance(size, int) and not isinstance(size, bool) and size >= 0),
        f"{where}: group_size is {size!r}; it must be a whole number, 0 for none",
    )
    for key in ("kv_quant_type", "kv_cache_type"):
        require(
            not raw.get(key) or (isinstance(raw[key], str) and known_name(raw[key], KV_TYPES)),
            f"{where}: {key} is {raw.get(key)!r}; it can be {' or '.join(KV_TYPES)}",
        )
    return Description(types, {key: raw[key] for key in SETTINGS if key in raw}, where)


def _type_name(value: Any, key: str, raw: Mapping[str, Any]) -> str | None:
    """The type that ``value`` means, however it is spelt; None for one that is not known.

    ``W8A8-Linear`` leaves open whether activations have a calibrated scale: the tensors beside it tell.
    """
    if not isinstance(value, str):
        return None
    found = known_name(re.sub(r"(?i)[-_ ]?linear$", "", value), (FLOAT, *TYPES, *KV_TYPES))
    if found == "W8A8" and known_name(value, (found,)) is None:
        static = f"{key.rpartition('.')[0]}.deq_scale" in raw
        return "W8A8" if static else "W8A8_DYNAMIC"
    return found


def check_complete(description: Description, store: Store, ignorable: tuple[str, ...]) -> None:
    """Refuse a description and files that do not name the same tensors."""
    present = set(store.names())
    absent = sorted(set(description.types) - present)
    require(
        not absent,
        f"{description.where} describes {len(absent)} tensors that no file of the folder holds: "
        f"{', '.join(absent[:6])}; the shards are incomplete or the description belongs to other weights",
    )
    extra = sorted(
        n for n in present - set(description.types) if not any(re.fullmatch(p, n) for p in ignorable)
    )
    online = [n for n in extra if "_rotation" in n]
    require(
        not online,
        f"{description.where}: {', '.join(online[:3])} belong to a rotation that is applied while the model "
        "runs, in a form that is not read; quantise without online rotations",
    )
    require(
        not extra,
        f"{description.where} says nothing of {len(extra)} tensors that the files hold: "
        f"{', '.join(extra[:6])}; the description is truncated",
    )


def find(description: Description, store: Store) -> dict[str, Encoded]:
    """Every quantised matrix by module name. Shapes and dtypes are checked; no values are read.

    Raises ``CheckpointError`` naming the tensor that is missing, of the wrong shape or of the wrong type.
    """
    modules: dict[str, dict[str, str]] = {}
    for name, label in description.types.items():
        if label in TYPES:
            module, _, suffix = name.rpartition(".")
            modules.setdefault(module, {})[suffix] = label
    return {module: _module(module, found, description, store) for module, found in modules.items()}


def _module(module: str, found: Mapping[str, str], description: Description, store: Store) -> Encoded:
    labels = set(found.values())
    require(len(labels) == 1, f"{description.where} gives {module} several types: {sorted(labels)}")
    label = labels.pop()
    type_ = TYPES[label]
    # Some versions of the tool give the bias the type of its matrix; it is kept in full all the same.
    found = {suffix: label for suffix in found if suffix != BIAS}
    missing = [s for s in type_.required if s not in found]
    require(
        not missing,
        f"{description.where} calls {module} {label}, which needs the tensors "
        f"{', '.join(type_.required)}; {', '.join(missing)} is not described",
    )
    half = [s for s in SECOND if s in found]
    require(
        len(half) in (0, len(SECOND)),
        f"{description.where} describes {module}.{', '.join(half)} alone; {' and '.join(SECOND)} go together",
    )
    unknown = [s for s in found if s not in (*type_.required, *type_.optional)]
    require(
        not unknown, f"{description.where} calls {module}.{unknown[:1]} {label}, which has no such tensor"
    )

    def check(suffix: str, shape: tuple[int, ...], *dtypes: str) -> None:
        name = f"{module}.{suffix}"
        got, dtype = store.shape(name), store.dtype(name).name
        require(got == shape, f"tensor {name!r} has shape {got}; {label} of {module} asks for {shape}")
        require(dtype in dtypes, f"tensor {name!r} is {dtype}; {label} keeps it as {' or '.join(dtypes)}")

    floats = ("float32", "float16", "bfloat16")
    packed = type_.bits == 4 and description.settings.get("version") == VERSION
    weight = store.shape(f"{module}.weight")
    require(len(weight) == 2, f"tensor '{module}.weight' has shape {weight}; a matrix has two dimensions")
    out, width = weight[0] * (2 if packed else 1), weight[1]
    check("weight", (out // 2 if packed else out, width), "int8")
    groups = 1
    if label == "W8A8":
        check("quant_bias", (out,), "int32")
        check("deq_scale", (out,), "float32", "int64")
        check("input_scale", (1,), *floats)
        check("input_offset", (1,), *floats, "int8")
    scales = "weight_scale_second" if "weight_scale_second" in found else "weight_scale"
    if scales in found:
        stored = store.shape(f"{module}.{scales}")
        groups = stored[1] if len(stored) == 2 and stored[0] == out else 0
        size = description.group_size
        fits = groups == 1 or (label != "W8A8" and groups > 1 and size > 0 and groups * size == width)
        require(
            fits,
            f"tensor '{module}.{scales}' has shape {stored}; {label} of a [{out}, {width}] matrix asks for "
            f"({out}, 1)" + (f" or, in groups of {size}, ({out}, {width / size:g})" if size else ""),
        )
        for suffix in ("weight_scale", "weight_offset"):
            first = 1 if scales == "weight_scale_second" else groups
            check(suffix, (out, first), *floats)
    if scales == "weight_scale_second":
        for suffix in SECOND:
            check(suffix, (out, groups), *floats)
    if "scale_bias" in found:
        split = splits(module)
        check("scale_bias", (out, split), *floats)
    require(
        not packed or label != "W4A8_DYNAMIC" or "scale_bias" in found,
        f"{description.where} calls {module} {label} of version {VERSION}, which needs scale_bias",
    )
    # One group is a scale a channel too; that the group size is the width tells them apart.
    grouped = groups > 1 or (label != "W8A8" and description.group_size == width)
    asymmetric = type_.activation == "static" and not description.is_symmetric(module)
    kind = Kind(type_.bits, type_.activation, width // groups if grouped else None, asymmetric)
    suffixes = tuple(found)
    decode = functools.partial(_decode, store, module, label, suffixes, kind, packed)
    return Encoded(kind, (out, width), tuple(f"{module}.{s}" for s in suffixes), decode)


def _decode(
    store: Store, module: str, label: str, suffixes: tuple[str, ...], kind: Kind, packed: bool
) -> Part:
    def array(suffix: str) -> np.ndarray:
        return store.array(f"{module}.{suffix}")

    values = unpack_channels(array("weight")) if packed else array("weight")
    if kind.bits == 4 and not packed:
        require(
            np.all(np.abs(values.astype(np.int16) * 2 + 1) <= 15),
            f"tensor '{module}.weight' holds values outside [-8, 7] although its type is {label}",
        )
    for suffix in ("weight_offset", "weight_offset_second"):
        require(
            suffix not in suffixes or not np.any(array(suffix)),
            f"tensor '{module}.{suffix}' is not zero: weights with an offset are not read; quantise "
            "symmetrically",
        )
    if label == "W8A8":
        return _decode_static(store, module, kind, values, "weight_scale" in suffixes)
    scale = checked_scale(array("weight_scale"), f"{module}.weight_scale")
    if "weight_scale_second" in suffixes:
        scale = scale * checked_scale(array("weight_scale_second"), f"{module}.weight_scale_second")
    part = Part(kind, values, scale)
    if "scale_bias" in suffixes:
        told, right = array("scale_bias").astype(np.float32), scale_bias(part, module)
        size = 8 * np.abs(part.values.astype(np.float32)).sum(1, keepdims=True) * scale.max(1, keepdims=True)
        require(
            np.all(np.abs(told - right) <= 1e-2 * size + 1e-6),
            f"tensor '{module}.scale_bias' is not 8 times the sums of the weights: it belongs to other ones",
        )
    return part


def _decode_static(store: Store, module: str, kind: Kind, values: np.ndarray, has_scale: bool) -> Part:
    deq = store.array(f"{module}.deq_scale")
    if deq.dtype == np.int64:
        require(
            np.all((deq >= 0) & (deq < 2**31)),
            f"tensor '{module}.deq_scale' holds 64-bit numbers that are no float32 bit patterns",
        )
        deq = deq.astype(np.int32).view(np.float32)
    deq = checked_scale(deq, f"{module}.deq_scale")
    input_scale = np.float32(store.array(f"{module}.input_scale")[0])
    input_offset = np.float32(store.array(f"{module}.input_offset")[0])
    require(
        np.isfinite(input_scale) and input_scale > 0 and np.isfinite(input_offset),
        f"tensor '{module}.input_scale' is {input_scale} (offset {input_offset}); it must be above 0",
    )
    scale = deq / input_scale
    if has_scale:
        told = checked_scale(store.array(f"{module}.weight_scale"), f"{module}.weight_scale")[:, 0]
        require(
            np.all(np.abs(told - scale) <= 1e-2 * scale),
            f"tensor '{module}.deq_scale' is not input_scale times weight_scale",
        )
        scale = told
    require(
        kind.asymmetric or input_offset == 0,
        f"tensor '{module}.input_offset' is {input_offset}, but the description calls the inputs symmetric",
    )
    part = Part(kind, values, scale[:, None], input_scale, input_offset if kind.asymmetric else None)
    bias_name = f"{module}.{BIAS}"
    bias = store.array(bias_name).astype(np.float32) if bias_name in store.names() else None
    told, right = store.array(f"{module}.quant_bias"), quant_bias(part, bias)
    size = 0 if bias is None else np.abs(bias.astype(np.float64) / np.maximum(deq, 1e-30))
    require(
        np.all(np.abs(told.astype(np.float64) - right) <= 2 + 1e-2 * size),
        f"tensor '{module}.quant_bias' does not follow from the weights, the input offset and "
        + ("the bias" if bias is not None else "no bias; the file leaves the bias out"),
    )
    return part


def cache_scales(
    description: Description, store: Store, layers: int, heads: int, head_dim: int
) -> CacheScales | None:
    """Scales of an int8 key and value cache, None where the description has none.

    Raises ``CheckpointError`` for scales of another number or size than the model's and for offsets.
    """
    names = set(description.cache_names)
    if not names:
        return None
    right = {
        f"model.layers.{i}.self_attn.{side}_proj.{suffix}"
        for i in range(layers)
        for side in "kv"
        for suffix in KV
    }
    odd = sorted(names ^ right)
    require(
        not odd,
        f"{description.where}: cache scales are kept for every layer's keys and values alone; look "
        f"at {', '.join(odd[:4])}",
    )
    for name in sorted(names):
        require(
            math.prod(store.shape(name)) == heads * head_dim,
            f"tensor {name!r} has shape {store.shape(name)}; {heads} heads of {head_dim} ask for "
            f"({heads * head_dim},)",
        )
        if name.endswith("_offset"):
            require(
                not np.any(store.array(name)),
                f"tensor {name!r} is not zero: caches with an offset are not read",
            )

    def side(letter: str) -> tuple[jax.Array, ...]:
        at = [f"model.layers.{i}.self_attn.{letter}_proj.kv_cache_scale" for i in range(layers)]
        return tuple(jnp.asarray(checked_scale(store.array(n), n).reshape(heads, head_dim)) for n in at)

    return CacheScales(k=side("k"), v=side("v"))
