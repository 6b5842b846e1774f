"""Plain torch on the host: what the others are compared with."""

from __future__ import annotations

from eaglejax.interop.backends.adapter import FLOATS, Availability, DeviceAdapter
from eaglejax.interop.backends.limits import AttentionLimits, Limits, MergeLimits, QuantLimits
from eaglejax.interop.backends.torch_import import torch

PLAIN = Limits(
    attention=(AttentionLimits("torch operators", FLOATS),),
    merge=MergeLimits("torch operators", FLOATS),
    quant=QuantLimits("torch operators", FLOATS),
    source="none: ordinary torch operators",
)
"""Ordinary operators take everything."""


class TorchCPU(DeviceAdapter):
    """Ordinary torch operators on the host."""

    name = "torch-cpu"
    default_device = "cpu"
    wide_products = True
    limits = PLAIN

    def available(self) -> Availability:
        """Always."""
        return Availability(True, f"torch {torch.__version__} runs on every host")

    def matmul(self, x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Products of f32 whatever the weights are: exact, and rounded once, as jax rounds."""
        return (x.float() @ w.float()).to(dtype)
