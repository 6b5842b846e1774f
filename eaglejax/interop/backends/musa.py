"""Moore Threads through ``torch_musa``: torch's own operators on a PrivateUse1 device.

Attention goes through ``scaled_dot_product_attention``; with an explicit mask, which a tree needs, torch_musa
takes its math path. ``torchada`` may make CUDA calls work there, but ``device.type`` stays "musa" and
``torch.cuda.is_available()`` False, so nothing here asks CUDA anything. Nothing here has been run on a device
yet.
"""

from __future__ import annotations

import importlib
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.interop.backends.adapter import FLOATS, AttentionCall, Availability, DeviceAdapter
from eaglejax.interop.backends.limits import AttentionLimits, Limits, MergeLimits, QuantLimits
from eaglejax.interop.backends.torch_import import torch

LIMITS = Limits(
    attention=(
        AttentionLimits(
            "scaled_dot_product_attention",
            FLOATS,
            mask_shape="[B, Hq, N, S]",
            masked_is=False,
            empty_rows=False,
        ),
    ),
    merge=MergeLimits("torch operators", FLOATS),
    quant=QuantLimits("torch operators", FLOATS),
    source="torch_musa's documentation and source",
)


class Musa(DeviceAdapter):
    """A Moore Threads GPU. A query that sees nothing would come out as NaN and is refused; capped scores and
    log-sum-exps, which the operator does not have, are computed with ordinary operators."""

    name = "musa"
    default_device = "musa:0"
    limits = LIMITS

    @property
    def musa(self) -> Any:
        """``torch.musa``, which importing torch_musa creates; raises ConfigError where that fails."""
        try:
            importlib.import_module("torch_musa")
        except (ImportError, OSError) as error:
            raise ConfigError(
                f"torch_musa cannot be imported ({error}); install the one for torch {torch.__version__} "
                "and the MUSA toolkit"
            ) from error
        return torch.musa  # type: ignore[attr-defined]

    def available(self) -> Availability:
        """Whether torch_musa is there and sees a device."""
        try:
            musa = self.musa
        except ConfigError as error:
            return Availability(False, str(error))
        if not musa.is_available():
            return Availability(
                False, "torch_musa sees no device; check mthreads-gmi and MUSA_VISIBLE_DEVICES"
            )
        return Availability(
            True, f"{musa.device_count()} devices, MUSA {getattr(torch.version, 'musa', '?')}"
        )

    @property
    def device(self) -> torch.device:
        """Importing torch_musa is what makes torch know ``musa``."""
        _ = self.musa
        return super().device

    def describe(self) -> dict[str, str]:
        """Versions and the device's name."""
        return {
            **super().describe(),
            "musa": str(getattr(torch.version, "musa", None)),
            "name": self.musa.get_device_name(self.device),
        }

    def synchronize(self) -> None:
        """Wait for the GPU."""
        self.musa.synchronize()

    def _attend(
        self, limits: AttentionLimits, call: AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if call.lse or call.softcap is not None:
            return super()._attend(limits, call)
        q, group = call.q, call.q.shape[2] // call.k.shape[1]
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            call.k.to(q.dtype).repeat_interleave(group, dim=1),
            call.v.to(q.dtype).repeat_interleave(group, dim=1),
            attn_mask=call.keep[:, None].expand(-1, q.shape[2], -1, -1).contiguous(),
            is_causal=False,
            scale=call.scale,
        )
        return out.transpose(1, 2), None
