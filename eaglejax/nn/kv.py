"""Keys and values of one layer, a slot a token: how they are written, attended and moved.

A token's scales, where the format has them, sit in its slot and move with it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import pytree
from eaglejax.errors import ConfigError
from eaglejax.kv_format import KVFormat, kv_format
from eaglejax.nn import cache as caches
from eaglejax.nn import kv_codec
from eaglejax.nn.attention import attend, attend_with_lse
from eaglejax.nn.cache import SLOTS, Cache, CacheScales, Placement, put_row
from eaglejax.nn.gather import take
from eaglejax.nn.kv_codec import PackedKV, Stored
from eaglejax.tap import tap
from kernels_pallas import cache_attention
from kernels_pallas.foreign import portable_call

CHECK_WRITES = False
"""Whether programs traced from now on look whether their writes fit; for tests, for it asks the host."""


@pytree.dataclass
class KV:
    """``k`` [B, Hkv, S, dk] and ``v`` [B, Hkv, S, dv]: arrays, or ``PackedKV`` in a narrow format."""

    k: Stored
    v: Stored

    @classmethod
    def table(
        cls,
        kv_form: KVFormat,
        *,
        batch: int,
        capacity: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        centred: bool = False,
    ) -> KV:
        """What is held, as ``ArrayInfo`` leaves.

        ``centred``: where keys get a scale as they come, they are stored as differences from the row's first
        one (see ``kv_codec``), which attention without a softcap does not notice. Raises ConfigError.
        """

        def side(dim: int, centred: bool) -> Any:
            return kv_codec.table(kv_form, (batch, kv_heads, capacity, dim), SLOTS, centred=centred)

        return cls(side(key_dim, centred), side(value_dim, False))

    @property
    def capacity(self) -> int:
        """Slots a row (S)."""
        return self.k.shape[2]

    def write(self, k: jax.Array, v: jax.Array, start: jax.Array) -> KV:
        """Put ``k``, ``v`` [B, Hkv, N, d] at slots ``start[b] + (0..N-1)``."""
        return KV(write(self.k, k, start), write(self.v, v, start))

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        at: Placement,
        *,
        sinks: jax.Array | None = None,
        **options: Any,
    ) -> tuple[jax.Array, KV]:
        """Write N new tokens, then attend: ([B, N, Hq, dv], the cache with them, uncommitted).

        ``q`` [B, N, Hq, dk], ``k``, ``v`` [B, N, Hkv, d]. They take the last N of the M slots that
        ``at.visible`` speaks of. ``options``: scale, window and softcap of ``nn.attention.attend``; ``sinks``
        [Hq]: a score of each head that takes its share of the softmax and adds nothing. A new
        token is stored before anything reads it, so that it is seen by the tree it was verified in exactly as
        by all that comes after it.

        A token whose key or value is not finite is stored as zeros, and those that see it, itself included,
        get NaN. Left in the cache it would reach its siblings too, for a weight of zero times NaN is NaN.
        """
        for name, value in (("q", q), ("k", k), ("v", v)):
            tap(name, value)
        (keys, values), sound = store((self.k, self.v), (k, v), at)
        over = (q, keys, values, at.lengths, at.visible, at.positions)
        if sinks is None:
            out = attend(*over, slot_positions=at.slot_positions, **options)
        else:
            out, total = attend_with_lse(*over, slot_positions=at.slot_positions, **options)
            # exp(total) / (exp(total) + exp(sink)), without either.
            out *= jax.nn.sigmoid(total - sinks.astype(jnp.float32))[..., None].astype(out.dtype)
        out = spoil(out, sound, at)
        tap("attention", out)
        return out, KV(keys, values)

    def commit(self, lengths: jax.Array, path: jax.Array | None, kept: jax.Array) -> KV:
        """See ``LayerCache``: the path's slots move next to the committed ones."""
        del kept  # what lies behind the new length is never read
        return self if path is None else KV(move(self.k, lengths, path), move(self.v, lengths, path))

    def insert(self, slot: jax.Array, other: KV, row: jax.Array) -> KV:
        """See ``LayerCache``."""
        return KV(join(self.k, slot, other.k, row), join(self.v, slot, other.v, row))

    def release(self, slot: jax.Array) -> KV:
        """See ``LayerCache``: what stands behind a length of 0 is never read."""
        del slot
        return self


def store(
    cached: tuple[Stored, ...], new: tuple[jax.Array, ...], at: Placement
) -> tuple[tuple[Stored, ...], jax.Array]:
    """Put ``new`` [B, N, Hkv, d] of each side at the new tokens' slots: (the sides, sound [B, N] bool).

    A token that is not finite on any side is no sound one, and is stored as zeros.
    """
    n = new[0].shape[1]
    # What overflows the cache's own dtype is not finite either.
    new = tuple(x if isinstance(c, PackedKV) else x.astype(c.dtype) for x, c in zip(new, cached, strict=True))
    sound = functools.reduce(jnp.logical_and, [jnp.isfinite(x).all(axis=(2, 3)) for x in new])
    clean = (jnp.where(sound[:, :, None, None], x, 0).transpose(0, 2, 1, 3) for x in new)
    start = at.lengths + (at.visible.slots(n) - n)
    return tuple(write(c, x, start) for c, x in zip(cached, clean, strict=True)), sound


