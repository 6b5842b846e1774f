"""What a device does for the torch models: attention by a visibility mask, merging, integer products.

One protocol, :class:`DeviceAdapter`, whose base class computes everything with ordinary torch operators; a
vendor's adapter replaces what the vendor has an operator for. The limits of those operators are data
(``interop.backends.limits``), and an adapter refuses what its operator would refuse, by name and value
(``LimitError``), instead of letting a device fail or, worse, return something.

``keep`` masks are True where a query sees a slot, everywhere in eaglejax. How a vendor counts is converted
in that vendor's adapter alone.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.interop.backends.arrays import dtype_name, torch_device
from eaglejax.interop.backends.limits import AttentionLimits, LimitError, Limits, MergeLimits
from eaglejax.interop.backends.torch_import import torch

BACKENDS = {
    "torch-cpu": ("eaglejax.interop.backends.torch_cpu", "TorchCPU"),
    "torch-cuda": ("eaglejax.interop.backends.torch_cuda", "TorchCUDA"),
    "ascend": ("eaglejax.interop.backends.ascend", "Ascend"),
    "musa": ("eaglejax.interop.backends.musa", "Musa"),
}
"""Module and class of every backend."""


@dataclasses.dataclass(frozen=True)
class Availability:
    """Whether a backend can run here, and why (not)."""

    ok: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """The arguments of :meth:`DeviceAdapter.attention`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keep: torch.Tensor
    lengths: Sequence[int]
    scale: float
    softcap: float | None
    decode: bool
    lse: bool


FLOATS = ("float32", "bfloat16", "float16")


