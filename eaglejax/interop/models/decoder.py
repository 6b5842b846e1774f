"""The target in torch: the same pure forward as ``models.decoder``, over the same tree of weights.

Functions take a ``DecoderSpec``, nested dicts of tensors ([in, out] matrices, or packed ones) and an adapter,
which does attention and products. Every intermediate tensor that ``interop.parity.names`` lists is tapped
before anything is computed from it: who watches may write to it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.interop.backends.adapter import DeviceAdapter
from eaglejax.interop.backends.torch_import import torch
from eaglejax.interop.models.layers import (
    Angles,
    embed,
    gated_mlp,
    hadamard,
    linear,
    moe_mlp,
    rms_norm,
    rotate,
    rotation,
    softcap,
)
from eaglejax.interop.models.specs import DecoderSpec
from eaglejax.tap import scope, tap


@dataclasses.dataclass
class Cache:
    """Keys and values, [B, Hkv, S, d] a layer, and ``lengths`` [B] int32: committed tokens; laid out as in
    ``nn.cache``, but written in place."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    lengths: torch.Tensor

    @property
    def capacity(self) -> int:
        """Slots a row (S)."""
        return self.k[0].shape[2]


@dataclasses.dataclass(frozen=True)
class Forward:
    """``hidden`` [B, N, H] after the final norm; ``aux`` [B, N, A, H] or None. Keys and values are in the
    cache, its lengths unmoved."""

    hidden: torch.Tensor
    aux: torch.Tensor | None


def init_cache(
    layers: int,
    batch: int,
    capacity: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Cache:
    """An empty cache."""
    shape = (batch, kv_heads, capacity, head_dim)
    return Cache(
        k=[torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)],
        v=[torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)],
        lengths=torch.zeros(batch, dtype=torch.int32, device=device),
    )


def commit(cache: Cache, path: torch.Tensor, count: torch.Tensor) -> None:
    """Keep the first ``count`` [B] nodes of ``path`` [B, D+1] of the tree written last, next to the committed
    tokens."""
    for b, (start, kept) in enumerate(zip(cache.lengths.tolist(), count.tolist(), strict=True)):
        slots = start + path[b, :kept].long()
        for cached in (*cache.k, *cache.v):
            cached[b, :, start : start + kept] = cached[b, :, slots]
    cache.lengths = cache.lengths + count.to(cache.lengths.dtype)