def spoil(out: jax.Array, sound: jax.Array, at: Placement) -> jax.Array:
    """``out`` [B, N, Hq, d] with NaN for the queries that see a new token that is not ``sound`` [B, N]."""
    n = out.shape[1]
    seen = at.visible.new(n, at.lengths)[:, :, at.visible.slots(n) - n :]
    lost = (seen & ~sound[:, None]).any(axis=2)
    return jnp.where(lost[:, :, None, None], jnp.nan, out)


def move(stored: Stored, lengths: jax.Array, path: jax.Array) -> Stored:
    """New slots ``path`` [B, P] next to the ``lengths`` [B] committed ones."""
    slots = lengths[:, None] + path

    def one(cached: jax.Array) -> jax.Array:
        chosen = jax.vmap(lambda row, at: take(row, at, axis=1))(cached, slots)
        return put(cached, chosen, lengths)

    return kv_codec.each(one, stored)


def join(own: Stored, slot: jax.Array, other: Stored, row: jax.Array) -> Stored:
    """``own`` with row ``row`` of ``other`` at ``slot``."""
    joined: Stored = kv_codec.each(lambda a, b: put_row(a, slot, b, row), own, other)
    if not isinstance(own, PackedKV):
        return joined
    assert isinstance(other, PackedKV)
    assert isinstance(joined, PackedKV)
    centre = None
    if own.centre is not None:
        assert other.centre is not None
        centre = put_row(own.centre, slot, other.centre, row)
    return dataclasses.replace(joined, centre=centre, channels=own.channels)


def init_cache(
    *,
    layers: int,
    batch: int,
    capacity: int,
    kv_heads: int,
    head_dim: int,
    kv_form: Any = "float32",
    scales: CacheScales | None = None,
    centred: bool = False,
) -> Cache:
    """An empty cache of ``layers`` times keys and values of one size; see ``KV.table`` and ``fill``."""
    layer = KV.table(
        kv_format(kv_form),
        batch=batch,
        capacity=capacity,
        kv_heads=kv_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        centred=centred,
    )
    return fill(caches.table((layer,) * layers, batch), kv_form, scales)


def fill(table: Cache, kv_form: Any, scales: CacheScales | None = None) -> Cache:
    """An empty cache of ``table``, whose layers hold keys and values in ``kv_form``.

    int8-static needs ``scales``, and no other format takes them. Raises ConfigError.
    """
    kv_form = kv_format(kv_form)
    if kv_form.static != (scales is not None):
        raise ConfigError(
            "an int8-static cache needs calibrated scales (quant.kv.calibrate_cache); 'int8' needs none"
            if kv_form.static
            else f"calibrated scales are for an int8-static cache, not for {kv_form.name!r}"
        )
    empty: Cache = pytree.zeros(table)
    if scales is None:
        return empty
    layers = []
    for n, layer in enumerate(empty.layers):
        if not isinstance(layer, KV):
            raise ConfigError(f"calibrated scales are of keys and values; layer {n} holds none")
        sides = []
        for stored, given in ((layer.k, scales.k), (layer.v, scales.v)):
            assert isinstance(stored, PackedKV)
            assert stored.channels is not None
            want = stored.channels.shape
            if [c.shape for c in given] != [want] * len(empty.layers):
                raise ConfigError(
                    f"cache scales must be {len(empty.layers)} arrays of shape {want}; they are "
                    f"{[c.shape for c in given]}"
                )
            # A copy, because caches are donated and these scales are the user's.
            sides.append(dataclasses.replace(stored, channels=jnp.copy(given[n])))
        layers.append(KV(*sides))
    return dataclasses.replace(empty, layers=tuple(layers))


def write(cached: Stored, new: jax.Array, start: jax.Array) -> Stored:
    """Put ``new`` [B, Hkv, N, d] into ``cached`` [B, Hkv, S, d] at slots ``start[b] + (0..N-1)``."""
    ready = kv_codec.encode(cached, new, start) if isinstance(cached, PackedKV) else new.astype(cached.dtype)
    return kv_codec.each(lambda old, fresh: put(old, fresh, start), cached, ready)


def put(cached: jax.Array, fresh: jax.Array, start: jax.Array) -> jax.Array:
    """``cached`` [B, Hkv, S, ...] with ``fresh`` [B, Hkv, N, ...] from slot ``start[b]`` on, in place.

    XLA:CPU computes updates of a bfloat16 buffer in float32, and so makes a pass over all of it for each row;
    a call of our own moves the bytes. The caller guarantees that they fit: what does not is moved back over
    committed slots, and ``CHECK_WRITES`` makes it an error.
    """
    if CHECK_WRITES:
        jax.debug.callback(functools.partial(_must_fit, fresh.shape[2], cached.shape[2]), start)
    if cache_attention.WRITE_KERNEL.unavailable() is None:
        return portable_call(cache_attention.cache_write, _put_xla, cached, fresh, start)
    return _put_xla(cached, fresh, start)


def _must_fit(size: int, capacity: int, start: jax.Array) -> None:
    last = int(np.asarray(start).max())
    if last + size > capacity:
        raise ConfigError(f"{size} tokens behind {last} do not fit a cache of {capacity} slots")


def _put_xla(cached: jax.Array, fresh: jax.Array, start: jax.Array) -> jax.Array:
    def one(row: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(row, new, at, axis=1)

    return jax.vmap(one)(cached, fresh, start)
