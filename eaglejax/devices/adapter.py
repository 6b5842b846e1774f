"""What suits a device: attention kernel and block sizes, dtypes, precision, memory, mesh.

``choose`` makes an :class:`Adapter` for a device; :func:`current` is the one of the default device, which
attention asks whenever a program leaves the choice open. Every choice carries its reason.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from eaglejax.devices.chips import GIB, Chip
from eaglejax.devices.dtypes import dtype_bytes
from eaglejax.errors import ConfigError

KERNELS = ("tpu", "gpu")
"""The Pallas kernels, by the device that they are for."""

IMPLEMENTATIONS = ("xla", *KERNELS, "cpu")
"""Ways to compute attention, in the words of ``kernels_pallas.dispatch``."""

OPERATIONS = {
    "quant_matmul": ("auto", "xla", "tpu", "gpu", "cpu"),
    "block_matmul": ("auto", "xla", "cpu"),
    "hadamard": ("auto", "xla", "tpu", "gpu"),
    "ttt_attention": ("auto", "xla", "tpu", "gpu"),
}
"""Operations besides attention whose implementation can be chosen, and what there is; see
``kernels_pallas.dispatch``."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """How attention is computed; hashable, a compile-time constant.

    ``implementation``: "xla", a Pallas kernel, "tpu" or "gpu", or "cpu", the C++ kernel. ``interpret``: run a
    Pallas kernel's Python on the backend at hand instead of compiling it (None: exactly where the backend is
    not the kernel's own; False: compile, also ahead of time for a device that is not there). ``block_kv``:
    cache slots that the TPU kernel handles at a time (None: its own heuristic). Raises ConfigError for what
    cannot be.
    """

    implementation: str = "xla"
    interpret: bool | None = None
    block_kv: int | None = None

    def __post_init__(self) -> None:
        if self.implementation not in IMPLEMENTATIONS:
            raise ConfigError(
                f"attention {self.implementation!r} is not known; use one of {', '.join(IMPLEMENTATIONS)}"
            )
        if self.implementation not in KERNELS and (self.interpret, self.block_kv) != (None, None):
            raise ConfigError(
                "interpret and block_kv belong to the Pallas kernels, attention 'tpu' or 'gpu', not to "
                f"{self.implementation!r}"
            )
        if self.block_kv is not None and (self.block_kv < 128 or self.block_kv % 128):
            raise ConfigError(f"block_kv is {self.block_kv}; it must be a positive multiple of 128")


XLA = Attention()
CPU = Attention("cpu")


@dataclasses.dataclass(frozen=True)
class MeshDefaults:
    """``axes``: names of a mesh's axes. ``rules``: which mesh axis a logical axis is split over, as pairs."""

    axes: tuple[str, ...] = ("data", "model")
    rules: tuple[tuple[str, str], ...] = (
        ("batch", "data"),
        ("heads", "model"),
        ("kv_heads", "model"),
        ("mlp", "model"),
        ("experts", "model"),
        ("vocab", "model"),
    )

    def shape(self, devices: int, kv_heads: int) -> tuple[int, ...]:
        """Sizes of ``axes`` for so many devices: heads first, as far as they divide; the rest is data."""
        model = next(m for m in range(devices, 0, -1) if devices % m == 0 and kv_heads % m == 0)
        return devices // model, model


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Choices for one device.

    ``generation``: "v5e", "sm_90", ... ``kernels``: attention kernels that compile for it. ``forced``:
    attention was asked for, so that it is refused rather than replaced where it cannot run.
    ``memory_bytes``: what arrays may take. ``xla_flags``: what XLA should be started with. ``lanes``: to
    what multiple arrays' last dimension is padded in memory. ``blocks``: (head size, cache dtype, slots), the
    tuned blocks of the attention kernel; other shapes take a heuristic. ``operations``: (name,
    implementation) of those ``OPERATIONS`` that were chosen by hand. ``reasons``: (choice, reason) pairs.
    """

    name: str
    platform: str
    generation: str
    attention: Attention
    kernels: tuple[str, ...]
    weight_dtype: str
    cache_dtype: str
    matmul_precision: str
    memory_bytes: int
    reasons: tuple[tuple[str, str], ...]
    xla_flags: tuple[str, ...] = ()
    mesh: MeshDefaults = MeshDefaults()
    lanes: int = 1
    blocks: tuple[tuple[int, str, int], ...] = ()
    operations: tuple[tuple[str, str], ...] = ()
    step_bytes: int = 0
    chip: Chip | None = None
    forced: bool = False

    def block_kv(self, *, head_dim: int, dtype: str, rows: int) -> int | None:
        """Cache slots that the attention kernel handles at a time; None where the kernel has one size only.

        ``rows``: tree nodes x query heads of a key/value head. A tuned entry wins. Otherwise the block is as
        long as it takes to hide a grid step's overhead behind the copy of its keys and values
        (``step_bytes``), and no longer than lets the float32 scores of its rows stay in ``SCORE_BYTES``.
        """
        if not self.step_bytes:
            return None
        tuned = {(d, t): block for d, t, block in self.blocks}
        slot = 2 * head_dim * dtype_bytes(dtype)
        wanted = tuned.get((head_dim, dtype)) or next(
            (b for b in BLOCKS if b * slot >= self.step_bytes), BLOCKS[-1]
        )
        most = max(BLOCKS[0], SCORE_BYTES // (4 * max(rows, 1)) // BLOCKS[0] * BLOCKS[0])
        return min(wanted, most)

    def operation(self, name: str) -> Any:
        """The implementation of one of ``OPERATIONS``: "auto" unless it was chosen by hand."""
        return dict(self.operations).get(name, "auto")

    def describe(self) -> dict[str, Any]:
        """Choices and reasons as plain values, for ``eaglejax doctor``."""
        return {
            "name": self.name,
            "platform": self.platform,
            "generation": self.generation,
            "attention": {k: v for k, v in dataclasses.asdict(self.attention).items() if v is not None},
            "kernels": list(self.kernels),
            "weight_dtype": self.weight_dtype,
            "cache_dtype": self.cache_dtype,
            "matmul_precision": self.matmul_precision,
            "memory_gib": round(self.memory_bytes / GIB, 2),
            "operations": dict(self.operations),
            "xla_flags": list(self.xla_flags),
            "mesh": {"axes": list(self.mesh.axes), "rules": dict(self.mesh.rules)},
            "reasons": dict(self.reasons),
        }


BLOCKS = (128, 256, 512, 1024, 2048)
SCORE_BYTES = 1 << 20
"""Of float32 scores that a kernel holds at a time; about four such temporaries live in VMEM at once."""


def check_runs(adapter: Adapter, attention: Attention) -> None:
    """Raise ConfigError where ``attention`` neither compiles for the device nor is to be interpreted."""
    if attention.implementation == "xla":
        return
    if attention.implementation == "cpu":
        from kernels_pallas import cache_attention

        refusal = "runs on a CPU" if adapter.platform != "cpu" else cache_attention.KERNEL.unavailable()
        if refusal:
            raise ConfigError(f"the 'cpu' attention kernel {refusal}; use attention 'xla'")
        return
    kernel = attention.implementation
    if (
        kernel in adapter.kernels
        or attention.interpret
        or (attention.interpret is None and kernel != adapter.platform)
    ):
        return
    can = [f"the {name!r} kernel" for name in adapter.kernels]
    can += ["the 'tpu' kernel with interpret = true (slow, for checking)", "attention 'xla'"]
    raise ConfigError(
        f"the {kernel!r} attention kernel cannot be compiled for {adapter.name}; it runs {', '.join(can)}"
    )
