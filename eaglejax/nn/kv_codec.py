"""Arithmetic of narrow keys and values: how a vector is stored, and how attention reads what is stored.

A stored vector stands for ``scale * T(code)``: ``code`` is what ``expand`` gives (integers, 8-bit floats, or
levels of a codebook), ``scale`` is the token's own, and T is what all tokens of a head share, a rotation or a
factor a channel. Because T is linear, attention never applies it to the cache: a query meets keys as
``scale * <T'(q), code>``, and the weighted sum of the values' codes is taken through T once (``into_codes``,
``out_of_codes``). So a narrow cache costs attention its expansion and one product a slot and head.

Keys may be stored as differences from one vector a row and head, ``centre``. Most of a key's length can be
the same for every token (a bias of its projection, channels that hardly vary), and bits that go to it are
lost to what tells tokens apart. It is never added again: <q, centre> moves all scores of a query alike, which
the softmax does not see (SageAttention, Zhang et al. 2024, arXiv:2410.02367, which takes the mean of all
keys). The centre is the key of the row's first token, so that it is known as soon as anything is stored and
depends on nothing that comes later.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import pytree
from eaglejax.errors import ConfigError
from eaglejax.kv_format import KVFormat
from eaglejax.nn.codebooks import lloyd_max, rotation_blocks
from eaglejax.pytree import ArrayInfo, constant

INT8_MAX = 127
FP8_MAX = 448.0
"""Largest float8_e4m3fn."""


@pytree.dataclass
class PackedKV:
    """Keys, or values, of one layer in a narrow format.

    ``codes`` [B, Hkv, S, w] in the format's dtype; ``scale`` [B, Hkv, S] f32, or None where the format has
    no scale a token; ``channels`` [Hkv, d] f32: the calibrated scale of every channel, for int8-static, else
    None; ``centre`` [B, Hkv, d] f32: what was subtracted from every vector, None for nothing.
    """

    codes: jax.Array
    scale: jax.Array | None
    channels: jax.Array | None
    centre: jax.Array | None
    format: KVFormat = pytree.static()
    head_dim: int = pytree.static()

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, Hkv, S, d] of what is held, whatever the codes' width."""
        return (*self.codes.shape[:3], self.head_dim)

    @property
    def dtype(self) -> Any:
        """Dtype of the codes."""
        return self.codes.dtype


Stored = jax.Array | PackedKV
"""Keys, or values, of one layer, [B, Hkv, S, d]."""


def each(function: Callable[..., jax.Array], stored: Any, *others: Any) -> Any:
    """``function`` on every array of ``stored`` that has a slot axis (the third), with that of ``others``.

    What has none comes from the last of them.
    """
    if not isinstance(stored, PackedKV):
        return function(stored, *others)
    codes = function(stored.codes, *(o.codes for o in others))
    scale = None if stored.scale is None else function(stored.scale, *(o.scale for o in others))
    return dataclasses.replace((stored, *others)[-1], codes=codes, scale=scale)


def table(
    kv_form: KVFormat,
    shape: tuple[int, ...],
    slots: str,
    *,
    heads: str | None = "kv_heads",
    centred: bool = False,
) -> Any:
    """What a side of ``shape`` [B, Hkv, S, d] is held in, as ``ArrayInfo`` leaves that begin as zeros.

    ``slots``, ``heads``: logical axes of S and Hkv. ``centred``: differences from each row's first vector
    will be stored, where the format finds its scales by itself. Raises ConfigError for a head that is too
    small to be rotated.
    """

    def info(shape: tuple[int, ...], dtype: Any, *axes: str | None) -> Any:
        return ArrayInfo(shape, dtype, axes, constant(0))

    if kv_form.plain:
        return info(shape, kv_form.dtype, "batch", heads, slots, None)
    if kv_form.rotation is not None and shape[3] < 2:
        raise ConfigError(f"{kv_form.name!r} rotates heads of 2 or more channels, not {shape[3]}")
    rows, dim = shape[:3], shape[3]
    centre = (*shape[:2], dim)
    return PackedKV(
        codes=info((*rows, kv_form.width(dim)), kv_form.dtype, "batch", heads, slots, None),
        scale=info(rows, jnp.float32, "batch", heads, slots) if kv_form.scaled else None,
        channels=info((shape[1], dim), jnp.float32, heads, None) if kv_form.static else None,
        centre=info(centre, jnp.float32, "batch", heads, None) if centred and kv_form.scaled else None,
        format=kv_form,
        head_dim=dim,
    )