def visibility(
    lengths: torch.Tensor,
    visible: torch.Tensor,
    positions: torch.Tensor,
    slots: int,
    slot_positions: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """Which of the first ``slots`` cache slots each query sees, [B, N, slots] bool; see ``nn.attention``.

    ``visible`` [B, N, M] and ``slot_positions`` [B, M] are of the M slots behind each row's ``lengths`` [B].
    """
    b, n, m = visible.shape
    at = torch.arange(slots, device=visible.device)
    keep = (at < lengths[:, None, None]).expand(b, n, slots).clone()
    where = at.expand(b, slots).clone()
    for row, start in enumerate(lengths.tolist()):
        keep[row, :, start : start + m] = visible[row]
        where[row, start : start + m] = slot_positions[row].long()
    if window is not None:
        keep &= positions[:, :, None] - where[:, None, :] < window
    return keep


def write_and_attend(
    adapter: DeviceAdapter,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: Cache,
    layer: int,
    visible: torch.Tensor,
    positions: torch.Tensor,
    slot_positions: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    prompt: torch.Tensor | None,
) -> torch.Tensor:
    """Put ``k``, ``v`` [B, N, Hkv, d] of N new tokens into a layer's cache, the last N of the M slots that
    ``visible`` [B, N, M] is about, and attend with ``q`` [B, N, Hq, d]: [B, N, Hq, d].

    ``prompt`` [B]: of a prompt's chunk, how many of the N are real; None for a round's nodes.

    As in ``nn.attention``, a token whose key or value is not finite is stored as zeros and those that see it
    get NaN, so that it spoils no sibling.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        tap(name, tensor)
    n, m = visible.shape[1:]
    held_k, held_v = cache.k[layer], cache.v[layer]
    k, v = k.to(held_k.dtype), v.to(held_v.dtype)
    sound = (k.isfinite() & v.isfinite()).all(-1).all(-1)
    k, v = (x.masked_fill(~sound[:, :, None, None], 0).transpose(1, 2) for x in (k, v))
    ends = (cache.lengths + m).tolist()
    for row, end in enumerate(ends):
        held_k[row, :, end - n : end] = k[row]
        held_v[row, :, end - n : end] = v[row]
    if prompt is not None and window is None and cap is None and adapter.ragged_prompts:
        out = _attend_ragged(adapter, q, held_k, held_v, cache.lengths.tolist(), prompt.tolist(), scale)
    else:
        out = _attend_masked(
            adapter,
            q,
            held_k,
            held_v,
            cache.lengths,
            ends,
            visible,
            positions,
            slot_positions,
            scale=scale,
            window=window,
            cap=cap,
            decode=prompt is None,
        )
    lost = (visible[:, :, m - n :] & ~sound[:, None]).any(-1)
    out = out.masked_fill(lost[:, :, None, None], torch.nan)
    tap("attention", out)
    return out


def _attend_ragged(
    adapter: DeviceAdapter,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    counts: list[int],
    scale: float,
) -> torch.Tensor:
    """Prompt chunks without their padding, whose results are zeros."""
    ends = [start + count if count else 0 for start, count in zip(lengths, counts, strict=True)]
    keys, values = (
        torch.cat([x[row, :, :end].transpose(0, 1) for row, end in enumerate(ends)]) for x in (k, v)
    )
    queries = torch.cat([q[row, :count] for row, count in enumerate(counts)])
    mixed = adapter.ragged_attention(queries, keys, values, counts, ends, scale=scale)
    out = torch.zeros_like(q)
    for row, part in enumerate(mixed.split(counts)):
        out[row, : len(part)] = part
    return out


def _attend_masked(
    adapter: DeviceAdapter,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    ends: list[int],
    visible: torch.Tensor,
    positions: torch.Tensor,
    slot_positions: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    decode: bool,
) -> torch.Tensor:
    """Attention over a cache by a mask of every query and written slot."""
    slots = max(ends)
    keep = visibility(lengths, visible, positions, slots, slot_positions, window)
    out, _ = adapter.attention(
        q, k[:, :, :slots], v[:, :, :slots], keep, ends, scale=scale, softcap=cap, decode=decode
    )
    return out


def forward(
    adapter: DeviceAdapter,
    spec: DecoderSpec,
    params: dict[str, Any],
    tokens: torch.Tensor,
    positions: torch.Tensor,
    cache: Cache,
    visible: torch.Tensor,
    *,
    aux: tuple[int, ...] = (),
    prompt: torch.Tensor | None = None,
) -> Forward:
    """Run N new tokens on top of the committed prefix; arguments as in ``models.decoder.forward``.

    ``prompt`` [B]: says that these are chunks of prompts, padded on the right, and how many tokens of each
    are real; ``visible`` is then ``causal``'s.

    Raises ConfigError where they do not fit the cache and LimitError where the device does not take them.
    """
    longest = int(cache.lengths.max()) + tokens.shape[1]
    if longest > cache.capacity:
        raise ConfigError(f"{longest} tokens do not fit a cache of {cache.capacity} slots")
    tap("tokens", tokens)
    tap("positions", positions)
    tap("visible", visible)
    x = embed(params["embed"], tokens)
    if spec.embed_scale is not None:
        x = x * torch.tensor(spec.embed_scale, dtype=x.dtype, device=x.device)
    tap("embedding", x)
    angles = [rotation(positions, rope) for rope in spec.rope_table]
    boundaries = {0: x}
    for i, layer in enumerate(params["layers"]):
        turns = _Turns(angles[spec.ropes[i]], params.get("qk_rotation"), params.get("post_rotation"))
        with scope(f"layers/{i}"):
            x = _block(adapter, spec, layer, i, x, positions, turns, cache, visible, prompt)
        boundaries[i + 1] = x
    hidden = rms_norm(x, params["norm"], spec.norm_eps, offset=spec.norm_offset)
    tap("final_norm", hidden)
    wanted = torch.stack([boundaries[i] for i in aux], dim=2) if aux else None
    if wanted is not None:
        tap("aux", wanted)
    return Forward(hidden=hidden, aux=wanted)


@dataclasses.dataclass(frozen=True)
class _Turns:
    """What rotates in a layer: RoPE's angles and, in a rotated target, the base of the Hadamard matrix of
    queries and keys, and the matrix [H, H] behind closing norms."""

    angles: Angles
    heads: torch.Tensor | None
    closing: torch.Tensor | None


def _block(
    adapter: DeviceAdapter,
    spec: DecoderSpec,
    layer: dict[str, Any],
    index: int,
    x: torch.Tensor,
    positions: torch.Tensor,
    turns: _Turns,
    cache: Cache,
    visible: torch.Tensor,
    prompt: torch.Tensor | None,
) -> torch.Tensor:
    """One layer of the residual stream ``x`` [B, N, H]."""

    def norm(y: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(y, layer[name], spec.norm_eps, offset=spec.norm_offset)

    def closed(y: torch.Tensor, name: str) -> torch.Tensor:
        """What a block adds to the residual stream."""
        if not spec.sandwich_norms:
            return y
        y = norm(y, name)
        if turns.closing is None:
            return y
        return linear(adapter, y.to(turns.closing.dtype), turns.closing, dtype=y.dtype)

    def heads(y: torch.Tensor, name: str) -> torch.Tensor:
        flat = linear(adapter, y, layer[name], layer.get(f"{name}_bias"))
        return flat.reshape(*y.shape[:2], -1, spec.head_dim)

    y = norm(x, "attn_norm")
    tap("attn_norm", y)
    q, k, v = heads(y, "q"), heads(y, "k"), heads(y, "v")
    if spec.qk_norm:
        q, k = norm(q, "q_norm"), norm(k, "k_norm")
    q, k = rotate(q, turns.angles), rotate(k, turns.angles)
    if turns.heads is not None:
        q, k = hadamard(q, turns.heads), hadamard(k, turns.heads)
    mixed = write_and_attend(
        adapter,
        q,
        k,
        v,
        cache,
        index,
        visible,
        positions,
        positions,
        scale=spec.query_scale,
        window=spec.windows[index],
        cap=spec.attention_softcap,
        prompt=prompt,
    )
    y = linear(adapter, mixed.reshape(*x.shape[:2], -1), layer["o"], layer.get("o_bias"))
    y = closed(y, "post_attn_norm")
    tap("attn_out", y)
    x = x + y
    tap("attn_residual", x)
    y = norm(x, "mlp_norm")
    tap("mlp_norm", y)
    if spec.moe is not None and spec.sparse[index]:
        y = moe_mlp(adapter, y, layer, spec.moe, spec.activation)
    else:
        y = gated_mlp(adapter, y, layer, spec.activation)
    y = closed(y, "post_mlp_norm")
    tap("mlp", y)
    x = x + y
    tap("residual", x)
    return x


def unembed(
    adapter: DeviceAdapter, spec: DecoderSpec, params: dict[str, Any], hidden: torch.Tensor
) -> torch.Tensor:
    """Logits [..., V] f32 of ``hidden`` [..., H] after the final norm, softcap included."""
    head = params["embed"] if spec.tie_embeddings else params["head"]
    logits = linear(adapter, hidden, head, transposed=spec.tie_embeddings, dtype=torch.float32)
    logits = softcap(logits, spec.final_softcap)
    tap("logits", logits)
    return logits


def causal(batch: int, count: torch.Tensor, width: int) -> torch.Tensor:
    """Visibility [B, width, width] of right-padded chunks whose first ``count`` [B] tokens are real; padding
    sees itself alone."""
    steps = torch.arange(width, device=count.device)
    real = steps < count[:, None]
    eye = torch.eye(width, dtype=torch.bool, device=count.device)
    return ((steps[None, :] <= steps[:, None]) & real[:, None, :] | eye).expand(batch, width, width)
