"""Products with block weights in plain jnp: the oracle, and what runs where there is no kernel."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.block_matmul.forms import GROUP, Form, unpack


def round_groups(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float [..., K] as int8 [..., K] and float32 scales [..., K / 32]: the largest magnitude of 32 maps to
    127.

    A group of zeros has scale 1, and one that holds a number that is not finite nan. `x ~ int8 * scale`.
    """
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, GROUP)
    scale = jnp.max(jnp.abs(wide), axis=-1) * np.float32(1 / 127)
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
    integers = jnp.round(wide * (1 / scale)[..., None]).astype(jnp.int8).reshape(x.shape)
    return integers, jnp.where(jnp.isfinite(wide).all(-1), scale, jnp.nan)


def block_matmul_reference(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *,
    form: Form,
    columns: int,
    integers: bool,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """See `block_matmul` in the package; x is [M, K], w [E, tiles, bytes] and sizes [E]."""
    numbers = unpack(form, w)  # [E, tiles, 16, K]
    matrices = numbers.reshape(w.shape[0], -1, x.shape[-1])[:, :columns]
    wide = x.astype(jnp.float32)
    if integers:
        rounded, scale = round_groups(x)
        wide = (rounded.reshape(*scale.shape, GROUP) * scale[..., None]).reshape(x.shape)
    if w.shape[0] == 1:
        out = jnp.dot(wide, matrices[0].T, precision=lax.Precision.HIGHEST)
    else:
        out = lax.ragged_dot(wide, jnp.swapaxes(matrices, 1, 2), sizes, precision=lax.Precision.HIGHEST)
    return out.astype(out_dtype)
