"""Arrays of the host as torch tensors: dtypes by name, packed weights, trees of parameters.

Works without jax and without ``ml_dtypes``: a NumPy array of bfloat16 or float8 is read through its bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from eaglejax.errors import ConfigError
from eaglejax.interop.backends.torch_import import torch

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
"""Dtypes that cross the border, by the name that NumPy and jax give them."""

_AS_BYTES = {"bfloat16": np.int16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}


def dtype_name(dtype: torch.dtype) -> str:
    """The name in ``DTYPES`` of a torch dtype; raises ConfigError for one that is not there."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ConfigError(f"{dtype} does not cross between jax and torch; these do: {', '.join(DTYPES)}")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called ``name``; raises ConfigError for one that is not in ``DTYPES``."""
    if name not in DTYPES:
        raise ConfigError(
            f"dtype {name!r} does not cross between jax and torch; these do: {', '.join(DTYPES)}"
        )
    return DTYPES[name]


def torch_device(name: str | torch.device) -> torch.device:
    """The device called ``name``; raises ConfigError for a kind that this process does not know."""
    try:
        return torch.device(name)
    except RuntimeError as error:
        hint = {"npu": "import torch_npu first", "musa": "import torch_musa first"}.get(
            str(name).split(":")[0]
        )
        raise ConfigError(
            f"torch knows no device {str(name)!r} here; {hint or 'use cpu, cuda, npu or musa'}"
        ) from error


@dataclasses.dataclass(frozen=True)
class PackedTensor:
    """A quantised [I, O] matrix (or [E, I, O] of experts), the torch twin of ``quant.array.QuantArray``.

    ``values`` int8 [..., I, O], or two 4-bit rows a byte [..., I / 2, O] (row 2r in the low nibble);
    ``scale`` f32 [..., O], or [..., G, O] for G groups of consecutive rows. ``activation``: "dynamic" (int8 a
    token), "static" (int8 by ``input_scale`` and ``input_offset``, scalars; ``offset_sums`` f32 [..., O] is
    what an offset of one adds) or None (16-bit activations). ``smooth`` f32 [I] divides the activations.
    ``transposed``: a table [O, I] whose rows are looked up, in ``dtype``.
    """

    values: torch.Tensor
    scale: torch.Tensor
    bits: int
    activation: str | None
    input_scale: torch.Tensor | None = None
    input_offset: torch.Tensor | None = None
    smooth: torch.Tensor | None = None
    offset_sums: torch.Tensor | None = None
    transposed: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ConfigError(f"packed weights of {self.bits} bits are not known; they have 4 or 8")
        if self.values.dtype != torch.int8:
            raise ConfigError(f"packed weights are int8, not {self.values.dtype}")
        if self.activation not in ("dynamic", "static", None):
            raise ConfigError(f"activations {self.activation!r} are not known: 'dynamic', 'static' or None")
        if self.activation == "static" and self.input_scale is None:
            raise ConfigError("static activations need input_scale; calibrate, or use a dynamic scheme")

    @property
    def groups(self) -> int:
        """Groups of input rows with a scale of their own."""
        return self.scale.shape[-2] if self.scale.ndim == self.values.ndim else 1

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedTensor:
        """``change`` applied to every tensor."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        changed: dict[str, Any] = {k: change(v) for k, v in fields.items() if isinstance(v, torch.Tensor)}
        return dataclasses.replace(self, **changed)

    def integers(self) -> torch.Tensor:
        """int8 [..., I, O], unpacked."""
        return unpack_int4(self.values) if self.bits == 4 else self.values


@dataclasses.dataclass(frozen=True)
class TurnedTensor:
    """A weight whose input is first multiplied by an orthonormal Hadamard matrix, the torch twin of
    ``quant.online.HadamardInput``. ``base`` [m, m] of +-1: see ``layers.hadamard``."""

    inner: Any
    base: torch.Tensor

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TurnedTensor:
        """``change`` applied to every tensor."""
        inner = self.inner.map(change) if isinstance(self.inner, PackedTensor) else change(self.inner)
        return TurnedTensor(inner, change(self.base))


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """int8 of [-8, 7] [..., K, N] as two rows a byte [..., K / 2, N]; row 2r is the low nibble.

    Raises ConfigError for an odd K.
    """
    if values.shape[-2] % 2:
        raise ConfigError(f"int4 rows are packed in pairs; {tuple(values.shape)} has {values.shape[-2]}")
    low, high = values[..., 0::2, :].to(torch.int16), values[..., 1::2, :].to(torch.int16)
    return ((low & 15) | ((high & 15) << 4)).to(torch.uint8).view(torch.int8)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`pack_int4`: int8 [..., K / 2, N] -> int8 [..., K, N]."""
    wide = packed.to(torch.int16)
    low = ((wide & 15) ^ 8) - 8
    rows = torch.stack([low, wide >> 4], dim=-2)
    return rows.reshape(*packed.shape[:-2], -1, packed.shape[-1]).to(torch.int8)


def to_tensor(array: np.ndarray | torch.Tensor, device: str | torch.device = "cpu") -> torch.Tensor:
    """A tensor of the same numbers on ``device`` (a copy; tensors are moved). Raises ConfigError."""
    device = torch_device(device)
    if isinstance(array, torch.Tensor):
        return array.to(device)
    name = array.dtype.name
    dtype = torch_dtype(name)
    if name in _AS_BYTES:
        array = array.view(_AS_BYTES[name])
        return torch.from_numpy(array.copy()).view(dtype).to(device)
    return torch.from_numpy(np.array(array, order="C")).to(device)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The numbers on the host. bfloat16 and float8, which NumPy lacks, are widened to float32 (exactly)."""
    host = tensor.detach().cpu()
    return (host.float() if dtype_name(host.dtype) in _AS_BYTES else host).numpy()


def map_tree(tree: Any, change: Callable[[Any], Any]) -> Any:
    """``change`` applied to every leaf of nested dicts, lists and tuples; None stays, packed weights are
    leaves."""
    if isinstance(tree, dict):
        return {key: map_tree(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map_tree(value, change) for value in tree)
    return None if tree is None else change(tree)


def place(tree: Any, device: str | torch.device) -> Any:
    """A tree of NumPy arrays, tensors and packed tensors as tensors on ``device``; dtypes as they are."""

    def one(leaf: Any) -> Any:
        return (
            leaf.map(lambda t: to_tensor(t, device))
            if isinstance(leaf, PackedTensor)
            else to_tensor(leaf, device)
        )

    return map_tree(tree, one)
