"""Integer forms of activations and weights that `quant_matmul` reads."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.errors import require


def quantize_per_token(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Symmetric int8 of each row: float [..., K] to int8 [..., K] and float32 scales [...].

    The largest magnitude of a row maps to 127; a row of zeros gets scale 1, and one that holds a number that
    is not finite a scale that is not, so that its products are not either. `x ~ int8 * scale`. A row's
    result does not depend on how many rows there are: compilers turn divisions into products with reciprocals
    or not as the shapes suggest, and change the last bit, so that the reciprocals are written out here.
    """
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) * np.float32(1 / 127)
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
    return jnp.round(wide * (1 / scale)[..., None]).astype(jnp.int8), scale


def pack_int4(w: jax.Array) -> jax.Array:
    """Pack integers of [-8, 7], [..., K, N] of an integer dtype, into int8 [..., K / 2, N].

    Row 2r is the low nibble of byte row r and row 2r + 1 the high one, so that any even split of K splits the
    bytes.

    Raises:
      KernelError: K is odd.
    """
    require(w.shape[-2] % 2 == 0, "pack_int4", f"the number of rows must be even, got {w.shape}")
    pairs = w.astype(jnp.int32).reshape(*w.shape[:-2], -1, 2, w.shape[-1])
    return ((pairs[..., 0, :] & 15) | (pairs[..., 1, :] << 4)).astype(jnp.int8)


def nibbles(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Signed low and high nibbles, int32 of the packed shape."""
    wide = packed.astype(jnp.int32)
    return (wide << 28) >> 28, wide >> 4


def unpack_int4(packed: jax.Array) -> jax.Array:
    """Inverse of `pack_int4`: int8 [..., K / 2, N] to int8 [..., K, N]."""
    pairs = jnp.stack(nibbles(packed), axis=-2)
    return pairs.reshape(*packed.shape[:-2], -1, packed.shape[-1]).astype(jnp.int8)
