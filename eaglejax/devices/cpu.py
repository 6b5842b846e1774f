"""The CPU adapter: XLA flags that must be set before jax starts, and which dtype to compute in.

XLA:CPU hands matrix products to XNNPACK only when told to. XLA aborts the process on a flag it does not know,
so flags are set only for jaxlib releases that are known, or that a child process has tried.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

from eaglejax.devices import compile_cache, machine
from eaglejax.devices.adapter import NATIVE, XLA, Adapter

log = logging.getLogger(__name__)

FLAGS = {
    "--xla_cpu_experimental_xnn_fusion_type": "dot",
    "--xla_cpu_experimental_xnn_graph_fusion_mode": "XNN_GRAPH_FUSION_MODE_BYPASS_COST_MODEL",
}
KNOWN_JAXLIB = ("0.10.2", "0.12.0.1")
OFF_VARIABLE = "EAGLEJAX_NO_XLA_FLAGS"


@dataclasses.dataclass(frozen=True)
class FlagReport:
    """``in_force``: those of FLAGS that this process runs with, as XLA_FLAGS spells them. ``reason``: why."""

    in_force: tuple[str, ...]
    reason: str


def set_flags(environ: MutableMapping[str, str], *, started: bool) -> FlagReport:
    """Add FLAGS to ``XLA_FLAGS`` where they can help and are understood; a flag the user set keeps its value.

    ``started``: jax already made its backends, so that nothing set now is read.
    """
    given = {word.split("=")[0]: word for word in environ.get("XLA_FLAGS", "").split()}
    users = tuple(given[name] for name in FLAGS if name in given)
    missing = [f"{name}={value}" for name, value in FLAGS.items() if name not in given]
    refusal = _why_not(environ, missing, started)
    if refusal:
        return FlagReport(users, refusal)
    environ["XLA_FLAGS"] = " ".join([*given.values(), *missing])
    return FlagReport((*users, *missing), "set before jax started")


def _why_not(environ: MutableMapping[str, str], missing: list[str], started: bool) -> str | None:
    """Why ``missing`` flags are not to be set, or None."""
    platforms = environ.get("JAX_PLATFORMS", "").split(",")
    if not missing:
        return "chosen by the user"
    if environ.get(OFF_VARIABLE, "") not in ("", "0"):
        return f"turned off by {OFF_VARIABLE}"
    if platforms != [""] and platforms[0] != "cpu":
        return f"not for platform {platforms[0]} (JAX_PLATFORMS)"
    if platforms == [""] and accelerator_present():
        return "not set: this machine has an accelerator (JAX_PLATFORMS=cpu computes on the CPU instead)"
    if started:
        log.warning(
            "jax had started before eaglejax was imported, so its CPU flags could not be set; "
            "import eaglejax before the first use of jax"
        )
        return "could not be set: jax had already started when eaglejax was imported"
    version = importlib.metadata.version("jaxlib")
    if version not in KNOWN_JAXLIB and not understands(version, missing, environ):
        return f"not set: jaxlib {version} does not understand them"
    return None


def accelerator_present() -> bool:
    """Whether the machine has a TPU or GPU that jax could prefer to the CPU, going by device files."""
    patterns = ("accel[0-9]*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd")
    return any(next(Path("/dev").glob(pattern), None) for pattern in patterns)


def understands(
    version: str,
    flags: list[str],
    environ: MutableMapping[str, str],
    probe: Callable[[list[str]], bool] | None = None,
) -> bool:
    """Whether this jaxlib starts with ``flags``.

    Tried once in a child process and remembered under the cache folder, for each release and list of flags.
    """
    memory = compile_cache.home(environ) / f"xla-flags-jaxlib-{version}.json"
    known = _read(memory)
    key = " ".join(flags)
    if key not in known:
        known[key] = (probe or _starts_with)(flags)
        _remember(memory, known)
    return known[key]


def _starts_with(flags: list[str]) -> bool:
    child = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices('cpu')"],
        env={**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    return child.returncode == 0


def _read(memory: Path) -> dict[str, bool]:
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # Missing or damaged: the probe runs again and writes a sound one.
        return {}
    return known if isinstance(known, dict) else {}


def _remember(memory: Path, known: dict[str, bool]) -> None:
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memory.parent, delete=False, encoding="utf-8") as file:
            json.dump(known, file)
        os.replace(file.name, memory)
    except OSError as error:
        log.info("the result of the flag probe could not be kept in %s: %s", memory, error)


def adapter(device: Any) -> Adapter:
    """The adapter of a CPU device. ``choose_dtype`` measures what this one cannot know."""
    from eaglejax import devices
    from kernels_pallas import cache_attention

    del device
    refusal = cache_attention.KERNEL.unavailable()
    flags = devices.prepare().cpu_flags
    return Adapter(
        name="cpu",
        platform="cpu",
        generation=machine.processor(),
        attention=XLA if refusal else NATIVE,
        kernels=(),
        weight_dtype="bfloat16",
        cache_dtype="bfloat16",
        matmul_precision="default",
        memory_bytes=machine.memory_bytes(),
        xla_flags=tuple(f"{name}={value}" for name, value in FLAGS.items()),
        reasons=(
            (
                "attention",
                f"the C++ kernel {refusal}" if refusal else "it reads written slots alone",
            ),
            ("weight_dtype", "half the bytes of float32; see the measurement of products"),
            ("cache_dtype", "the weights' dtype"),
            ("matmul_precision", "float32 products are computed in float32"),
            ("memory_bytes", "the machine's memory, which other processes share"),
            ("xla_flags", flags.reason),
            ("mesh", "one device; more only where jax is told to make them"),
        ),
    )


@dataclasses.dataclass(frozen=True)
class DtypeChoice:
    """``dtype`` to compute in, why, and the measured milliseconds of one product by dtype and rows."""

    dtype: str
    reason: str
    milliseconds: dict[str, dict[int, float]]


def choose_dtype(*, inputs: int = 1024, outputs: int = 32768, rows: tuple[int, ...] = (1, 8)) -> DtypeChoice:
    """Time ``rows`` activations against one [inputs, outputs] matrix in bfloat16 and float32.

    The dtype whose product of the most rows is fastest is chosen: speculative decoding is made of those. A
    one-row product is what plain autoregressive decoding pays, so an honest baseline tries both dtypes.
    """
    import jax.numpy as jnp

    times = {
        name: {m: _product_ms(m, inputs, outputs, jnp.dtype(name)) for m in rows}
        for name in ("bfloat16", "float32")
    }
    widest = rows[-1]
    best = min(times, key=lambda name: times[name][widest])
    other = "float32" if best == "bfloat16" else "bfloat16"
    reason = (
        f"a product of {widest} rows took {times[best][widest]:.2f} ms in {best} "
        f"and {times[other][widest]:.2f} ms in {other}"
    )
    return DtypeChoice(best, reason, times)


def _product_ms(rows: int, inputs: int, outputs: int, dtype: Any) -> float:
    """Milliseconds of the product that the model's layers use."""
    import jax.numpy as jnp

    from eaglejax.nn.linear import linear

    return _best_ms(linear, jnp.ones((rows, inputs), dtype), jnp.ones((inputs, outputs), dtype))