def encode(like: PackedKV, x: jax.Array, start: jax.Array) -> PackedKV:
    """``x`` [B, Hkv, N, d], finite, in the format of ``like``, for slots from ``start`` [B] on.

    Each vector's codes depend on it and on the row's centre alone: that of ``like``, or the first vector in
    a row that starts at slot 0.
    """
    x, kv_form = x.astype(jnp.float32), like.format
    if like.centre is not None:
        centre = jnp.where(start[:, None, None] == 0, x[:, :, 0], like.centre)
        like, x = dataclasses.replace(like, centre=centre), x - centre[:, :, None]
    if like.channels is not None:
        codes = _round(x / _nonzero(like.channels)[None, :, None])
        return dataclasses.replace(like, codes=codes)
    top = jnp.max(jnp.abs(x), axis=-1)
    if kv_form.rotation is not None:
        return _encode_rotated(like, x / _nonzero(top)[..., None], top)
    scale = top / (INT8_MAX if kv_form.name == "int8" else FP8_MAX)
    ratio = x / _nonzero(scale)[..., None]
    codes = _round(ratio) if kv_form.name == "int8" else ratio.clip(-FP8_MAX, FP8_MAX).astype(like.dtype)
    return dataclasses.replace(like, codes=codes, scale=scale)


def _encode_rotated(like: PackedKV, x: jax.Array, top: jax.Array) -> PackedKV:
    """Codes of ``x`` [..., d], whose largest magnitude is 1; ``top`` [...] is what that stands for."""
    levels = lloyd_max(like.head_dim, like.format.bits)
    x = _turn(x, like)
    norm = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    between = (levels[1:] + levels[:-1]) / 2
    unit = x / _nonzero(norm)
    codes = sum((unit > edge).astype(jnp.uint8) for edge in between)
    # Of all scales the one that leaves the least squared error; the norm itself is near it.
    level = lookup(codes, levels, jnp.float32)
    scale = jnp.sum(x * level, axis=-1) / jnp.sum(level * level, axis=-1)
    return dataclasses.replace(like, codes=pack(codes, like.format), scale=scale * top)


def _round(x: jax.Array) -> jax.Array:
    return jnp.clip(jnp.round(x), -INT8_MAX, INT8_MAX).astype(jnp.int8)


def _nonzero(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, x, 1)


def expand(stored: PackedKV, dtype: Any) -> jax.Array:
    """The codes' numbers, [B, Hkv, S, d] in ``dtype``: without scales, channels and rotation."""
    if stored.format.rotation is None:
        return stored.codes.astype(dtype)
    codes = unpack(stored.codes, stored.format, stored.head_dim)
    return lookup(codes, lloyd_max(stored.head_dim, stored.format.bits), dtype)


def decode(stored: Stored) -> jax.Array:
    """What is held, [B, Hkv, S, d] f32."""
    if not isinstance(stored, PackedKV):
        return stored.astype(jnp.float32)
    x = expand(stored, jnp.float32)
    if stored.scale is not None:
        x = x * stored.scale[..., None]
    if stored.channels is not None:
        x = x * stored.channels[None, :, None]
    x = _turn(x, stored, back=True)
    return x if stored.centre is None else x + stored.centre[:, :, None]


