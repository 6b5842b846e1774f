"""What the cases of device_check are made of: sizes, random problems, a timer and a comparison."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eaglejax.devices.chips import Chip
from kernels_pallas.quant_matmul import pack_int4, quantize_per_token
from kernels_pallas.tree_attention import pack_ancestors

CYCLED_BYTES = 128 << 20  # read between two uses of a buffer: more than any last-level cache holds
MOST_COPIES = 16
_LOOP_US = 100_000.0  # that one timed loop should take at least
_REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Everything that a dry run makes small."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    nodes: tuple[int, ...] = (64, 1, 16, 8, 32)
    verified: tuple[int, ...] = (1, 64, 16)
    slots: tuple[int, ...] = (8192, 32768, 1024, 4096, 16384, 2048)
    inputs: int = 4096
    outputs: int = 14336
    rows: tuple[int, ...] = (64, 1)
    rotations: tuple[int, ...] = (14336, 4096)
    train_length: int = 2048
    layers: int = 32
    vocab: int = 128_256


TINY = Sizes(
    heads=4,
    kv_heads=2,
    dim=64,
    nodes=(5,),
    verified=(1, 5),
    slots=(128,),
    inputs=256,
    outputs=128,
    rows=(3,),
    rotations=(768,),
    train_length=130,
    layers=1,
    vocab=64,
)


@dataclasses.dataclass(frozen=True)
class Bench:
    """What every case needs: sizes, which kernel, whether it is interpreted, the chip's published figures."""

    sizes: Sizes
    kernel: str
    interpret: bool
    chip: Chip | None

    @property
    def options(self) -> dict[str, Any]:
        return {"implementation": self.kernel, "interpret": self.interpret}

    def loop(self, step: Callable, carry: Any, operands: Sequence[Any], bound_us: float | None) -> float:
        """Microseconds of one ``carry = step(carry, *operands[i])``, cycling through ``operands``.

        The steps run in one program, so that no dispatch is timed, and depend on each other.
        """
        estimate = max(bound_us or 0.0, 10.0) * len(operands)
        rounds = 1 if self.interpret else max(2, math.ceil(_LOOP_US / estimate))

        @jax.jit
        def run(carry, operands):
            def body(_, carry):
                for each in operands:
                    carry = step(carry, *each)
                return carry

            return lax.fori_loop(0, rounds, body, carry)

        jax.block_until_ready(run(carry, operands))
        best = math.inf
        for _ in range(_REPEATS):
            start = time.perf_counter()
            jax.block_until_ready(run(carry, operands))
            best = min(best, time.perf_counter() - start)
        return 1e6 * best / (rounds * len(operands))

    def bound_us(self, moved: float, operations: float = 0.0) -> float | None:
        """Microseconds that published bandwidth and bfloat16 rate allow; None for a chip not listed."""
        if self.chip is None:
            return None
        rate = self.chip.bf16 / self.chip.devices
        return 1e6 * max(moved / self.chip.device_bandwidth, operations / rate)

    def timed(self, us: float, moved: float, bound: float | None) -> dict[str, Any]:
        """A case's result: time, what it read a second, and its distance from the bound."""
        result = {"us": round(us, 2), "gb_per_s": round(1e-3 * moved / us, 1)}
        return result if bound is None else result | {"bound_us": round(bound, 2), "of_bound": bound / us}


def compare(got: Any, want: Any, tolerance: float) -> dict[str, Any]:
    """Largest error of any leaf, relative to the leaf's largest value (at least 1)."""
    errors = []
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = (np.asarray(z.astype(jnp.float32), np.float64) for z in (x, y))
        errors.append(np.abs(x - y).max() / max(1.0, np.abs(y).max()))
    # numpy's maximum keeps nan, which is within no tolerance.
    worst = float(np.max(errors))
    # JSON has no nan.
    error = worst if math.isfinite(worst) else str(worst)
    return {"error": error, "tolerance": tolerance, "passed": worst <= tolerance}


def exactly(function: Callable, *args: Any) -> Any:
    """The function with every float32 product in full precision."""
    with jax.default_matmul_precision("highest"):
        return jax.jit(function)(*args)


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def widen(tree: Any) -> Any:
    """Floats of more than 8 bits in float32."""
    wide = {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)}
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype in wide else x, tree)


def binary_tree(nodes: int) -> np.ndarray:
    """bool [N, N] ancestors, self included, of the tree in which node i hangs from node (i - 1) // 2."""
    seen = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        seen[node] |= seen[(node - 1) // 2]
    return seen


def tree_problem(sizes: Sizes, nodes: int, slots: int, cache: str, *, seed: int = 0) -> tuple[tuple, dict]:
    """Arguments of ``tree_attention`` for one row that fills ``slots`` less a few, which hold nan."""
    spare = 3 if slots > nodes + 3 else 0
    length = slots - nodes - spare
    shape = (1, sizes.kv_heads, slots, sizes.dim)
    options: dict[str, jax.Array] = {}
    keys, values = normal(seed + 1, shape), normal(seed + 2, shape)
    if cache == "int8":
        (keys, k_scale), (values, v_scale) = quantize_per_token(keys), quantize_per_token(values)
        options = {"k_scale": k_scale.at[:, :, slots - spare :].set(jnp.nan)}
        options["v_scale"] = v_scale.at[:, :, slots - spare :].set(jnp.nan)
    else:
        keys, values = (x.at[:, :, slots - spare :].set(jnp.nan).astype(cache) for x in (keys, values))
    words = pack_ancestors(jnp.asarray(binary_tree(nodes))[None])
    q = normal(seed, (1, nodes, sizes.heads, sizes.dim))
    return (q, keys, values, words, jnp.full((1,), length, jnp.int32)), options


FORMS = {"W8A8": (8, True, 0), "W4A8": (4, True, 128), "W4A16": (4, False, 128), "W8A16": (8, False, 0)}


def product_problem(sizes: Sizes, form: str, rows: int, *, seed: int = 0) -> dict[str, jax.Array]:
    """Arguments of ``quant_matmul``; weights are uniform over all their values."""
    bits, integer, group = FORMS[form]
    shape = (sizes.inputs, sizes.outputs)
    limit = 2 ** (bits - 1)
    w = jax.random.randint(jax.random.key(seed), shape, -limit, limit, jnp.int8)
    scales = (sizes.inputs // group, sizes.outputs) if group else (sizes.outputs,)
    w_scale = jax.random.uniform(jax.random.key(seed + 1), scales, minval=0.5, maxval=1.5) / limit
    problem = {"x": normal(seed + 2, (rows, sizes.inputs)), "w": pack_int4(w) if bits == 4 else w}
    problem["w_scale"] = w_scale
    if integer:
        problem["x"], problem["x_scale"] = quantize_per_token(problem["x"])
    return problem