def _best_ms(product: Callable[..., Any], *arguments: Any) -> float:
    """Best of several runs, milliseconds."""
    import jax

    compiled = jax.jit(product)
    compiled(*arguments).block_until_ready()
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        compiled(*arguments).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 1e3 * best


@dataclasses.dataclass(frozen=True)
class BFloat16Products:
    """How products with bfloat16 weights are computed on this CPU; ``choose_dtype`` measures them.

    ``implementation``: "cpu", the compiled kernel, for at most ``most_rows`` rows, or "xla". ``level``: the
    instruction set that the kernel was compiled for, None without it. ``reason``: where the kernel is kept,
    or why there is none.
    """

    implementation: str
    level: str | None
    reason: str
    most_rows: int


def bfloat16_products() -> BFloat16Products:
    """What "auto" makes of a product with bfloat16 weights here."""
    from kernels_pallas.dense_matmul import cpu as kernel

    level, reason = kernel.KERNEL.status()
    most_rows = 0 if level is None else kernel.MOST_ROWS[level]
    return BFloat16Products("cpu" if level else "xla", level, reason, most_rows)


@dataclasses.dataclass(frozen=True)
class PackedProducts:
    """How products with 8- and 4-bit weights are computed on this CPU.

    ``implementation``: "cpu", the compiled kernel, or "xla". ``level``: the instruction set that the kernel
    was compiled for, None without it. ``reason``: where the kernel is kept, or why there is none.
    ``milliseconds`` of one W8A8 product by rows, with the quantisation of its activations.
    """

    implementation: str
    level: str | None
    reason: str
    milliseconds: dict[int, float]


def packed_products(
    *, inputs: int = 1024, outputs: int = 32768, rows: tuple[int, ...] = (1, 8)
) -> PackedProducts:
    """What "auto" makes of a product with packed weights here, and its time beside ``choose_dtype``'s."""
    import jax.numpy as jnp

    from kernels_pallas.quant_matmul import cpu as kernel
    from kernels_pallas.quant_matmul import quant_matmul, quantize_per_token

    def product(x: Any, w: Any, scale: Any) -> Any:
        integers, x_scale = quantize_per_token(x)
        return quant_matmul(integers, w, scale, x_scale=x_scale)

    level, reason = kernel.KERNEL.status()
    w, scale = jnp.ones((inputs, outputs), jnp.int8), jnp.ones(outputs)
    times = {m: _best_ms(product, jnp.ones((m, inputs), jnp.bfloat16), w, scale) for m in rows}
    return PackedProducts("cpu" if level else "xla", level, reason, times)


@dataclasses.dataclass(frozen=True)
class CacheOperation:
    """How attention over a cache, or a write into one, is computed on this CPU.

    ``implementation``: "native", the compiled kernel, or "xla". ``level``: the instruction set that the
    kernel was compiled for, None without it. ``reason``: where the kernel is kept, or why it is not used.
    """

    implementation: str
    level: str | None
    reason: str


def cache_operations() -> dict[str, CacheOperation]:
    """What is made here of "attention" over a cache that its kernel takes, and of a "write" into one."""
    from kernels_pallas import cache_attention as kernels

    def operation(kernel: Any) -> CacheOperation:
        level, reason = kernel.status()
        if level is not None and (refusal := kernel.unavailable()):
            level, reason = None, refusal
        return CacheOperation("native" if level else "xla", level, reason)

    return {"attention": operation(kernels.KERNEL), "write": operation(kernels.WRITE_KERNEL)}
