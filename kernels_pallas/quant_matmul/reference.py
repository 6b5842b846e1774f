"""Quantised matrix product in plain jnp: the oracle, and what runs on backends without a kernel."""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.quant_matmul.packing import unpack_int4


def quant_matmul_reference(
    x: jax.Array,
    x_scale: jax.Array | None,
    w: jax.Array,
    w_scale: jax.Array,
    *,
    packed: bool,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """See `quant_matmul` in the package; x is [M, K], x_scale [M] and w_scale [K / group, N]."""
    groups = w_scale.shape[0]
    if packed:
        w = unpack_int4(w)
    if x_scale is not None:
        out = _integer_groups(x, w, w_scale)
        return (out * x_scale[:, None]).astype(out_dtype)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    if groups == 1:
        out = jnp.dot(x, w.astype(x.dtype), preferred_element_type=jnp.float32, precision=precision)
        return (out * w_scale).astype(out_dtype)
    scaled = w.reshape(groups, -1, w.shape[1]).astype(jnp.float32) * w_scale[:, None]
    scaled = scaled.reshape(w.shape).astype(x.dtype)
    return jnp.dot(x, scaled, preferred_element_type=jnp.float32, precision=precision).astype(out_dtype)


def _integer_groups(x: jax.Array, w: jax.Array, w_scale: jax.Array) -> jax.Array:
    """float32 [M, N]: sum over groups of int32 products times the group's scales."""
    groups = w_scale.shape[0]

    def step(total, group):
        x, w, scale = group
        return total + jnp.dot(x, w, preferred_element_type=jnp.int32) * scale, None

    xs = jnp.moveaxis(x.reshape(x.shape[0], groups, -1), 1, 0)
    zero = jnp.zeros((x.shape[0], w.shape[1]), jnp.float32)
    return lax.scan(step, zero, (xs, w.reshape(groups, -1, w.shape[1]), w_scale))[0]
