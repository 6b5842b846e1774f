"""Ordinary torch operators on an NVIDIA or AMD GPU."""

from __future__ import annotations

from eaglejax.interop.backends.adapter import Availability, DeviceAdapter
from eaglejax.interop.backends.torch_cpu import PLAIN
from eaglejax.interop.backends.torch_import import torch


class TorchCUDA(DeviceAdapter):
    """Ordinary torch operators on ``cuda``. f32 products are not rounded to TF32 unless the process asks for
    it (``torch.backends.cuda.matmul.allow_tf32``), which :meth:`describe` reports."""

    name = "torch-cuda"
    default_device = "cuda:0"
    limits = PLAIN

    def available(self) -> Availability:
        """Whether torch was built for a GPU and sees one."""
        if not torch.cuda.is_available():
            built = torch.version.cuda or torch.version.hip
            why = "sees no GPU" if built else "was built without CUDA and ROCm"
            return Availability(False, f"torch {torch.__version__} {why}")
        return Availability(True, torch.cuda.get_device_name(self.device))

    def describe(self) -> dict[str, str]:
        """Versions, the GPU's name and whether f32 products are rounded to TF32."""
        return {
            **super().describe(),
            "name": torch.cuda.get_device_name(self.device),
            "cuda": str(torch.version.cuda or torch.version.hip),
            "allow_tf32": str(torch.backends.cuda.matmul.allow_tf32),
        }

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self.device)
