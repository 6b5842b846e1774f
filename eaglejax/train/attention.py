"""Which attention a draft is trained with: one that keeps its weights, or one whose memory is linear in T."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from eaglejax import devices
from eaglejax.drafts.passes import StepAttention, step_attention
from eaglejax.errors import ConfigError

_LEAST_CHUNK = 64
"""Queries that are handled together on a CPU, at least."""


def training_attention(
    documents: jax.Array, *, windows: bool, remat: bool, mesh: Mesh | None = None
) -> StepAttention:
    """The attention of a draft's passes over packed ``documents`` [B, T]; ``windows``: some layer has one.

    On a CPU, and for drafts with windows, it is ``step_attention``, which holds the weights [B, Hq, T, T] of
    every chain step until the backward pass. Elsewhere, and with ``remat``, it is
    ``kernels_pallas.ttt_attention``, which computes them anew there, a few queries at a time; with several
    devices in ``mesh`` each takes its own rows. Raises ConfigError for ``remat`` with windows, which that one
    does not know.
    """
    if remat and windows:
        raise ConfigError("run.remat is set, and attention with windows, as this draft has, cannot do it")
    asked = devices.current().operation("ttt_attention")
    if windows and asked != "auto":
        raise ConfigError(
            f"ttt_attention is to run on {asked!r}, which knows no attention with windows, as this draft has"
        )
    if windows or (jax.default_backend() == "cpu" and not remat and asked == "auto"):
        return step_attention
    return functools.partial(_linear, documents, mesh, asked)


def _linear(
    documents: jax.Array,
    mesh: Mesh | None,
    implementation: Any,
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

    options: dict[str, Any] = {"implementation": implementation}
    if implementation == "auto" and jax.default_backend() == "cpu":
        options = {"implementation": "xla", "block_q": max(_LEAST_CHUNK, -(-q.shape[1] // 4))}

    def attend(
        q: jax.Array, keys: list[jax.Array], values: list[jax.Array], documents: jax.Array
    ) -> jax.Array:
        return ttt_attention(q, keys, values, document_ids=documents, scale=scale, **options)

    if mesh is not None and mesh.size > 1:
        # A kernel is one opaque call, which the partitioner would run on all rows everywhere.
        rows = PartitionSpec("data")
        attend = jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    return attend(q, keys, values, documents)
