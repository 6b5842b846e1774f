"""Attention of the N nodes of a draft tree over a per-row cache, with the log-sum-exp needed to merge partial
results.

The tree's own keys and values are already in the cache, behind the committed prefix; which nodes see which is
one bit each (SpecInfer's topology-aware mask, arXiv:2305.09781, as 32-bit words). Leaving the words out
attends to the prefix alone, and lengths of 0 attend to the tree alone, so that `merge` joins a prefix and a
tree, or the shards of a cache split over devices.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.dispatch import Implementation, Interpret, Way, run
from kernels_pallas.errors import KernelError, require
from kernels_pallas.tree_attention import gpu, tpu
from kernels_pallas.tree_attention.masks import apply_window, node_positions, pack_ancestors, unpack_ancestors
from kernels_pallas.tree_attention.reference import tree_attention_reference

__all__ = ["merge", "pack_ancestors", "tree_attention", "unpack_ancestors"]

_OP = "tree_attention"
_QUERY_DTYPES = ("float32", "bfloat16", "float16")
_CACHE_DTYPES = (*_QUERY_DTYPES, "int8", "float8_e4m3fn", "float8_e5m2")


def tree_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ancestors: jax.Array | None,
    lengths: jax.Array,
    *,
    positions: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    block_tables: jax.Array | None = None,
    slot_offset: jax.Array | int = 0,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    out_dtype: jnp.dtype | None = None,
    block_kv: int | None = None,
    implementation: Implementation = "auto",
    interpret: Interpret = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend from tree nodes to a cache: the committed prefix, and the tree nodes each node descends from.

    Row b's prefix fills slots `[0, lengths[b])`; node i's key and value are in slot `lengths[b] + i`. Slots
    past the tree are neither read into the result nor, block by block, loaded.

    Args:
      q: [B, N, Hq, D] float32, bfloat16 or float16.
      k, v: [B, Hkv, S, D], or pages [P, Hkv, block, D] with `block_tables`; Hkv divides Hq. Float, or 8-bit
        (int8, float8_e4m3fn, float8_e5m2) with scales (which fp8 may omit).
      ancestors: int32 [B, N, ceil(N / 32)] from `pack_ancestors`, self bit included; None attends to the
        prefix alone.
      lengths: int32 [B] committed slots a row.
      positions: int32 [B, N], used by `window` alone. By default `lengths` plus the number of proper
        ancestors.
      k_scale, v_scale: float [B, Hkv, S] (pages: [P, Hkv, block]); value = stored value * scale.
      block_tables: int32 [B, nblocks], the page of each block of a row. Entries of unused blocks may hold
        anything.
      slot_offset: int32 scalar or [B]: which slot of the row the cache's first slot is, for a cache sharded
        along S.
      scale: multiplies the scores; D ** -0.5 by default.
      window: positions seen, the query's own included. Siblings share a position and so a window edge.
      softcap: scores become `softcap * tanh(scores / softcap)`.
      out_dtype: dtype of the output, q's by default. Ask for float32 when the result is to be merged.
      block_kv: slots a kernel handles at a time; chosen by heuristic when None. Pages fix it to their own
        size.
      implementation: "xla" everywhere, "tpu" and "gpu" (Hopper) kernels, or "auto", see `choose`.
      interpret: see `kernels_pallas.dispatch.resolve_interpret`.

    Returns:
      out [B, N, Hq, D], and float32 [B, N, Hq] log-sum-exp of the scaled scores. A node that sees nothing
      gets zeros and -inf.

    Raises:
      KernelError: inconsistent shapes or dtypes, or an implementation that does not take them.
    """
    _check(q, k, v, ancestors, lengths, positions, k_scale, v_scale, block_tables, window, softcap)
    nodes = q.shape[1]
    lengths = lengths.astype(jnp.int32)
    if window is not None and positions is None:
        if ancestors is None:
            raise KernelError(f"{_OP}: a window over the prefix alone needs positions [B, N]")
        positions = node_positions(ancestors, lengths)
    if positions is None:
        positions = jnp.zeros((q.shape[0], nodes), jnp.int32)
    words, floor = apply_window(ancestors, positions.astype(jnp.int32), window)
    offset = jnp.broadcast_to(jnp.asarray(slot_offset, jnp.int32), lengths.shape)
    out_dtype = jnp.dtype(q.dtype if out_dtype is None else out_dtype)
    scale = q.shape[3] ** -0.5 if scale is None else scale

    arguments = (q, k, v, words, lengths - offset, floor - offset[:, None])
    options: dict[str, Any] = {
        "k_scale": k_scale,
        "v_scale": v_scale,
        "block_tables": block_tables,
        "scale": scale,
        "softcap": softcap,
        "out_dtype": out_dtype,
    }
    own_kernel = functools.partial(
        tpu.tree_attention_tpu, **options, windowed=window is not None, block_kv=block_kv
    )
    asked = (q, k, block_tables, block_kv)
    ways = {
        "xla": Way(functools.partial(tree_attention_reference, **options)),
        "tpu": Way(own_kernel, tpu.refusal(*asked)),
        "gpu": Way(functools.partial(_gpu, **options), gpu.refusal(*asked)),
    }
    out: tuple[jax.Array, jax.Array] = run(_OP, ways, arguments, implementation, interpret)
    return out


