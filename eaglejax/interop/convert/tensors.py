"""jax arrays as torch tensors and back, singly and as trees: weights, packed weights, caches.

Where both sides can address the memory (the host, one CUDA GPU) they share it through dlpack and nothing is
copied. torch gives PrivateUse1 devices (npu, musa) a dlpack type that jax does not import, so those are
staged through the host. bool and float8 cross as bytes, because dlpack or one of its ends lacks them; jax's
int4 arrays cross packed, two rows a byte, the form in which weights are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.errors import ConfigError
from eaglejax.interop.backends.arrays import (
    PackedTensor,
    TurnedTensor,
    dtype_name,
    pack_int4,
    torch_device,
    torch_dtype,
    unpack_int4,
)
from eaglejax.interop.backends.torch_import import torch
from eaglejax.interop.models.decoder import Cache
from eaglejax.nn import cache as caches
from eaglejax.nn.kv import KV
from eaglejax.nn.linear import PackedWeight
from eaglejax.quant.array import QuantArray
from eaglejax.quant.online import HadamardInput

_BYTES = ("bool", "float8_e4m3fn", "float8_e5m2")


def to_torch(x: jax.Array, device: str | torch.device = "cpu", *, copy: bool = False) -> torch.Tensor:
    """``x`` on ``device``. int4 [..., K, N] becomes int8 [..., K / 2, N], two rows a byte.

    The tensor shares the array's memory where it can: do not write to it, or ask for a ``copy``. Raises
    ConfigError for a dtype, or a device, that does not cross.
    """
    device = torch_device(device)
    name = x.dtype.name
    if name == "int4":
        return pack_int4(to_torch(x.astype(jnp.int8))).to(device)
    dtype = torch_dtype(name)
    if name in _BYTES:
        x = jax.lax.bitcast_convert_type(x, jnp.uint8) if name != "bool" else x.astype(jnp.uint8)
    if not _shares(x, device):
        x = jax.device_put(x, jax.devices("cpu")[0])
    tensor = torch.from_dlpack(x)
    tensor = tensor.bool() if name == "bool" else tensor.view(dtype) if name in _BYTES else tensor
    shared = tensor.device == device
    return tensor.clone() if copy and shared else tensor.to(device)


def _shares(x: jax.Array, device: torch.device) -> bool:
    """Whether torch can read the array where it is."""
    (platform,) = {d.platform for d in x.devices()}
    if len(x.devices()) != 1:
        return False
    return platform == "cpu" or (platform in ("gpu", "cuda", "rocm") and device.type == "cuda")


def to_jax(tensor: torch.Tensor, dtype: Any = None) -> jax.Array:
    """A jax array of ``tensor``'s numbers (a copy), on the host for npu and musa tensors.

    ``dtype`` "int4" unpacks int8 [..., K / 2, N] to int4 [..., K, N]; otherwise the array has the tensor's
    dtype. Raises ConfigError for one that does not cross.
    """
    tensor = tensor.detach()
    if dtype is not None and jnp.dtype(dtype).name == "int4":
        return to_jax(unpack_int4(tensor)).astype(jnp.int4)
    name = dtype_name(tensor.dtype)
    if tensor.device.type not in ("cpu", "cuda"):
        tensor = tensor.cpu()
    tensor = tensor.contiguous()
    if name in _BYTES:
        raw = jnp.from_dlpack(tensor.view(torch.uint8))
        return raw.astype(bool) if name == "bool" else jax.lax.bitcast_convert_type(raw, jnp.dtype(name))
    # A copy: jax's arrays do not change, whatever torch then writes.
    return jnp.array(jnp.from_dlpack(tensor), copy=True)


def tree_to_torch(tree: Any, device: str | torch.device = "cpu") -> Any:
    """A tree of parameters: nested dicts, lists and tuples of arrays and packed weights; None stays."""
    if isinstance(tree, dict):
        return {key: tree_to_torch(value, device) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(tree_to_torch(value, device) for value in tree)
    if tree is None:
        return None
    if isinstance(tree, jax.Array | np.ndarray):
        return to_torch(jnp.asarray(tree), device)
    return _packed(tree, device)


def _packed(weight: Any, device: str | torch.device) -> PackedTensor | TurnedTensor:
    if isinstance(weight, HadamardInput):
        return TurnedTensor(
            tree_to_torch(weight.inner, device), hadamard_base(weight.shape[-2]).to(torch_device(device))
        )
    if not isinstance(weight, QuantArray):
        kind = "packed weight" if isinstance(weight, PackedWeight) else "leaf"
        raise ConfigError(f"a {kind} of type {type(weight).__name__} has no torch counterpart")
    names = ("values", "scale", "input_scale", "input_offset", "smooth", "offset_sums")
    tensors = {name: tree_to_torch(getattr(weight, name), device) for name in names}
    return PackedTensor(
        bits=weight.bits,
        activation=weight.activation,
        transposed=weight.transposed,
        dtype=torch_dtype(np.dtype(weight.dtype).name),
        **tensors,
    )


def hadamard_base(size: int) -> torch.Tensor:
    """The base matrix [m, m] f32 of the Hadamard matrix of order ``size`` = m * 2^k; see
    ``layers.hadamard``."""
    # Importing Pallas takes a third of a second, which those who do not rotate are spared.
    from kernels_pallas.hadamard import factor, hadamard_matrix

    base, _ = factor(size)
    return torch.from_numpy(hadamard_matrix(base).astype(np.float32))


def cache_to_torch(cache: caches.Cache, device: str | torch.device = "cpu") -> Cache:
    """A copy of ``cache``, which the torch side may write; narrow formats are refused (ConfigError)."""

    def sides(stored: Sequence[Any]) -> list[torch.Tensor]:
        for x in stored:
            if not isinstance(x, jax.Array):
                raise ConfigError(f"a cache of {type(x).__name__} does not cross to torch; use a float one")
        return [to_torch(x, device, copy=True) for x in stored]

    for layer in cache.layers:
        if not isinstance(layer, KV):
            raise ConfigError(f"a layer's {type(layer).__name__} does not cross to torch; keys and values do")
    keys, values = ([getattr(layer, side) for layer in cache.layers] for side in ("k", "v"))
    return Cache(sides(keys), sides(values), to_torch(cache.lengths, device, copy=True))


def cache_to_jax(cache: Cache) -> caches.Cache:
    """A copy of ``cache``."""
    return caches.Cache(
        layers=tuple(KV(to_jax(k), to_jax(v)) for k, v in zip(cache.k, cache.v, strict=True)),
        lengths=to_jax(cache.lengths),
    )
