"""Published figures of accelerators: what a decoding step can cost at best.

Peak rates and bandwidths as their makers publish them, dense, one chip. Sources: the Cloud TPU system
architecture pages (v4, v5e, v5p, v6e, TPU7x) and NVIDIA's H100 SXM and H200 SXM data sheets.
"""

from __future__ import annotations

import dataclasses

GB = 10**9
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip: ``memory`` bytes, ``bandwidth`` bytes/s, ``bf16`` and ``int8`` operations/s.

    ``int8`` is None where integers are multiplied as bfloat16. ``devices``: how many jax devices the chip is,
    each with its share of everything. ``kinds``: what jax calls a device of it.
    """

    name: str
    platform: str
    kinds: tuple[str, ...]
    memory: int
    bandwidth: float
    bf16: float
    int8: float | None
    devices: int = 1

    @property
    def ridge(self) -> float:
        """Operations a byte at which bfloat16 products take as long as reading their operands."""
        return self.bf16 / self.bandwidth

    @property
    def device_memory(self) -> int:
        """Bytes that one jax device has."""
        return self.memory // self.devices

    @property
    def device_bandwidth(self) -> float:
        """Bytes/s that one jax device reads."""
        return self.bandwidth / self.devices


TPUS = {
    "v4": Chip("TPU v4", "tpu", ("TPU v4",), 32 * GIB, 1228 * GB, 275e12, None),
    "v5e": Chip("TPU v5e", "tpu", ("TPU v5 lite", "TPU v5e"), 16 * GIB, 819 * GB, 197e12, 394e12),
    "v5p": Chip("TPU v5p", "tpu", ("TPU v5", "TPU v5p"), 95 * GIB, 2765 * GB, 459e12, 918e12),
    "v6e": Chip("TPU v6e", "tpu", ("TPU v6 lite", "TPU v6e"), 32 * GIB, 1638 * GB, 918e12, 1836e12),
    "v7x": Chip("TPU7x", "tpu", ("TPU7x",), 192 * GIB, 7380 * GB, 2307e12, None, devices=2),
}
GPUS = {
    "H100": Chip("H100 SXM", "gpu", ("H100",), 80 * GB, 3350 * GB, 989e12, 1979e12),
    "H200": Chip("H200 SXM", "gpu", ("H200",), 141 * GB, 4800 * GB, 989e12, 1979e12),
}
CHIPS = TPUS | GPUS


def tpu_generation(kind: str) -> str | None:
    """Generation of a TPU by jax's ``device_kind``, or None for one that is not listed."""
    return next((name for name, chip in TPUS.items() if kind in chip.kinds), None)


def gpu_model(kind: str) -> str | None:
    """Model of a GPU by jax's ``device_kind`` ("NVIDIA H100 80GB HBM3"), or None for one not listed."""
    return next((name for name in GPUS if name in kind.split()), None)
