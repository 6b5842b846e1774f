"""The TPU adapter: by generation, from jax's ``device_kind``."""

from __future__ import annotations

from typing import Any

from eaglejax.devices import chips
from eaglejax.devices.adapter import Adapter, Attention
from eaglejax.errors import ConfigError

LANES = 128
"""XLA computes on tiles of 128 lanes: a head of 64 takes the room of one of 128."""

STEP_SECONDS = 0.35e-6
"""About what a grid step of a Pallas kernel costs beside its copies and its arithmetic."""

RUNTIME_BYTES = 512 << 20
"""Kept free for the runtime and compiled programs."""

BLOCKS: dict[str, tuple[tuple[int, str, int], ...]] = {}
"""(head size, cache dtype, slots) that were timed on a device, by generation. None has been yet."""


def adapter(device: Any) -> Adapter:
    """The adapter of a TPU device. Raises ConfigError for a generation that is not known."""
    generation = chips.tpu_generation(device.device_kind)
    if generation is None:
        known = ", ".join(kind for chip in chips.TPUS.values() for kind in chip.kinds)
        raise ConfigError(f"TPU {device.device_kind!r} is not known; known are {known}")
    chip = chips.TPUS[generation]
    memory, source = _memory(device, chip)
    return Adapter(
        name=chip.name,
        platform="tpu",
        generation=generation,
        attention=Attention("tpu"),
        kernels=("tpu",),
        weight_dtype="bfloat16",
        cache_dtype="bfloat16",
        matmul_precision="default",
        memory_bytes=memory,
        lanes=LANES,
        blocks=BLOCKS.get(generation, ()),
        step_bytes=int(STEP_SECONDS * chip.device_bandwidth),
        chip=chip,
        reasons=(
            ("attention", "the Pallas kernel reads live cache blocks alone; shapes it refuses use xla"),
            (
                "block_kv",
                "long enough to hide a grid step behind its copy at "
                f"{chip.device_bandwidth / 1e9:.0f} GB/s; estimated, not timed",
            ),
            ("weight_dtype", "the matrix units multiply bfloat16"),
            ("cache_dtype", "the weights' dtype; int8 with scales halves it where the cache outweighs them"),
            (
                "matmul_precision",
                "one pass for bfloat16 weights; with float32 weights set 'highest', or float32 products are "
                "rounded to bfloat16 and drafts may change near ties",
            ),
            ("memory_bytes", f"{source} less {RUNTIME_BYTES >> 20} MiB for the runtime"),
            ("xla_flags", "none: no flag has been measured to help"),
            ("mesh", "heads, feed-forward and vocabulary over 'model', rows over 'data'"),
        ),
    )


def _memory(device: Any, chip: chips.Chip) -> tuple[int, str]:
    stats = device.memory_stats() if hasattr(device, "memory_stats") else None
    limit = (stats or {}).get("bytes_limit")
    if limit:
        return limit - RUNTIME_BYTES, "what the device reports"
    return chip.device_memory - RUNTIME_BYTES, "the published memory"
