"""Training-time-test attention in plain jnp: the oracle, and what runs on backends without a kernel."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def ttt_attention_reference(
    q: jax.Array,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    document_ids: jax.Array,
    *,
    scale: float,
    query_chunk: int,
) -> jax.Array:
    """See `ttt_attention` in the package.

    `query_chunk` queries are handled at a time and recomputed in the backward pass, so that no more than
    query_chunk x T scores of a head exist at once.
    """
    batch, length = q.shape[:2]
    chunk = min(query_chunk, length)
    padding = -length % chunk
    tokens = jnp.arange(length)

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, -1, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def attend(part):
        rows, row_tokens, row_documents, row_keys, row_values = part
        visible = (tokens[None, None] <= row_tokens[0][None, :, None]) & (
            document_ids[:, None] == row_documents[:, :, None]
        )
        return _attend_rows(rows, keys[0], values[0], row_keys, row_values, visible, scale)

    parts = (
        split(q),
        split(tokens[None].repeat(batch, 0)),
        split(document_ids),
        [split(k) for k in keys[1:]],
        [split(v) for v in values[1:]],
    )
    out = jnp.moveaxis(lax.map(attend, parts), 0, 1)
    return out.reshape(batch, -1, *out.shape[3:])[:, :length]


def _attend_rows(q, k, v, diagonal_keys, diagonal_values, visible, scale):
    batch, rows, heads, dim = q.shape
    kv_heads = k.shape[2]
    dtype = q.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    grouped = q.reshape(batch, rows, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum(
        "bthgd,bshd->bhgts", grouped, k, preferred_element_type=jnp.float32, precision=precision
    )
    scores = jnp.where(visible[:, None, None], scores * scale, -jnp.inf)
    diagonal = [
        jnp.einsum(
            "bthgd,bthd->bhgt", grouped.astype(jnp.float32), d.astype(jnp.float32), precision="highest"
        )
        for d in diagonal_keys
    ]
    scores = jnp.concatenate([scores, *(d[..., None] * scale for d in diagonal)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)
    prefix = weights[..., : k.shape[1]].astype(dtype)
    # In this order of axes: XLA's CPU backend has no bfloat16 product that also transposes its result.
    out = jnp.einsum("bhgts,bshd->bhgtd", prefix, v, preferred_element_type=jnp.float32, precision=precision)
    out = jnp.transpose(out, (0, 3, 1, 2, 4))
    for step, value in enumerate(diagonal_values):
        weight = jnp.transpose(weights[..., k.shape[1] + step], (0, 3, 1, 2))
        out += weight[..., None] * value.astype(jnp.float32)[:, :, :, None]
    return out.reshape(batch, rows, heads, dim).astype(dtype)
