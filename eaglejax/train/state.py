"""One optimiser update as a pure, jitted function of a state, and the state itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from eaglejax import pytree
from eaglejax.train.batch import Batch
from eaglejax.train.family import Weights
from eaglejax.train.objective import Objective
from eaglejax.train.objectives import Head, Metrics
from eaglejax.train.registry import training_of


@pytree.dataclass
class TrainState:
    """``weights``: trained masters, f32. ``optimizer``: Optax state. ``update`` [] int32: updates tried,
    which also is the next update's random key. ``skipped`` [] int32: those left out for a NaN; ``discarded``
    [] int32: documents left out for a NaN in their features."""

    weights: Weights
    optimizer: Any
    update: jax.Array
    skipped: jax.Array
    discarded: jax.Array


@pytree.dataclass
class UpdateReport:
    """``loss`` and ``gradient_norm`` [] f32 of one update, ``applied`` [] bool, ``discarded`` [] int32
    documents of this update, and the metrics' sums."""

    loss: jax.Array
    gradient_norm: jax.Array
    applied: jax.Array
    discarded: jax.Array
    metrics: Metrics


def init_state(weights: Weights, transform: optax.GradientTransformation) -> TrainState:
    """A state before its first update. Its arrays are copies: updates give their buffers away."""
    weights = jax.tree.map(lambda w: jnp.array(w, jnp.float32, copy=True), weights)
    update, skipped, discarded = (jnp.zeros((), jnp.int32) for _ in range(3))
    return TrainState(weights, transform.init(weights), update, skipped, discarded)


def discard_nonfinite(batch: Batch) -> tuple[Batch, jax.Array]:
    """The batch without the documents whose features hold a NaN or an infinity, and how many those are.

    They keep their place: features become zero and nothing of them is supervised.
    """
    assert batch.hidden is not None
    bad = ~jnp.all(jnp.isfinite(batch.hidden), axis=-1)
    if batch.aux is not None:
        bad |= ~jnp.all(jnp.isfinite(batch.aux), axis=(-2, -1))
    if batch.log_norm is not None:
        bad |= ~jnp.isfinite(batch.log_norm)
    bad &= batch.documents > 0
    length = batch.tokens.shape[1]

    def spread(bad: jax.Array, documents: jax.Array) -> tuple[jax.Array, jax.Array]:
        affected = jax.ops.segment_max(bad.astype(jnp.int32), documents, num_segments=length + 1) > 0
        return affected[documents], jnp.sum(affected)

    bad, count = jax.vmap(spread)(bad, batch.documents)
    clean = dataclasses.replace(
        batch,
        supervised=batch.supervised & ~bad,
        hidden=jnp.where(bad[..., None], 0, batch.hidden),
        aux=None if batch.aux is None else jnp.where(bad[..., None, None], 0, batch.aux),
        log_norm=None if batch.log_norm is None else jnp.where(bad, 0, batch.log_norm),
    )
    return clean, jnp.sum(count)


def make_update(
    config: Any,
    objective: Objective,
    transform: optax.GradientTransformation,
    frozen: Any,
    head: Head,
    *,
    compute_dtype: Any,
    seed: int,
    remat: bool = False,
    mesh: Mesh | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, UpdateReport]]:
    """The jitted update: (state, batch [M, B, T, ...]) -> (state, report); the state is donated.

    M micro-batches are run one after the other; the denominators of the loss are counted over all of them, so
    that accumulation, devices and padding leave loss and gradient as they are. ``frozen``: what is not
    trained (the target's embedding, and its head where the draft does not train one). An update whose loss or
    gradient is not finite, or that trains no row, changes nothing but the counters. ``remat``, ``mesh``: see
    ``TrainingFamily.loss``.
    """

    family = training_of(config)

    def loss_of(
        weights: Weights, frozen: Any, head: Head, batch: Batch, rows: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        options: dict[str, Any] = {"compute_dtype": compute_dtype, "remat": remat, "mesh": mesh}
        return family.loss(weights, config, objective, frozen, head, batch, rows, key, **options)

    gradient = jax.value_and_grad(loss_of, has_aux=True)

    def update(state: TrainState, batches: Batch, frozen: Any, head: Head) -> tuple[TrainState, UpdateReport]:
        batches, discarded = jax.vmap(discard_nonfinite)(batches)
        micro = batches.tokens.shape[0]
        rows = jnp.sum(jax.vmap(functools.partial(family.trained_rows, objective, head))(batches), axis=0)
        key = jax.random.fold_in(jax.random.key(seed), state.update)

        def one(m: int | jax.Array) -> Any:
            batch = jax.tree.map(lambda x: x[m], batches)
            return gradient(state.weights, frozen, head, batch, rows, jax.random.fold_in(key, m))

        if micro == 1:
            total = one(0)
        else:
            # A loop, so that the program does not grow with the number of micro-batches.
            nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, 0))
            total = jax.lax.fori_loop(0, micro, lambda m, t: jax.tree.map(jnp.add, t, one(m)), nothing)
        (loss, metrics), grads = total
        norm = optax.global_norm(grads)
        good = jnp.isfinite(loss) & jnp.isfinite(norm) & (jnp.max(rows) > 0)
        safe = jax.tree.map(lambda g: jnp.where(good, g, 0), grads)
        changes, optimizer = transform.update(safe, state.optimizer, state.weights)
        weights = optax.apply_updates(state.weights, changes)

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)

        count = jnp.sum(discarded).astype(jnp.int32)
        after = TrainState(
            weights=keep(weights, state.weights),
            optimizer=keep(optimizer, state.optimizer),
            update=state.update + 1,
            skipped=state.skipped + (~good).astype(jnp.int32),
            discarded=state.discarded + count,
        )
        return after, UpdateReport(loss, norm, good, count, metrics)

    jitted = jax.jit(update, donate_argnums=0)
    # Arguments rather than closure: a captured array would be compiled into the program as a constant.
    return lambda state, batch: jitted(state, batch, frozen, head)


def micro_batches(batches: list[Batch]) -> Batch:
    """Batches [B, T, ...] stacked to [M, B, T, ...]."""
    return jax.tree.map(lambda *x: np.stack(x) if isinstance(x[0], np.ndarray) else jnp.stack(x), *batches)


def data_mesh() -> Mesh:
    """All devices on one axis, "data"."""
    return jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))


def shard_batch(batch: Batch, mesh: Mesh, *, leading: int = 0) -> Batch:
    """The batch with its rows spread over the mesh; ``leading`` axes stand before the rows."""
    where = NamedSharding(mesh, PartitionSpec(*(None,) * leading, "data"))
    return jax.device_put(batch, where)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Every array whole on every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))
