"""The tensors of compressed-tensors (llm-compressor).

``int-quantized`` keeps ``weight`` int8 [O, I] and ``weight_scale``; ``pack-quantized`` has ``weight_packed``
int32 [O, I * bits / 32] of unsigned values offset by half their range, lowest bits first, beside
``weight_scale`` and ``weight_shape``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence

import numpy as np

from eaglejax.checkpoint.quantized.compressed_tensors.config import (
    INT,
    METHOD,
    PACKED,
    Group,
    Scheme,
    format_of,
)
from eaglejax.checkpoint.quantized.parts import Encoded, Kind, Part, Store, checked_scale, pending, require
from eaglejax.checkpoint.safetensors_io import Pending
from eaglejax.errors import ConfigError

_SUFFIXES = (
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "input_scale",
    "input_zero_point",
)


_FLOATS = ("float32", "float16", "bfloat16")


def find(
    scheme: Scheme,
    store: Store,
    matrices: Collection[str],
    ignorable: Sequence[str] = (),
    spelt: Callable[[str], str] = str,
) -> dict[str, Encoded]:
    """Every quantised matrix by module name. ``matrices``: modules of the model that hold one; ``ignorable``:
    expressions for tensors of other towers, which are not read, quantised or not. ``spelt``: a tensor's name
    as the files have it.

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
        group = scheme.group_of(module, spelt(f"{module}.weight").removesuffix(".weight"))
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
    found = set[str]()
    for name in names:
        parts = name.split(".")
        found.update(".".join(parts[:i]) for i in range(1, len(parts)))
    return found


def _module(module: str, group: Group, store: Store, present: Collection[str]) -> Encoded:
    kind = group.kind
    packed = group.format == PACKED if group.format else f"{module}.weight_packed" in present
    form = PACKED if packed else INT
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
        f"tensor '{module}.{', '.join(extra)}' has no place in {form} weights of config_groups.{group.name}",
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


def encode(module: str, kind: Kind, shape: tuple[int, int], load: Callable[[], Part]) -> dict[str, Pending]:
    """The tensors of a matrix by name; ``load`` makes the part when its turn comes.

    Raises ``ConfigError`` for what the layout cannot hold.
    """
    out, width = shape
    groups = width // kind.group if kind.group else 1
    scale = Pending((out, groups), np.dtype(np.float32), lambda: load().scale)
    if format_of(kind) == PACKED:
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
