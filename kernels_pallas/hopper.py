"""What the Hopper kernels share.

Importing it imports jax's Mosaic GPU modules, which need absl-py (jax does not install it) and half a second;
so only the modules that run a kernel do.
"""

import inspect
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.errors import require

MULTIPROCESSORS = 132  # of an H100 SXM and of an H200
SHARED_BYTES = 227 << 10  # that one thread block may have


def has_simulator() -> bool:
    """Whether this jax simulates Mosaic GPU kernels on a CPU (0.12 and later)."""
    return hasattr(plgpu, "InterpretGPUParams")


def simulated(op: str, interpret: Any) -> Any:
    """`interpret` as `plgpu.kernel` takes it: there is no generic interpreter, so True is the simulator.

    Raises:
      KernelError: this jax has no simulator.
    """
    if interpret is not True:
        return interpret
    require(
        has_simulator(),
        op,
        f"the 'gpu' kernel is interpreted by jax 0.12 or later, not {jax.__version__}; use 'xla'",
    )
    return plgpu.InterpretGPUParams()  # type: ignore[attr-defined]


def load(ref: Any, layout: Any, optimized: bool) -> jax.Array:
    """The whole of `ref` in registers."""
    # jax 0.10 takes an index beside the reference, later versions do not.
    index = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


def swizzled(width: int, itemsize: int = 2) -> tuple[Any, Any]:
    """The transforms of a shared-memory array whose rows are read as wgmma operands, `width` at a time.

    width x itemsize is 32, 64 or 128 bytes; both operands of one product must have the same.
    """
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * itemsize)