def into_codes(stored: PackedKV, q: jax.Array) -> jax.Array:
    """Queries ``q`` [B, N, Hq, d] as keys' codes are to meet them, in their own dtype."""
    x = q.astype(jnp.float32)
    return _turn(_by_channel(stored, x), stored).astype(q.dtype)


def out_of_codes(stored: PackedKV, out: jax.Array) -> jax.Array:
    """Sums ``out`` [B, N, Hq, d] of values' codes as sums of values, f32."""
    return _by_channel(stored, _turn(out.astype(jnp.float32), stored, back=True))


def _by_channel(stored: PackedKV, x: jax.Array) -> jax.Array:
    if stored.channels is None:
        return x
    kv_heads = stored.channels.shape[0]
    grouped = x.reshape(*x.shape[:2], kv_heads, -1, x.shape[3])
    return (grouped * stored.channels[:, None]).reshape(x.shape)


def _turn(x: jax.Array, stored: PackedKV, *, back: bool = False) -> jax.Array:
    """``x`` [..., d] f32 by the format's rotation, or by its inverse."""
    if stored.format.rotation is None:
        return x
    parts, start = [], 0
    for blocks in rotation_blocks(stored.format.rotation, stored.head_dim, stored.format.seed):
        count, size, _ = blocks.shape
        turned = blocks.swapaxes(1, 2) if back else blocks
        part = x[..., start : start + count * size]
        start += count * size
        if size > 4:
            parts.append(jnp.dot(part, turned[0].T, precision=jax.lax.Precision.HIGHEST))
            continue
        part = part.reshape(*part.shape[:-1], count, size)
        # Products of whole arrays: a batched matrix product of such small blocks is slow everywhere.
        columns = [part[..., j : j + 1] * turned[:, :, j] for j in range(size)]
        parts.append(functools.reduce(jnp.add, columns).reshape(*x.shape[:-1], count * size))
    return jnp.concatenate(parts, axis=-1)


def lookup(codes: jax.Array, levels: np.ndarray, dtype: Any) -> jax.Array:
    """``levels[codes]``, by halving the table bit by bit: gathers of single numbers are slow everywhere."""
    left = [jnp.asarray(level, dtype) for level in levels]
    bit = 0
    while len(left) > 1:
        odd = (codes >> bit) & 1 == 1
        left = [jnp.where(odd, high, low) for low, high in zip(left[::2], left[1::2], strict=True)]
        bit += 1
    return left[0]


def pack(codes: jax.Array, kv_form: KVFormat) -> jax.Array:
    """Codes [..., d] uint8 below 2^bits, bits packed: [..., ``format.width(d)``] uint8.

    A plane of p bits a code takes ceil(d p / 8) bytes; byte j holds codes j, j + bytes, j + 2 bytes, ... of
    that plane, lowest bits first, so that unpacking shifts whole arrays.
    """
    planes, shift = [], 0
    for bits in kv_form.planes():
        many, width = 8 // bits, -(-codes.shape[-1] * bits // 8)
        part = (codes >> shift) & ((1 << bits) - 1)
        part = jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, many * width - part.shape[-1])])
        part = part.reshape(*part.shape[:-1], many, width)
        packed = part[..., 0, :]
        for i in range(1, many):
            packed = packed | (part[..., i, :] << (bits * i))
        planes.append(packed)
        shift += bits
    return jnp.concatenate(planes, axis=-1)


def unpack(packed: jax.Array, kv_form: KVFormat, dim: int) -> jax.Array:
    """The inverse of ``pack``: codes [..., ``dim``] uint8."""
    codes, start, shift = jnp.zeros((), jnp.uint8), 0, 0
    for bits in kv_form.planes():
        width = -(-dim * bits // 8)
        part = packed[..., start : start + width]
        spread = [(part >> (bits * i)) & ((1 << bits) - 1) for i in range(8 // bits)]
        codes = codes | (jnp.concatenate(spread, axis=-1)[..., :dim] << shift)
        start, shift = start + width, shift + bits
    return codes
