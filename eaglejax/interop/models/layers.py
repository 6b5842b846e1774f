"""Layers of the torch models: pure functions of tensors, with the arithmetic and the rounding of ``nn``.

A weight is a tensor [in, out], a ``PackedTensor`` or a ``TurnedTensor``. Matrix products go through the
adapter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.interop.backends.adapter import DeviceAdapter
from eaglejax.interop.backends.arrays import PackedTensor, TurnedTensor, unpack_int4
from eaglejax.interop.backends.torch_import import torch
from eaglejax.interop.models.specs import MoeSpec, RopeSpec

Angles = tuple["torch.Tensor", "torch.Tensor"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: bool = False) -> torch.Tensor:
    """``x`` [..., H] at unit root mean square times ``weight`` [H] (plus one with ``offset``), in f32; result
    in x's dtype."""
    y = x.float()
    y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps)
    w = weight.float()
    return (y * (1.0 + w if offset else w)).to(x.dtype)


def rotation(positions: torch.Tensor, rope: RopeSpec) -> Angles:
    """(cos, sin) of ``positions`` [B, N], each [B, N, rotated / 2] f32."""
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=positions.device)
    angles = positions.float().unsqueeze(-1) * inv_freq
    return torch.cos(angles) * rope.scale, torch.sin(angles) * rope.scale


def rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotate the pairs (i, i + rotated / 2) of ``x`` [B, N, heads, d] in f32; result in x's dtype."""
    cos, sin = (a.unsqueeze(2) for a in angles)
    half = cos.shape[-1]
    y = x.float()
    first, second, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x.dtype)


