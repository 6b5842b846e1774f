"""The GPU adapter: by compute capability."""

from __future__ import annotations

import os
from typing import Any

from eaglejax.devices import chips
from eaglejax.devices.adapter import XLA, Adapter

FRACTION_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
DEFAULT_FRACTION = 0.75
HOPPER = 9


def adapter(device: Any) -> Adapter:
    """The adapter of a GPU device. Attention is XLA's unless the kernel is asked for."""
    capability = str(getattr(device, "compute_capability", "") or "unknown")
    model = chips.gpu_model(device.device_kind)
    chip = chips.GPUS[model] if model else None
    hopper = capability.split(".")[0] == str(HOPPER)
    memory, source = _memory(device, chip)
    if hopper:
        why = (
            "the Hopper kernel compiles for this GPU but none has run it yet, so it is taken by name only: "
            "attention = 'gpu'"
        )
    else:
        why = (
            f"compute capability {capability}: the kernel uses wgmma, which capability {HOPPER}.x (Hopper) "
            "alone has"
        )
    older = capability != "unknown" and "." in capability and int(capability.split(".")[0]) < 8
    return Adapter(
        name=chip.name if chip else device.device_kind,
        platform="gpu",
        generation=f"sm_{capability.replace('.', '')}",
        attention=XLA,
        kernels=("gpu",) if hopper else (),
        weight_dtype="float16" if older else "bfloat16",
        cache_dtype="float16" if older else "bfloat16",
        matmul_precision="default",
        memory_bytes=memory,
        chip=chip,
        reasons=(
            ("attention", why),
            (
                "weight_dtype",
                "no bfloat16 tensor cores before capability 8.0"
                if older
                else "tensor cores multiply bfloat16",
            ),
            ("cache_dtype", "the weights' dtype; 8 bits halve it where the cache outweighs them"),
            (
                "matmul_precision",
                "exact products for bfloat16 weights; with float32 weights set 'highest', or TF32 may change "
                "near ties",
            ),
            ("memory_bytes", source),
            ("xla_flags", "none: no flag has been measured to help"),
            ("mesh", "heads, feed-forward and vocabulary over 'model', rows over 'data'"),
        ),
    )


def _memory(device: Any, chip: chips.Chip | None) -> tuple[int, str]:
    stats = device.memory_stats() if hasattr(device, "memory_stats") else None
    limit = (stats or {}).get("bytes_limit")
    if limit:
        return limit, "what jax reports as its share of the device"
    fraction = float(os.environ.get(FRACTION_VARIABLE) or DEFAULT_FRACTION)
    if chip is None:
        return 0, "unknown: neither does the device report it nor is the model listed"
    return int(chip.device_memory * fraction), (
        f"{fraction:.0%} of the published memory, jax's share ({FRACTION_VARIABLE} changes it)"
    )
