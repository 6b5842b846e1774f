"""The layout of msModelSlim (AscendV1): ``quant_model_description.json`` and ``quant_model_weights`` shards.

The description gives every tensor a type. A matrix of a quantised type is kept as ``weight`` int8 [O, I]
beside its scales, everything else as FLOAT. 4-bit weights pack two output channels a byte. See
docs/quantization.md for the tensors of each type.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eaglejax.checkpoint.basis_file import FILE, MATRIX
from eaglejax.checkpoint.quantized.parts import Kind, Part, pending
from eaglejax.checkpoint.safetensors_io import Pending
from eaglejax.errors import ConfigError
from eaglejax.nn.cache import CacheScales

STEM = "quant_model_weights"
VERSION = "1.0.0"
"""Version of the description whose 4-bit weights are packed and come with ``scale_bias``."""

SYMMETRIC = "symmetric_inputs"
"""Key of our own under ``metadata``: modules whose static inputs are cut to [-127, 127] and have no offset.
The layout itself has but one kind, with an offset and cut to [-128, 127]."""

FLOAT = "FLOAT"
KV_TYPES = ("C8", "KV8")
SETTINGS = (
    "model_quant_type",
    "version",
    "group_size",
    "kv_quant_type",
    "kv_cache_type",
    "metadata",
    "optional",
    "is_rot_used",
)
UNREAD = ("fa_quant_type", "reduce_quant_type", "indexer_quant_type")
"""Settings of arithmetic that the decoder does not have; a value is refused."""

_CHANNEL = ("weight", "weight_scale", "weight_offset")
_STATIC = ("weight", "quant_bias", "input_scale", "input_offset", "deq_scale")
SECOND = ("weight_scale_second", "weight_offset_second")
KV = ("kv_cache_scale", "kv_cache_offset")


@dataclasses.dataclass(frozen=True)
class _Type:
    """A type of the description: bits, activations, tensors it must and may have."""

    bits: int
    activation: str | None
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


TYPES: dict[str, _Type] = {
    "W8A8": _Type(8, "static", _STATIC, ("weight_scale", "weight_offset")),
    "W8A8_DYNAMIC": _Type(8, "dynamic", _CHANNEL),
    "W8A16": _Type(8, None, _CHANNEL),
    "W4A8_DYNAMIC": _Type(4, "dynamic", _CHANNEL, ("scale_bias", *SECOND)),
    "W4A16": _Type(4, None, _CHANNEL),
}
_PRIORITY = ("FLOAT", "W8A16", "W8A8_DYNAMIC", "W8A8", "W4A16", "W4A8_DYNAMIC")
"""Of a mixture, ``model_quant_type`` names the last of these that occurs."""

TP = 16
"""Partial sums that ``scale_bias`` keeps of matrices whose input is split between devices (o and down)."""

_SPLIT_INPUT = re.compile(r"(o_proj|down_proj|w2)$")


def splits(module: str) -> int:
    """Parts of a matrix's input whose sums ``scale_bias`` keeps."""
    return TP if _SPLIT_INPUT.search(module) else 1


def quant_bias(part: Part, bias: np.ndarray | None) -> np.ndarray:
    """int32 [O]: what a static product adds before it is scaled: the bias, less the input offset's share."""
    assert part.input_scale is not None
    deq = (part.scale[:, 0] * part.input_scale).astype(np.float64)
    correction = part.values.sum(1, dtype=np.int64) * np.float64(part.input_offset or 0)
    folded = 0 if bias is None else np.divide(bias, deq, out=np.zeros_like(deq), where=deq > 0)
    limits = np.iinfo(np.int32)
    return np.clip(np.round(folded - correction), limits.min, limits.max).astype(np.int32)


def scale_bias(part: Part, module: str) -> np.ndarray:
    """f32 [O, 1], or [O, 16] where devices split the input: 8 times the sums of the weights along it."""
    out, groups = part.scale.shape
    weights = (part.values.reshape(out, groups, -1) * part.scale[..., None]).reshape(part.values.shape)
    split = splits(module)
    return 8 * weights.reshape(out, split, -1).sum(2, dtype=np.float32)


def pack_channels(values: np.ndarray) -> np.ndarray:
    """[O, I] values of [-8, 7] as [O / 2, I] bytes, even output channels in the low nibble."""
    return ((values[0::2] & 15) | (values[1::2] << 4)).astype(np.int8)


def unpack_channels(packed: np.ndarray) -> np.ndarray:
    """Inverse of ``pack_channels``."""
    out = np.empty((2 * packed.shape[0], packed.shape[1]), np.int8)
    out[0::2], out[1::2] = (packed << 4).astype(np.int8) >> 4, packed >> 4
    return out