def hadamard(x: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """``x`` [..., n] times the orthonormal Hadamard matrix of order n = m * 2^k, in f32; result in x's dtype.

    The matrix is the Kronecker product of ``base`` [m, m] and Sylvester's of order 2^k, as in
    ``kernels_pallas.hadamard``.
    """
    n, m = x.shape[-1], base.shape[0]
    y = x.float().reshape(*x.shape[:-1], m, n // m)
    half = 1
    while half < n // m:
        pairs = y.reshape(*x.shape[:-1], m, -1, 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack([first + second, first - second], dim=-2).reshape(*x.shape[:-1], m, -1)
        half *= 2
    y = torch.einsum("...ap,ab->...bp", y, base.float())
    return (y.reshape(x.shape) / n**0.5).to(x.dtype)


def linear(
    adapter: DeviceAdapter,
    x: torch.Tensor,
    w: Any,
    bias: torch.Tensor | None = None,
    *,
    transposed: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``x`` [..., I] @ ``w`` [I, O] ([O, I] when ``transposed``) + ``bias``, in ``dtype`` (default: x's)."""
    dtype = dtype or x.dtype
    if isinstance(w, TurnedTensor):
        x, w = hadamard(x, w.base), w.inner
    # A bias joins the sum before it is rounded, so the product is kept wide until then.
    wide = torch.float32 if bias is not None and adapter.wide_products else dtype
    if isinstance(w, PackedTensor):
        if transposed != w.transposed:
            raise ConfigError("a matrix packed for one side cannot be multiplied from the other")
        y = packed_linear(adapter, x, w, wide)
    else:
        y = adapter.matmul(x, w.transpose(-1, -2) if transposed else w, wide)
    return y if bias is None else (y.float() + bias.float()).to(dtype)


def packed_linear(
    adapter: DeviceAdapter, x: torch.Tensor, w: PackedTensor, dtype: torch.dtype
) -> torch.Tensor:
    """``x`` [..., I] times a packed matrix in ``dtype``, by the scheme it was packed with; see
    ``quant.array``."""
    if w.smooth is not None:
        x = (x.float() / w.smooth).to(x.dtype)
    if w.activation is None:
        if w.groups > 1:
            return adapter.matmul(x, times_scale(w.integers(), w.scale, w.groups).to(x.dtype), dtype)
        product = adapter.matmul(x, w.integers().to(x.dtype), torch.float32)
        return (product * w.scale.reshape(-1)).to(dtype)
    if w.activation == "dynamic":
        values, scale = adapter.dynamic_quant(x)
        return adapter.quant_matmul(values, w.integers(), w.scale, scale, dtype)
    assert w.input_scale is not None
    steps = x.float() / w.input_scale
    sound = torch.isfinite(x).all(-1)
    scale = torch.where(sound, w.input_scale.float(), float("nan"))
    if w.input_offset is None:
        values = torch.round(steps).clamp(-127, 127).to(torch.int8)
        return adapter.quant_matmul(values, w.integers(), w.scale, scale, dtype)
    values = torch.round(steps + w.input_offset).clamp(-128, 127).to(torch.int8)
    product = adapter.quant_matmul(values, w.integers(), w.scale, scale, dtype)
    sums = column_sums(w) if w.offset_sums is None else w.offset_sums
    return (product.float() - w.input_scale * w.input_offset * sums).to(dtype)


def times_scale(integers: torch.Tensor, scale: torch.Tensor, groups: int) -> torch.Tensor:
    """``integers`` [I, O] times ``scale`` of ``groups`` groups of rows -> f32 [I, O]."""
    parts = integers.reshape(groups, -1, integers.shape[-1]).float()
    return (parts * scale.reshape(groups, 1, -1)).reshape(integers.shape)


def column_sums(w: PackedTensor) -> torch.Tensor:
    """Sum over input rows of integer times scale, f32 [O]: what an input offset of one contributes."""
    integers = w.integers()
    sums = integers.reshape(w.groups, -1, integers.shape[-1]).to(torch.int32).sum(1).float()
    return (sums * w.scale.reshape(sums.shape)).sum(0)


def embed(table: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Rows ``tokens`` (any shape) of ``table`` [V, H], in the table's dtype."""
    if not isinstance(table, PackedTensor):
        rows: torch.Tensor = table[tokens.long()]
        return rows
    if not table.transposed:
        raise ConfigError("a weight packed as a matrix has no rows to look up; pack embeddings as tables")
    flat = tokens.reshape(-1).long()
    columns = table.values[:, flat]
    integers = unpack_int4(columns) if table.bits == 4 else columns
    rows = times_scale(integers, table.scale[..., flat], table.groups)
    if table.smooth is not None:
        rows = rows / table.smooth.unsqueeze(-1)
    return rows.T.reshape(*tokens.shape, -1).to(table.dtype)


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.nn.functional.relu,
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation called ``name``; raises ConfigError for one that torch's side does not have."""
    if name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not known in torch; these are: {sorted(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def gated_mlp(adapter: DeviceAdapter, x: torch.Tensor, params: dict[str, Any], act: str) -> torch.Tensor:
    """``down(act(gate(x)) * up(x))`` of ``x`` [..., H]."""
    gate = linear(adapter, x, params["gate"], params.get("gate_bias"))
    up = linear(adapter, x, params["up"], params.get("up_bias"))
    return linear(adapter, activation(act)(gate) * up, params["down"], params.get("down_bias"))


def route(logits: torch.Tensor, moe: MoeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Router ``logits`` [T, E] f32 -> (weights [T, k] f32, experts [T, k]); ties go to the lower id."""
    scores = torch.softmax(logits, -1) if moe.softmax_first else logits
    weights, chosen = top_k(scores, moe.top_k)
    if not moe.softmax_first:
        weights = torch.softmax(weights, -1)
    elif moe.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen


def moe_mlp(
    adapter: DeviceAdapter, x: torch.Tensor, params: dict[str, Any], moe: MoeSpec, act: str
) -> torch.Tensor:
    """Weighted sum of the chosen experts' gated MLPs for ``x`` [..., H]."""
    rows, router = x.reshape(-1, x.shape[-1]), params["router"]
    exact = isinstance(router, torch.Tensor) and router.dtype == torch.float32
    weights, chosen = route(
        linear(adapter, rows.float() if exact else rows, router, dtype=torch.float32), moe
    )
    parts = torch.zeros(*chosen.shape, x.shape[-1], dtype=torch.float32, device=x.device)
    for expert in range(moe.experts):
        token, place = torch.nonzero(chosen == expert, as_tuple=True)
        if token.numel():
            own = {name: _expert(w, expert) for name, w in params["experts"].items()}
            parts[token, place] = gated_mlp(adapter, rows[token], own, act).float()
    return (parts * weights.unsqueeze(-1)).sum(1).to(x.dtype).reshape(x.shape)


def _expert(w: Any, index: int) -> Any:
    """One expert's matrix of a stack; activations' settings belong to all of them."""
    if isinstance(w, TurnedTensor):
        return TurnedTensor(_expert(w.inner, index), w.base)
    if isinstance(w, PackedTensor):
        sums = None if w.offset_sums is None else w.offset_sums[index]
        return dataclasses.replace(w, values=w.values[index], scale=w.scale[index], offset_sums=sums)
    return w[index]


def top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest along the last axis, best first, equal ones in the order of their index (``torch.topk``
    promises no order; jax does)."""
    values, order = torch.sort(x, dim=-1, descending=True, stable=True)
    return values[..., :k], order[..., :k]


def softcap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """``cap tanh(x / cap)``, or ``x`` without a cap."""
    return x if cap is None else cap * torch.tanh(x / cap)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Lowest id of the largest value, [..., V] -> [...] int32 (``torch.argmax`` promises no order)."""
    best = logits.amax(-1, keepdim=True)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return (
        torch.where(logits == best, ids, logits.shape[-1])
        .amin(-1)
        .clamp_max(logits.shape[-1] - 1)
        .to(torch.int32)
    )