class DeviceAdapter(abc.ABC):
    """A backend. This class computes with ordinary torch operators on any device; subclasses say what theirs
    is called, what it takes and which operators of the vendor they use.

    ``device``: where tensors live; None is the backend's first device. ``wide_products``: whether products of
    narrow floats come in f32 at no loss, so that a bias can join them before they are rounded.
    ``ragged_prompts``: whether prompt chunks go through :meth:`ragged_attention` where they can.
    """

    name = "torch"
    default_device = "cpu"
    wide_products = False
    ragged_prompts = False
    limits: Limits

    def __init__(self, device: str | torch.device | None = None) -> None:
        self._device = device

    @property
    def device(self) -> torch.device:
        """Where this adapter's tensors live; raises ConfigError where torch does not know the device."""
        return torch_device(self._device if self._device is not None else self.default_device)

    @abc.abstractmethod
    def available(self) -> Availability:
        """Whether this backend can run in this process."""

    def require(self) -> None:
        """Raise ConfigError with the reason where the backend cannot run."""
        found = self.available()
        if not found.ok:
            raise ConfigError(f"backend {self.name!r} cannot run here: {found.reason}")

    def describe(self) -> dict[str, str]:
        """Versions and the device's name, for a report."""
        return {"torch": torch.__version__, "device": str(self.device)}

    def synchronize(self) -> None:  # noqa: B027  a host has nothing to wait for
        """Wait for the device."""

    # Attention

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keep: torch.Tensor,
        lengths: Sequence[int],
        *,
        scale: float,
        softcap: float | None = None,
        decode: bool = False,
        lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(output [B, N, Hq, d] in q's dtype, log-sum-exp [B, N, Hq] f32 or None).

        ``q`` [B, N, Hq, d]; ``k``, ``v`` [B, Hkv, S, d]; ``keep`` [B, N, S] bool, True where a query sees a
        slot. ``lengths``: slots of each row that hold something; ``keep`` is False behind them. ``decode``:
        these are one round's nodes over a cache, not a prompt's chunk. A query that sees nothing yields zeros
        and log-sum-exp -inf, or is refused. Raises LimitError.
        """
        limits = self.attention_limits(q.dtype)
        call = AttentionCall(q, k, v, keep, lengths, scale, softcap, decode, lse)
        self._check_attention(limits, call)
        out, sums = self._attend(limits, call)
        return out, sums if lse else None

    def attention_limits(self, dtype: torch.dtype) -> AttentionLimits:
        """The limits of the operator that takes ``dtype``; raises LimitError where none does."""
        name = dtype_name(dtype)
        for limits in self.limits.attention:
            if name in limits.dtypes:
                return limits
        operators = " and ".join(x.operator for x in self.limits.attention)
        allowed = ", ".join(x for limits in self.limits.attention for x in limits.dtypes)
        raise LimitError(self.name, operators, "dtype", name, allowed)

    def _check_attention(self, limits: AttentionLimits, call: AttentionCall) -> None:
        q, keep = call.q, call.keep
        self._check_heads(limits, q.shape[2], call.k.shape[1], q.shape[3], q.shape[0])
        if call.softcap is not None and not limits.softcap:
            raise LimitError(
                self.name, limits.operator, "softcap", call.softcap, "no cap on attention scores"
            )
        if not limits.empty_rows and not bool(keep.any(-1).all()):
            row, query = torch.nonzero(~keep.any(-1))[0].tolist()
            raise LimitError(
                self.name,
                limits.operator,
                "fully masked row",
                f"(row {row}, query {query})",
                "queries that see at least one slot",
            )

    def _check_heads(self, limits: AttentionLimits, heads: int, kv_heads: int, d: int, batch: int) -> None:
        def refuse(limit: str, value: object, allowed: object) -> None:
            raise LimitError(self.name, limits.operator, limit, value, allowed)

        self._check_head_dim(limits, d)
        if limits.heads is not None and heads > limits.heads:
            refuse("heads", heads, f"at most {limits.heads}")
        if limits.group is not None and heads // kv_heads > limits.group:
            refuse("group", heads // kv_heads, f"at most {limits.group} query heads a key/value head")
        if limits.batch is not None and batch > limits.batch:
            refuse("batch", batch, f"at most {limits.batch}")

    def _check_head_dim(self, limits: AttentionLimits | MergeLimits, d: int) -> None:
        def refuse(allowed: str) -> None:
            raise LimitError(self.name, limits.operator, "head_dim", d, allowed)

        if limits.head_dim is not None and not limits.head_dim[0] <= d <= limits.head_dim[1]:
            refuse(f"{limits.head_dim[0]} to {limits.head_dim[1]}")
        if d % limits.head_dim_multiple:
            refuse(f"multiples of {limits.head_dim_multiple}")

    def _attend(
        self, limits: AttentionLimits, call: AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        del limits
        return reference_attention(call.q, call.k, call.v, call.keep, scale=call.scale, softcap=call.softcap)

    def ragged_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: Sequence[int],
        keys: Sequence[int],
        *,
        scale: float,
    ) -> torch.Tensor:
        """Causal attention of rows of different lengths that lie end to end, without padding or a mask.

        ``q`` [T, Hq, d]: ``queries[b]`` tokens of each row, the last of the ``keys[b]`` whose keys and values
        are in ``k``, ``v`` [T', Hkv, d]. A row may have no queries, and then no keys. Raises LimitError.
        """
        limits = self.ragged_limits(q.dtype)
        self._check_heads(limits, q.shape[1], k.shape[1], q.shape[2], len(queries))
        return self._ragged(q, k, v, queries, keys, scale)

    def ragged_limits(self, dtype: torch.dtype) -> AttentionLimits:
        """The limits of the operator behind :meth:`ragged_attention`."""
        return self.attention_limits(dtype)

    def _ragged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: Sequence[int],
        keys: Sequence[int],
        scale: float,
    ) -> torch.Tensor:
        outs = []
        rows = zip(q.split(list(queries)), k.split(list(keys)), v.split(list(keys)), strict=True)
        for mine, near_k, near_v in rows:
            n, s = len(mine), len(near_k)
            if not n:
                continue
            keep = torch.ones(n, s, dtype=torch.bool, device=q.device).tril(s - n)
            swapped = (near_k.transpose(0, 1)[None], near_v.transpose(0, 1)[None])
            outs.append(reference_attention(mine[None], *swapped, keep[None], scale=scale)[0][0])
        return torch.cat(outs)

    def merge(
        self, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One attention out of partial ones over disjoint slots: (output [..., d], log-sum-exp [...] f32).

        ``outs`` [..., d] and ``lses`` [...] f32, natural logarithms; a part that saw nothing has -inf and
        zeros. Raises LimitError.
        """
        limits = self.limits.merge

        def refuse(limit: str, value: object, allowed: object) -> None:
            raise LimitError(self.name, limits.operator, limit, value, allowed)

        if dtype_name(outs[0].dtype) not in limits.dtypes:
            refuse("dtype", dtype_name(outs[0].dtype), ", ".join(limits.dtypes))
        if limits.parts is not None and len(outs) > limits.parts:
            refuse("parts", len(outs), f"at most {limits.parts}")
        self._check_head_dim(limits, outs[0].shape[-1])
        return self._merge(outs, lses)

    def _merge(
        self, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = joint_lse(lses)
        # A query that no part has anything for has total -inf, and -inf - -inf is not a number.
        weights = [torch.exp(x - torch.where(total.isinf(), torch.zeros_like(total), total)) for x in lses]
        mixed = sum(w.unsqueeze(-1) * out.float() for w, out in zip(weights, outs, strict=True))
        assert isinstance(mixed, torch.Tensor)
        return mixed.to(outs[0].dtype), total

    # Products

    def matmul(self, x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``x`` [..., I] @ ``w`` [I, O] in ``dtype``; f32 results come of f32 products."""
        if dtype == torch.float32:
            return x.float() @ w.float()
        return (x @ w).to(dtype)

    def dynamic_quant(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(int8 [..., I], f32 scale [...]) of ``x`` [..., I]: a row's largest magnitude becomes 127; zeros
        have scale 1. Raises LimitError."""
        self._check_quant(x.dtype)
        return self._dynamic_quant(x)

    def _dynamic_quant(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = x.float()
        largest = wide.abs().amax(-1)
        # A row with NaN or infinity keeps a scale that is not finite: integers cannot say it.
        scale = torch.where(largest == 0, torch.ones_like(largest), largest / 127)
        return torch.round(wide / scale.unsqueeze(-1)).to(torch.int8), scale

    def quant_matmul(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        w_scale: torch.Tensor,
        x_scale: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """``(x * x_scale) @ (w * w_scale)`` [..., O] in ``dtype``, multiplied as integers.

        ``x`` int8 [..., I], ``x_scale`` f32 [...]; ``w`` int8 [I, O], ``w_scale`` f32 [O], or [G, O] for G
        groups of consecutive rows. Raises LimitError.
        """
        limits = self.limits.quant
        self._check_quant(dtype)
        if w_scale.ndim == 2 and w_scale.shape[0] > 1 and not limits.group_scales:
            raise LimitError(
                self.name, limits.operator, "scale groups", w_scale.shape[0], "one scale an output channel"
            )
        if limits.largest is not None and max(w.shape) > limits.largest:
            raise LimitError(
                self.name, limits.operator, "weight shape", tuple(w.shape), f"sides up to {limits.largest}"
            )
        groups = w_scale.reshape(-1, w.shape[1])
        rows = self._quant_matmul(x.reshape(-1, x.shape[-1]), w, groups, x_scale.reshape(-1), dtype)
        return rows.reshape(*x.shape[:-1], w.shape[1])

    def _check_quant(self, dtype: torch.dtype) -> None:
        limits = self.limits.quant
        if dtype_name(dtype) not in limits.dtypes:
            raise LimitError(self.name, limits.operator, "dtype", dtype_name(dtype), ", ".join(limits.dtypes))

    def _quant_matmul(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        groups: torch.Tensor,
        x_scale: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        size = w.shape[0] // groups.shape[0]
        total = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float32, device=x.device)
        for g, scale in enumerate(groups):
            part = slice(g * size, (g + 1) * size)
            total = total + integer_product(x[:, part], w[part]).float() * scale
        return (total * x_scale.unsqueeze(-1)).to(dtype)


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by its definition, with f32 scores and sums: (output, log-sum-exp); shapes as in
    :meth:`DeviceAdapter.attention`. Rounds where ``nn.attention`` does."""
    b, n, hq, d = q.shape
    hkv, slots = k.shape[1], k.shape[2]
    rows = q.reshape(b, n, hkv, hq // hkv, d).permute(0, 2, 3, 1, 4).reshape(b, hkv, -1, d)
    scores = rows.to(k.dtype).float() @ k.float().transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.reshape(b, hkv, hq // hkv, n, slots)
    seen = keep[:, None, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    weights = torch.exp(scores - top).to(v.dtype)
    total = weights.float().sum(-1, keepdim=True)
    mixed = weights.float().reshape(b, hkv, -1, slots) @ v.float()
    mixed = mixed.reshape(b, hkv, hq // hkv, n, d) / total.clamp_min(1e-30)
    sums = (top + torch.log(total)).squeeze(-1)
    out = mixed.permute(0, 3, 1, 2, 4).reshape(b, n, hq, d).to(q.dtype)
    return out, sums.permute(0, 3, 1, 2).reshape(b, n, hq)


def joint_lse(lses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Log-sum-exp over all parts; -inf where every part has -inf."""
    return torch.logsumexp(torch.stack(list(lses)), dim=0)


_EXACT_ROWS = 1024
"""Products of int8 are below 2^14, so sums of 1024 of them are exact in f32."""


def integer_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """int8 [M, K] @ int8 [K, N] -> int32 [M, N], exactly, on devices that only multiply floats."""
    total = torch.zeros(x.shape[0], w.shape[1], dtype=torch.int32, device=x.device)
    for start in range(0, x.shape[1], _EXACT_ROWS):
        part = slice(start, start + _EXACT_ROWS)
        total += (x[:, part].float() @ w[part].float()).to(torch.int32)
    return total


def get_adapter(name: str, device: str | None = None, **options: Any) -> DeviceAdapter:
    """The backend called ``name`` (see ``BACKENDS``) on ``device``; ``options`` are the adapter's own.

    Raises ConfigError for an unknown name; whether it can run is said by ``available``.
    """
    if name not in BACKENDS:
        raise ConfigError(f"backend {name!r} is not known; choose one of {', '.join(BACKENDS)}")
    module, cls = BACKENDS[name]
    adapter: DeviceAdapter = getattr(importlib.import_module(module), cls)(device, **options)
    return adapter