def label_of(kind: Kind) -> str:
    """The description's type of a kind. Raises ``ConfigError`` for one that the layout has not."""
    for label, type_ in TYPES.items():
        if (type_.bits, type_.activation) == (kind.bits, kind.activation):
            if label == "W8A8" and kind.group:
                raise ConfigError("the modelslim form has no static activations with groups of weights")
            return label
    raise ConfigError(f"the modelslim form has no {kind.scheme}")


def encode(
    module: str,
    kind: Kind,
    shape: tuple[int, int],
    load: Callable[[], Part],
    bias: Callable[[], np.ndarray] | None,
    dtype: np.dtype,
) -> dict[str, Pending]:
    """The tensors of a matrix by name. ``load`` makes the part when its turn comes; ``bias`` [O] likewise.

    ``dtype`` of the plain weights decides how ``deq_scale`` is kept. Raises ``ConfigError`` for shapes that
    the layout cannot hold.
    """
    label, (out, width) = label_of(kind), shape
    groups = width // kind.group if kind.group else 1
    if kind.bits == 4 and out % 2:
        raise ConfigError(f"{module} has {out} outputs; the modelslim form packs them in pairs")
    split = splits(module)
    if label == "W4A8_DYNAMIC" and width % split:
        raise ConfigError(
            f"{module} has {width} inputs; the modelslim form sums them in {split} equal parts; exclude it "
            "or use another form"
        )

    def f32(make: Callable[[], np.ndarray], *dims: int) -> Pending:
        return Pending(dims, np.dtype(np.float32), lambda: make().astype(np.float32))

    rows = out // 2 if kind.bits == 4 else out

    def weight() -> np.ndarray:
        return pack_channels(load().values) if kind.bits == 4 else load().values

    tensors = {
        "weight": Pending((rows, width), np.dtype(np.int8), weight),
        "weight_offset": pending(np.zeros((out, groups), np.float32)),
        "weight_scale": f32(lambda: load().scale, out, groups),
    }
    if label == "W4A8_DYNAMIC":
        tensors["scale_bias"] = f32(lambda: scale_bias(load(), module), out, split)
    if label == "W4A8_DYNAMIC" and kind.group:
        # Two levels whose product is the scale exactly: the outer one is a power of two.
        def outer() -> np.ndarray:
            largest = load().scale.max(1, keepdims=True)
            return np.exp2(np.ceil(np.log2(np.where(largest > 0, largest, 1))))

        tensors |= {
            "weight_offset": pending(np.zeros((out, 1), np.float32)),
            "weight_scale": f32(outer, out, 1),
            "weight_offset_second": pending(np.zeros((out, groups), np.float32)),
            "weight_scale_second": f32(lambda: load().scale / outer(), out, groups),
        }
    if label == "W8A8":
        wide = dtype.name == "bfloat16"

        def deq() -> np.ndarray:
            scale = load().scale[:, 0] * load().input_scale
            return scale if wide else scale.view(np.int32).astype(np.int64)

        tensors |= {
            "deq_scale": Pending((out,), np.dtype(np.float32 if wide else np.int64), deq),
            "quant_bias": Pending(
                (out,), np.dtype(np.int32), lambda: quant_bias(load(), None if bias is None else bias())
            ),
            "input_scale": f32(lambda: np.array([load().input_scale]), 1),
            "input_offset": f32(lambda: np.array([load().input_offset or 0]), 1),
        }
    return {f"{module}.{suffix}": value for suffix, value in tensors.items()}


def describe(
    types: Mapping[str, str],
    group_size: int,
    *,
    symmetric: Sequence[str],
    rotated: bool,
    exported: bool,
    kv: bool,
) -> dict[str, Any]:
    """The description of ``types`` (label by tensor name), in the order readers expect.

    ``symmetric``: modules whose static inputs have no offset. ``rotated``: the weights are;
    ``exported``: with their matrix, at the usual place. ``kv``: there are cache scales.
    """
    found = [label for label in _PRIORITY if label in types.values()]
    optional = {"quarot": {"rotation_map": {MATRIX: FILE}}} if exported else {}
    return {
        "model_quant_type": found[-1] if found else FLOAT,
        "version": VERSION,
        "group_size": group_size,
        **({"kv_quant_type": "C8", "kv_cache_type": "C8"} if kv else {}),
        **dict(sorted(types.items())),
        "metadata": {SYMMETRIC: list(symmetric)} if symmetric else {},
        "optional": optional,
        **({"is_rot_used": True} if rotated else {}),
    }


def cache_tensors(scales: CacheScales) -> dict[str, np.ndarray]:
    """The inverse of ``cache_scales``: f32 [Hkv * d] by tensor name, with offsets of zero."""
    out: dict[str, np.ndarray] = {}
    for side, arrays in (("k", scales.k), ("v", scales.v)):
        for layer, array in enumerate(arrays):
            at = f"model.layers.{layer}.self_attn.{side}_proj.kv_cache_"
            flat = np.asarray(array, np.float32).reshape(-1)
            out |= {f"{at}scale": flat, f"{at}offset": np.zeros_like(flat)}
    return out
