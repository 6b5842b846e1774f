"""Which attention a draft is trained with: one that keeps its weights, or one whose memory is linear in T."""

from __future__ import annotations

import functools
from typing import Literal

import jax
from jax.sharding import Mesh, PartitionSpec

from eaglejax.drafts.eagle_config import EagleConfig
from eaglejax.drafts.eagle_unroll import StepAttention, step_attention
from eaglejax.errors import ConfigError

Choice = Literal["auto", "plain", "linear"]


def training_attention(
    choice: Choice, config: EagleConfig, documents: jax.Array, *, remat: bool, mesh: Mesh | None = None
) -> StepAttention:
    """The attention of ``unroll`` over packed ``documents`` [B, T].

    "plain" holds the weights [B, Hq, T, T] of every chain step until the backward pass, with ``remat`` those
    of one step at a time. "linear" (``kernels_pallas.ttt_attention``) never holds them; with several devices
    in ``mesh`` each computes its own rows. "auto": plain on a CPU and where layers have windows, which
    "linear" does not know. Raises ConfigError for "linear" with windows.
    """
    windows = any(config.window(layer) is not None for layer in range(config.num_layers))
    if choice == "auto":
        choice = "plain" if windows or jax.default_backend() == "cpu" else "linear"
    if choice == "plain":
        return _recomputed if remat else step_attention
    if windows:
        raise ConfigError("run.attention = 'linear' knows no windows, which this draft has; use 'plain'")
    return functools.partial(_linear, documents, mesh)


def _recomputed(
    q: jax.Array,
    keys: list[jax.Array],
    values: list[jax.Array],
    base: jax.Array,
    *,
    scale: float,
    window: int | None,
) -> jax.Array:
    attend = functools.partial(step_attention, scale=scale, window=window)
    return jax.checkpoint(attend)(q, keys, values, base)


def _linear(
    documents: jax.Array,
    mesh: Mesh | None,
    q: jax.Array,
    keys: list[jax.Array],
    values: list[jax.Array],
    base: jax.Array,
    *,
    scale: float,
    window: int | None,
) -> jax.Array:
    del base, window  # the documents say the same, and there is no window
    # Importing Pallas takes a third of a second, which those who do not use it are spared.
    from kernels_pallas.ttt_attention import ttt_attention

    def attend(
        q: jax.Array, keys: list[jax.Array], values: list[jax.Array], documents: jax.Array
    ) -> jax.Array:
        return ttt_attention(q, keys, values, document_ids=documents, scale=scale)

    if mesh is not None and mesh.size > 1:
        # A kernel is one opaque call, which the partitioner would run on all rows everywhere.
        rows = PartitionSpec("data")
        attend = jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    return attend(q, keys, values, documents)