def _gpu(*arguments: Any, out_dtype: jnp.dtype, **options: Any) -> tuple[jax.Array, jax.Array]:
    # Imported here for the reason that kernels_pallas.hopper gives.
    from kernels_pallas.tree_attention.hopper import tree_attention_hopper

    out, lse = merge(*tree_attention_hopper(*arguments, **options))
    return out.astype(out_dtype), lse


def merge(outs: jax.Array, lses: jax.Array, axis: int = 0) -> tuple[jax.Array, jax.Array]:
    """Join attention over disjoint sets of keys by their log-sum-exps.

    Args:
      outs: [parts, ..., D] outputs stacked along `axis`; float32 parts lose nothing.
      lses: [parts, ...] log-sum-exps stacked along the same axis; -inf marks a part without keys.
      axis: the stacking axis, non-negative.

    Returns:
      The output (dtype of `outs`) and float32 log-sum-exp over the union of the keys, without the stacking
      axis.
    """
    require(axis >= 0, "merge", f"axis must count from the front, got {axis}")
    require(
        outs.shape[:-1] == lses.shape,
        "merge",
        f"outs {outs.shape} and lses {lses.shape} must agree up to the last axis",
    )
    lse = jax.nn.logsumexp(lses, axis=axis, keepdims=True)
    weights = jnp.exp(lses - jnp.where(lse == -jnp.inf, 0.0, lse))
    out = jnp.sum(weights[..., None] * outs.astype(jnp.float32), axis=axis)
    return out.astype(outs.dtype), jnp.squeeze(lse, axis)


def _check(q, k, v, ancestors, lengths, positions, k_scale, v_scale, block_tables, window, softcap) -> None:
    require(q.ndim == 4, _OP, f"q must be [B, N, Hq, D], got {q.shape}")
    batch, nodes, heads, dim = q.shape
    require(
        k.ndim == 4 and k.shape == v.shape,
        _OP,
        f"k and v must be alike of rank 4, got {k.shape} and {v.shape}",
    )
    require(k.dtype == v.dtype, _OP, f"k and v must share a dtype, got {k.dtype} and {v.dtype}")
    require(k.shape[3] == dim, _OP, f"head size of q is {dim}, of the cache {k.shape[3]}")
    require(
        heads % k.shape[1] == 0,
        _OP,
        f"{heads} query heads are not a multiple of {k.shape[1]} key/value heads",
    )
    require(q.dtype.name in _QUERY_DTYPES, _OP, f"q is {q.dtype}, expected one of {_QUERY_DTYPES}")
    require(k.dtype.name in _CACHE_DTYPES, _OP, f"the cache is {k.dtype}, expected one of {_CACHE_DTYPES}")
    require(lengths.shape == (batch,), _OP, f"lengths must be [{batch}], got {lengths.shape}")
    if ancestors is not None:
        expected = (batch, nodes, -(-nodes // 32))
        require(
            ancestors.shape == expected and ancestors.dtype == jnp.int32,
            _OP,
            f"ancestors must be int32 {expected} from pack_ancestors, got {ancestors.dtype}{ancestors.shape}",
        )
    if positions is not None:
        require(
            positions.shape == (batch, nodes),
            _OP,
            f"positions must be {(batch, nodes)}, got {positions.shape}",
        )
    require(
        (k_scale is None) == (v_scale is None), _OP, "k_scale and v_scale come together: give both or neither"
    )
    if k_scale is not None and v_scale is not None:
        require(
            k_scale.shape == k.shape[:3] and v_scale.shape == k.shape[:3],
            _OP,
            f"scales must be {k.shape[:3]}, got {k_scale.shape} and {v_scale.shape}",
        )
    else:
        require(k.dtype != jnp.int8, _OP, "an int8 cache needs k_scale and v_scale")
    if block_tables is None:
        require(k.shape[0] == batch, _OP, f"q has {batch} rows, the cache {k.shape[0]}")
    else:
        require(
            block_tables.ndim == 2 and block_tables.shape[0] == batch and block_tables.dtype == jnp.int32,
            _OP,
            f"block_tables must be int32 [{batch}, nblocks], got {block_tables.dtype} {block_tables.shape}",
        )
    require(window is None or window > 0, _OP, f"window must be positive or None, got {window}")
    require(softcap is None or softcap > 0, _OP, f"softcap must be positive or None, got {softcap}")
