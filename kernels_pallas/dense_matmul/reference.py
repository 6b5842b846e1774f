"""Matrix product in plain jnp: the oracle, and what runs wherever there is no kernel."""

import jax
import jax.numpy as jnp


def dense_matmul_reference(
    x: jax.Array, w: jax.Array, *, transposed: bool, out_dtype: jnp.dtype
) -> jax.Array:
    """See `dense_matmul` in the package; x is [M, K]."""
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    alone = x.shape[0] == 1 and w.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
    if alone:
        # XLA:CPU multiplies a single bf16 row on a scalar path, 10-20 times slower than two rows.
        x = jnp.concatenate([x, x])
    out = jax.lax.dot_general(x, w, dims, preferred_element_type=jnp.float32)
    return (out[:1] if alone else out).astype(out_dtype)
