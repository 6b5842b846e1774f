"""Matrix product with 8- or 4-bit weights and integer or float activations, dequantised as it accumulates.

W8A8 and W4A8 multiply integers and accumulate in int32; W8A16 and W4A16 widen the weights. Scales are per
output channel, or per group of rows and channel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.dispatch import Implementation, Interpret, Way, run
from kernels_pallas.errors import require
from kernels_pallas.quant_matmul import cpu, gpu, tpu
from kernels_pallas.quant_matmul.packing import pack_int4, quantize_per_token, unpack_int4
from kernels_pallas.quant_matmul.reference import quant_matmul_reference

__all__ = ["pack_int4", "quant_matmul", "quantize_per_token", "unpack_int4"]

_OP = "quant_matmul"


def quant_matmul(
    x: jax.Array,
    w: jax.Array,
    w_scale: jax.Array,
    *,
    x_scale: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    implementation: Implementation = "auto",
    interpret: Interpret = None,
) -> jax.Array:
    """`(x * x_scale) @ (w * w_scale)`.

    Args:
      x: [..., K] float32, bfloat16 or float16; or int8 with `x_scale`, see `quantize_per_token`.
      w: int8 [K, N], or int8 [K / 2, N] holding two 4-bit rows a byte, see `pack_int4`. Which one follows
        from K.
      w_scale: float [N], or [K / group, N] for groups of consecutive rows.
      x_scale: float [...], one a row of x.
      out_dtype: x's dtype by default, bfloat16 for int8 x.
      implementation: "xla" everywhere, the "tpu" and "gpu" (Hopper) kernels, the "cpu" kernel, which a C++
        compiler makes on first use, or "auto", see `choose`.
      interpret: see `kernels_pallas.dispatch.resolve_interpret`.

    Returns:
      [..., N] of out_dtype. Products accumulate in int32 within a group for int8 x, and in float32 otherwise.

    Raises:
      KernelError: inconsistent shapes or dtypes, or an implementation that does not take them.
    """
    packed = _check(x, w, w_scale, x_scale)
    k, n = x.shape[-1], w.shape[1]
    rows = x.reshape(-1, k)
    row_scale = None if x_scale is None else x_scale.reshape(-1)
    groups = w_scale.reshape(-1, n)
    if out_dtype is None:
        out_dtype = jnp.bfloat16 if x.dtype == jnp.int8 else x.dtype
    out_dtype = jnp.dtype(out_dtype)
    options: dict[str, Any] = {"packed": packed, "out_dtype": out_dtype}
    ways = {
        "xla": Way(functools.partial(quant_matmul_reference, **options)),
        "tpu": Way(functools.partial(_tpu, **options), tpu.refusal(rows, w, groups, packed)),
        "gpu": Way(functools.partial(_gpu, **options), gpu.refusal(rows, w, groups)),
        "cpu": Way(functools.partial(cpu.quant_matmul_cpu, **options), cpu.KERNEL.refusal),
    }
    out = run(_OP, ways, (rows, row_scale, w, groups), implementation, interpret)
    return out.reshape(*x.shape[:-1], n)


def _tpu(*arguments: Any, **options: Any) -> jax.Array:
    return tpu.quant_matmul_tpu(*arguments, int8=tpu.has_int8_products(), **options)


def _gpu(*arguments: Any, **options: Any) -> jax.Array:
    # Imported here for the reason that kernels_pallas.hopper gives.
    from kernels_pallas.quant_matmul.hopper import quant_matmul_hopper

    return quant_matmul_hopper(*arguments, **options)


def _check(x, w, w_scale, x_scale) -> bool:
    """Whether w is packed; refuses what does not fit together."""
    require(
        x.ndim > 0 and w.ndim == 2, _OP, f"x must be [..., K] and w of rank 2, got {x.shape} and {w.shape}"
    )
    require(w.dtype == jnp.int8, _OP, f"w must be int8 (4-bit weights: from pack_int4), got {w.dtype}")
    k, n = x.shape[-1], w.shape[1]
    require(
        w.shape[0] == k or 2 * w.shape[0] == k,
        _OP,
        f"w has {w.shape[0]} rows; K = {k} needs {k}, or {k // 2} packed",
    )
    require(
        (x.dtype == jnp.int8) == (x_scale is not None),
        _OP,
        f"int8 activations come with x_scale and others without; x is {x.dtype}",
    )
    require(
        x.dtype == jnp.int8 or jnp.issubdtype(x.dtype, jnp.floating),
        _OP,
        f"x is {x.dtype}, expected int8 or float",
    )
    if x_scale is not None:
        require(x_scale.shape == x.shape[:-1], _OP, f"x_scale must be {x.shape[:-1]}, got {x_scale.shape}")
    require(
        w_scale.shape[-1:] == (n,) and w_scale.ndim in (1, 2),
        _OP,
        f"w_scale must end in N = {n}, got {w_scale.shape}",
    )
    if w_scale.ndim == 2:
        groups = w_scale.shape[0]
        require(
            groups > 0 and k % groups == 0 and (w.shape[0] % groups == 0),
            _OP,
            f"{groups} groups do not divide the {w.shape[0]} rows of w",
        )
    return w.shape[0] != k
