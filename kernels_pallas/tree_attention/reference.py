"""Tree attention in plain jnp: the oracle, and the implementation for every backend without a kernel."""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.tree_attention.masks import unpack_ancestors


def compute_dtype(q: jax.Array, k: jax.Array) -> jnp.dtype:
    """Dtype of the products: float32 when either side is, else the query's; 8-bit caches are widened."""
    if jnp.dtype(k.dtype).itemsize == 1:
        return q.dtype
    return jnp.promote_types(q.dtype, k.dtype)


def gather_blocks(cache: jax.Array, block_tables: jax.Array, live: jax.Array) -> jax.Array:
    """Lay a block-mapped cache out contiguously.

    Args:
      cache: [P, Hkv, block, ...] pages.
      block_tables: int32 [B, nblocks] page of each block of a row.
      live: int32 [B] blocks in use; entries past them may hold anything.

    Returns:
      [B, Hkv, nblocks * block, ...].
    """
    used = jnp.arange(block_tables.shape[1])[None] < live[:, None]
    pages = cache[jnp.where(used, block_tables, 0)]
    rows = jnp.swapaxes(pages, 1, 2)
    return rows.reshape(*rows.shape[:2], -1, *rows.shape[4:])


def tree_attention_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    words: jax.Array | None,
    lengths: jax.Array,
    floor: jax.Array,
    *,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    block_tables: jax.Array | None,
    scale: float,
    softcap: float | None,
    out_dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """See `tree_attention` in the package; `lengths` and `floor` count from the cache's first slot."""
    batch, nodes, heads, dim = q.shape
    tree_nodes = 0 if words is None else nodes
    if block_tables is not None:
        block = k.shape[2]
        live = -(-jnp.maximum(lengths + tree_nodes, 0) // block)
        k, v = gather_blocks(k, block_tables, live), gather_blocks(v, block_tables, live)
        k_scale = None if k_scale is None else gather_blocks(k_scale, block_tables, live)
        v_scale = None if v_scale is None else gather_blocks(v_scale, block_tables, live)
    kv_heads, slots = k.shape[1:3]

    slot = jnp.arange(slots)
    node = slot[None] - lengths[:, None]
    visible = (node < 0)[:, None] & (slot[None, None] >= floor[:, :, None])
    if words is not None:
        tree = jnp.take_along_axis(
            unpack_ancestors(words, nodes),
            jnp.broadcast_to(jnp.clip(node, 0, nodes - 1)[:, None], (batch, nodes, slots)),
            axis=2,
        )
        visible |= tree & ((node >= 0) & (node < nodes))[:, None]
    written = (node < tree_nodes)[:, None]

    dtype = compute_dtype(q, k)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    grouped = q.astype(dtype).reshape(batch, nodes, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum(
        "bnhgd,bhsd->bhngs", grouped, k.astype(dtype), preferred_element_type=jnp.float32, precision=precision
    )
    scores *= scale
    if k_scale is not None:
        scores *= k_scale[:, :, None, None].astype(jnp.float32)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)

    visible = visible[:, None, :, None]
    scores = jnp.where(visible, scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1)
    if v_scale is not None:
        weights *= jnp.where(written, v_scale.astype(jnp.float32), 0.0)[:, :, None, None]
    # Unwritten slots may hold anything, and 0 * nan is nan.
    values = jnp.where(written[..., None], v.astype(dtype), 0)
    # In this order of axes: XLA's CPU backend has no bfloat16 product that also transposes its result.
    out = jnp.einsum(
        "bhngs,bhsd->bhngd",
        weights.astype(dtype),
        values,
        preferred_element_type=jnp.float32,
        precision=precision,
    )
    out /= jnp.where(total == 0, 1.0, total)[..., None]
    lse = jnp.log(total) + peak[..., 0]
    out, lse = jnp.swapaxes(out, 1, 2), jnp.swapaxes(lse, 1, 2)
    return out.reshape(batch, nodes, heads, dim).astype(out_dtype), lse.reshape(batch, nodes, heads)
