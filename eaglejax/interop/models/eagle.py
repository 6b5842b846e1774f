"""The EAGLE draft network in torch: the same steps as ``drafts.eagle.model``, over the same tree of weights.

``Draft`` holds the nested dict of weights (layout: ``drafts.eagle.model``), what it borrows of the target and
the maps of its feature adapter. ``fuse`` makes features of what the target computed, ``step`` runs the layers
on (feature, next token) pairs over a cache, ``logits`` reads the states.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from eaglejax.interop.backends.adapter import DeviceAdapter
from eaglejax.interop.backends.arrays import PackedTensor, map_tree, place
from eaglejax.interop.backends.torch_import import torch
from eaglejax.interop.models.decoder import Cache, write_and_attend
from eaglejax.interop.models.layers import (
    Angles,
    embed,
    gated_mlp,
    linear,
    moe_mlp,
    rms_norm,
    rotate,
    rotation,
    softcap,
)
from eaglejax.interop.models.specs import EagleSpec
from eaglejax.tap import scope, tap


@dataclasses.dataclass(frozen=True)
class Draft:
    """A draft's weights; the twin of ``drafts.eagle.model.EagleParams``.

    ``embed`` [V, H] and ``head`` ([H, Vd], or [V, H] where the spec says ``tied``) are the target's, or None
    where the draft has its own. ``ids`` [Vd]: target id of each draft id, or None. ``target_maps``: one
    matrix [Ht, Ht] or None a feature (or empty), ``draft_map`` [H, H] or None: the feature adapter.
    """

    weights: dict[str, Any]
    embed: Any = None
    head: Any = None
    ids: Any = None
    target_maps: tuple[Any, ...] = ()
    draft_map: Any = None

    def on(self, device: torch.device) -> Draft:
        """The same draft with tensors on ``device``."""
        return Draft(*(place(getattr(self, f.name), device) for f in dataclasses.fields(self)))

    @property
    def dtype(self) -> torch.dtype:
        """Of its activations: that of ``fc`` (for packed weights, of the first norm)."""
        fc = self.weights["fc"]
        if isinstance(fc, torch.Tensor):
            return fc.dtype
        found: list[torch.dtype] = []
        map_tree(self.weights["layers"][0]["mlp_norm"], lambda leaf: found.append(leaf.dtype))
        return found[0]


def fuse(adapter: DeviceAdapter, spec: EagleSpec, draft: Draft, features: torch.Tensor) -> torch.Tensor:
    """The draft's feature [B, M, H] of committed tokens from the target's ``features`` [B, M, A, Ht]."""
    parts = list(features.unbind(2))
    if draft.target_maps:
        maps = zip(parts, draft.target_maps, strict=True)
        parts = [x if m is None else linear(adapter, x, m) for x, m in maps]
    weights = draft.weights
    if spec.feature_map:
        parts = [linear(adapter, x.float(), weights["feature_map"]) for x in parts]
    parts = [x.to(draft.dtype) for x in parts]
    if spec.version == 1:
        return parts[0]
    if spec.aux_norm == "each":
        parts = [rms_norm(x, weights["aux_norm"][i], spec.norm_eps) for i, x in enumerate(parts)]
    joined = torch.cat(parts, -1)
    if spec.aux_norm == "joined":
        joined = rms_norm(joined, weights["aux_norm"], spec.norm_eps)
    return linear(adapter, joined, weights["fc"], weights.get("fc_bias"))


def step(
    adapter: DeviceAdapter,
    spec: EagleSpec,
    draft: Draft,
    feature: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    cache: Cache,
    visible: torch.Tensor,
    slot_positions: torch.Tensor,
    *,
    prompt: torch.Tensor | None = None,
) -> torch.Tensor:
    """States [B, N, H] of the pairs (``feature`` [B, N, H], ``tokens`` [B, N]) at ``positions`` [B, N].

    ``visible`` [B, N, M] and ``slot_positions`` [B, M] cover the M slots behind the cache's committed pairs,
    whose last N these are; their keys and values are written there. ``prompt`` as in ``decoder.forward``.
    """
    weights = draft.weights
    tap("feature", feature)
    e = embed(draft.embed if draft.embed is not None else weights["embed"], tokens).to(feature.dtype)
    if spec.embed_scale is not None:
        e = e * torch.tensor(spec.embed_scale, dtype=e.dtype, device=e.device)
    tap("embedding", e)
    x = feature
    if spec.version == 1:
        x = linear(adapter, torch.cat([e, feature], -1), weights["fc"], weights.get("fc_bias"))
        tap("fc", x)
    angles = rotation(positions, spec.rope)
    for index, layer in enumerate(weights["layers"]):
        with scope(f"layers/{index}"):
            x = _layer(
                adapter,
                spec,
                layer,
                index,
                x,
                e,
                angles,
                cache,
                visible,
                positions,
                slot_positions,
                prompt,
            )
    if spec.feed_normed:
        x = rms_norm(x, weights["norm"], spec.norm_eps)
    tap("state", x)
    return x


def _layer(
    adapter: DeviceAdapter,
    spec: EagleSpec,
    layer: dict[str, Any],
    index: int,
    x: torch.Tensor,
    e: torch.Tensor,
    angles: Angles,
    cache: Cache,
    visible: torch.Tensor,
    positions: torch.Tensor,
    slot_positions: torch.Tensor,
    prompt: torch.Tensor | None,
) -> torch.Tensor:
    """One layer; the first of EAGLE-3 reads [embedding, feature], the first of EAGLE-1 has no norm."""
    eps, residual = spec.norm_eps, x
    if index > 0:
        y = rms_norm(x, layer["input_norm"], eps)
    elif spec.version == 1:
        y = x
    else:
        normed = rms_norm(x, layer["hidden_norm"], eps)
        y = torch.cat([rms_norm(e, layer["input_norm"], eps), normed], -1)
        residual = normed if spec.norm_before_residual else x
    tap("attn_norm", y)

    def heads(name: str) -> torch.Tensor:
        flat = linear(adapter, y, layer[name], layer.get(f"{name}_bias"))
        return flat.reshape(*y.shape[:2], -1, spec.head_dim)

    q, k, v = heads("q"), heads("k"), heads("v")
    if spec.qk_norm:
        q, k = rms_norm(q, layer["q_norm"], eps), rms_norm(k, layer["k_norm"], eps)
    q, k = rotate(q, angles), rotate(k, angles)
    mixed = write_and_attend(
        adapter,
        q,
        k,
        v,
        cache,
        index,
        visible,
        positions,
        slot_positions,
        scale=spec.head_dim**-0.5,
        window=spec.windows[index],
        cap=None,
        prompt=prompt,
    )
    y = linear(adapter, mixed.reshape(*x.shape[:2], -1), layer["o"], layer.get("o_bias"))
    tap("attn_out", y)
    x = residual + y
    tap("attn_residual", x)
    y = rms_norm(x, layer["mlp_norm"], eps)
    tap("mlp_norm", y)
    if spec.moe is not None:
        y = moe_mlp(adapter, y, layer, spec.moe, spec.activation)
    else:
        y = gated_mlp(adapter, y, layer, spec.activation)
    tap("mlp", y)
    x = x + y
    tap("residual", x)
    return x


def logits(adapter: DeviceAdapter, spec: EagleSpec, draft: Draft, state: torch.Tensor) -> torch.Tensor:
    """Logits [..., Vd] f32 over the draft's vocabulary of ``state`` [..., H]."""
    if spec.head_norm and not spec.feed_normed:
        state = rms_norm(state, draft.weights["norm"], spec.norm_eps)
    borrowed = draft.head is not None
    head = draft.head if borrowed else draft.weights["head"]
    if isinstance(head, torch.Tensor):
        state = state.to(head.dtype)
    transposed = head.transposed if isinstance(head, PackedTensor) else spec.tied and borrowed
    out = softcap(linear(adapter, state, head, transposed=transposed, dtype=torch.float32), spec.softcap)
    tap("logits", out)
    return out
