"""The CPU adapter, and which dtype to compute in there."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from eaglejax.devices import machine
from eaglejax.devices.adapter import CPU, XLA, Adapter
from eaglejax.devices.cpu_flags import FLAGS
from eaglejax.devices.startup import prepare


def adapter(device: Any) -> Adapter:
    """The adapter of a CPU device. ``choose_dtype`` measures what this one cannot know."""
    from kernels_pallas import cache_attention

    del device
    refusal = cache_attention.KERNEL.unavailable()
    flags = prepare().cpu_flags
    return Adapter(
        name="cpu",
        platform="cpu",
        generation=machine.processor(),
        attention=XLA if refusal else CPU,
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

    from kernels_pallas.dense_matmul import dense_matmul

    def product(x: Any, w: Any) -> Any:
        return dense_matmul(x, w, out_dtype=jnp.float32).astype(dtype)

    return _best_ms(product, jnp.ones((rows, inputs), dtype), jnp.ones((inputs, outputs), dtype))


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
    most_rows = 0 if level is None else kernel.MOST_ROWS[level]["bfloat16"]
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


def block_products(
    *, inputs: int = 1024, outputs: int = 32768, rows: tuple[int, ...] = (1, 8)
) -> PackedProducts:
    """What "auto" makes of a product with GGUF blocks here, activations rounded to 8 bits (``keep-a8``), and
    its time beside ``choose_dtype``'s."""
    import jax.numpy as jnp

    from kernels_pallas.block_matmul import FORMS, block_matmul
    from kernels_pallas.block_matmul import cpu as kernel

    form = FORMS["Q4_K"]

    def product(x: Any, w: Any) -> Any:
        return block_matmul(x, w, form=form, columns=outputs, integers=True)

    level, reason = kernel.KERNEL.status()
    w = jnp.zeros((form.tiles(outputs), form.tile_bytes(inputs)), jnp.uint8)
    times = {m: _best_ms(product, jnp.ones((m, inputs), jnp.bfloat16), w) for m in rows}
    return PackedProducts("cpu" if level else "xla", level, reason, times)


@dataclasses.dataclass(frozen=True)
class CacheOperation:
    """How attention over a cache, or a write into one, is computed on this CPU.

    ``implementation``: "cpu", the compiled kernel, or "xla". ``level``: the instruction set that the
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
        return CacheOperation("cpu" if level else "xla", level, reason)

    return {"attention": operation(kernels.KERNEL), "write": operation(kernels.WRITE_KERNEL)}
