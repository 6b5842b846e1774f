"""One layer of a transformer, on the residual stream: a mixer of tokens, then a feed-forward block.

The same layer serves targets, drafts and whatever else is made of such layers. Its weights are a dict::

    attn_norm [H]; the mixer's own (``GroupedQuery.table``, ...); post_attn_norm [H] (sandwich)
    mlp_norm [H]; post_mlp_norm [H] (sandwich)
    dense: gate, up [H, F], down [F, H]; gate_bias, up_bias, down_bias
    mixture: router [H, E]; experts {gate, up [E, H, Fe], down [E, Fe, H]}; router_bias, correction [E];
        shared {gate, up [H, Fs], down [Fs, H]}; shared_gate [H, 1]; experts' gate_bias, up_bias [E, Fe],
        down_bias [E, H]

Every matrix is [in, out].
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from eaglejax import devices
from eaglejax.kv_format import KVFormat
from eaglejax.nn.cache import Placement
from eaglejax.nn.kv import KV
from eaglejax.nn.linear import linear
from eaglejax.nn.mlp import gated_mlp
from eaglejax.nn.moe import MoeConfig, moe_mlp, router_logits
from eaglejax.nn.norm import rms_norm
from eaglejax.nn.rope import Angles, RopeConfig, rotate
from eaglejax.nn.visible import Chunked
from eaglejax.pytree import ArrayInfo, constant
from eaglejax.tap import tap

Weights = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Norm:
    """How a layer normalises: root mean square with ``eps``; ``offset``: weights are stored as distance from
    one."""

    eps: float = 1e-6
    offset: bool = False

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """``x`` [..., H] normalised, times ``weight`` [H]."""
        return rms_norm(x, weight, self.eps, offset=self.offset)

    def table(self, size: int, dtype: Any) -> ArrayInfo:
        """The weight."""
        return ArrayInfo((size,), dtype, (None,), constant(0.0 if self.offset else 1.0))


class Mixer(Protocol):
    """How the tokens of a layer meet: frozen settings, with a kind of ``LayerCache`` of its own."""

    def table(self, wide: int, hidden: int, norm: Norm, dtype: Any) -> Weights:
        """Its weights, for inputs of width ``wide`` and results of width ``hidden``."""

    def cache_table(self, batch: int, capacity: int, kv_form: KVFormat) -> Any:
        """Its memory, as ``ArrayInfo`` leaves."""

    def __call__(
        self, weights: Weights, y: jax.Array, angles: Angles, norm: Norm, memory: Any, at: Placement
    ) -> tuple[jax.Array, Any]:
        """([B, N, H] of the new tokens' ``y`` [B, N, wide], the memory with them, uncommitted)."""


@dataclasses.dataclass(frozen=True)
class GroupedQuery:
    """Softmax attention of ``heads`` query heads in groups over ``kv_heads`` (Ainslie et al. 2023).

    ``scale`` multiplies scores, ``softcap`` bounds them, ``window`` counts positions, the query's included.
    ``rope`` None: positions turn nothing. ``qk_norm``: queries and keys are normalised a head, with
    ``qk_norm_whole`` over all heads at once, with ``qk_norm_last`` behind RoPE; ``qk_norm_bare``: a head,
    behind RoPE, without a weight. ``chunk``: only positions of the query's own chunk of so many are seen.
    ``temperature`` (f, a): a query at position i is scaled by 1 + a log(1 + floor((i + 1) / f)) (Llama 4).
    ``hadamard``: both are turned behind RoPE by the Hadamard matrix of ``head_dim`` (rotated targets).
    ``sinks``: each query head has a score that takes its share of the softmax and adds nothing (gpt-oss).
    ``gated``: each number of the result is multiplied by the sigmoid of another projection (Qwen3-Next).
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None
    window: int | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    qk_norm_last: bool = False
    hadamard: bool = False
    sinks: bool = False
    gated: bool = False
    qk_norm_bare: bool = False
    chunk: int | None = None
    temperature: tuple[float, float] | None = None

    def table(self, wide: int, hidden: int, norm: Norm, dtype: Any) -> Weights:
        """q [I, Hq*d], k, v [I, Hkv*d], o [Hq*d, H]; q_bias, k_bias, v_bias, o_bias; q_norm, k_norm [d], or
        [Hq*d], [Hkv*d]; sinks [Hq] f32; q_gate [I, Hq*d]."""
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        table: Weights = {
            "q": ArrayInfo((wide, q), dtype, ("embed", "heads")),
            "k": ArrayInfo((wide, k), dtype, ("embed", "kv_heads")),
            "v": ArrayInfo((wide, k), dtype, ("embed", "kv_heads")),
            "o": ArrayInfo((q, hidden), dtype, ("heads", "embed")),
        }
        if self.qkv_bias:
            table |= {
                "q_bias": _bias(q, "heads", dtype),
                "k_bias": _bias(k, "kv_heads", dtype),
                "v_bias": _bias(k, "kv_heads", dtype),
            }
        if self.o_bias:
            table["o_bias"] = _bias(hidden, None, dtype)
        if self.qk_norm:
            each = (q, k) if self.qk_norm_whole else (self.head_dim, self.head_dim)
            table |= {"q_norm": norm.table(each[0], dtype), "k_norm": norm.table(each[1], dtype)}
        if self.sinks:
            table["sinks"] = _bias(self.heads, "heads", jnp.float32)
        if self.gated:
            table["q_gate"] = ArrayInfo((wide, q), dtype, ("embed", "heads"))
        return table

    def cache_table(self, batch: int, capacity: int, kv_form: KVFormat) -> KV:
        """Keys and values; keys as differences from a row's first where no softcap and no sink would
        notice."""
        return KV.table(
            kv_form,
            batch=batch,
            capacity=capacity,
            kv_heads=self.kv_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            centred=self.softcap is None and not self.sinks,
        )

    def __call__(
        self, weights: Weights, y: jax.Array, angles: Angles, norm: Norm, memory: Any, at: Placement
    ) -> tuple[jax.Array, Any]:
        """See :class:`Mixer`; ``memory`` is a ``KV``, or whatever attends as it does."""
        b, n, _ = y.shape

        def heads(name: str) -> jax.Array:
            return linear(y, weights[name], weights.get(f"{name}_bias")).reshape(b, n, -1, self.head_dim)

        def normed(x: jax.Array, name: str) -> jax.Array:
            flat = x.reshape(b, n, -1) if self.qk_norm_whole else x
            return norm(flat, weights[f"{name}_norm"]).reshape(x.shape)

        q, k, v = heads("q"), heads("k"), heads("v")
        if self.qk_norm and not self.qk_norm_last:
            q, k = normed(q, "q"), normed(k, "k")
        if self.rope is not None:
            turn = angles.of(self.rope, self.head_dim)
            q, k = rotate(q, *turn), rotate(k, *turn)
        if self.qk_norm and self.qk_norm_last:
            q, k = normed(q, "q"), normed(k, "k")
        if self.qk_norm_bare:
            ones = jnp.ones((self.head_dim,), jnp.float32)
            q, k = (rms_norm(x, ones, norm.eps) for x in (q, k))
        if self.temperature is not None:
            floor, strength = self.temperature
            turns = jnp.floor((at.positions.astype(jnp.float32) + 1) / floor)
            q = (q * (1 + strength * jnp.log1p(turns))[:, :, None, None]).astype(q.dtype)
        if self.hadamard:
            # Importing Pallas takes a third of a second, which other targets are spared.
            from kernels_pallas.hadamard import hadamard

            how = devices.current().operation("hadamard")
            q, k = hadamard(q, implementation=how), hadamard(k, implementation=how)
        options: dict[str, Any] = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        if self.sinks:
            options["sinks"] = weights["sinks"]
        if self.chunk is not None and memory.capacity > self.chunk:
            places = at.positions if at.slot_positions is None else at.slot_positions
            at = dataclasses.replace(at, visible=Chunked(at.visible, at.positions, places, self.chunk))
        out, memory = memory.attend(q, k, v, at, **options)
        out = out.reshape(b, n, -1)
        if self.gated:
            out *= jax.nn.sigmoid(linear(y, weights["q_gate"]))
        return linear(out, weights["o"], weights.get("o_bias")), memory


@dataclasses.dataclass(frozen=True)
class Block:
    """A layer: ``mixer`` and ``feed``, the width of a gated MLP or a mixture of experts.

    ``wide``: width of what the mixer reads, where it is not ``hidden`` (then the caller hands it in, see
    ``run``); ``own_norm``: the layer has ``attn_norm``. ``sandwich``: a second norm closes each of the two
    parts before its residual sum; without ``pre_norm`` it is the only one (OLMo 2). ``residual_scale``
    multiplies what each part adds (Granite). ``router_f32``: the router is held and computed in f32.
    """

    hidden: int
    mixer: Mixer
    feed: int | MoeConfig
    activation: str = "silu"
    norm: Norm = Norm()
    wide: int | None = None
    own_norm: bool = True
    sandwich: bool = False
    mlp_bias: bool = False
    router_f32: bool = False
    pre_norm: bool = True
    residual_scale: float | None = None

    def table(self, dtype: Any) -> Weights:
        """Shape, dtype, logical axes and initialiser of every weight, in the layout of the module's text."""
        hidden = self.hidden
        table: Weights = self.mixer.table(self.wide or hidden, hidden, self.norm, dtype)
        if self.pre_norm:
            table["mlp_norm"] = self.norm.table(hidden, dtype)
        if self.own_norm and self.pre_norm:
            table["attn_norm"] = self.norm.table(hidden, dtype)
        if self.sandwich:
            table |= {name: self.norm.table(hidden, dtype) for name in ("post_attn_norm", "post_mlp_norm")}
        if isinstance(self.feed, MoeConfig):
            return table | _mixture(self.feed, hidden, dtype, jnp.float32 if self.router_f32 else dtype)
        table |= _dense(hidden, self.feed, dtype)
        if self.mlp_bias:
            table |= {
                "gate_bias": _bias(self.feed, "mlp", dtype),
                "up_bias": _bias(self.feed, "mlp", dtype),
                "down_bias": _bias(hidden, None, dtype),
            }
        return table

    def run(
        self,
        weights: Weights,
        x: jax.Array,
        angles: Angles,
        memory: Any,
        at: Placement,
        *,
        y: jax.Array | None = None,
        residual: jax.Array | None = None,
        post_rotation: jax.Array | None = None,
        routing: list[jax.Array] | None = None,
    ) -> tuple[jax.Array, Any]:
        """(residual stream [B, N, H] behind the layer, its memory with the new tokens).

        ``y`` [B, N, wide]: what the mixer reads (None: ``x`` normalised); ``residual``: what its result is
        added to (None: ``x``). ``post_rotation`` [H, H] f32: turns what the closing norms yield.
        ``routing`` gets the router logits [B, N, E] f32 of a mixture appended.
        """

        def closed(part: jax.Array, name: str) -> jax.Array:
            if self.sandwich:
                part = self.norm(part, weights[name])
                if post_rotation is not None:
                    part = linear(part.astype(post_rotation.dtype), post_rotation, dtype=part.dtype)
            return part if self.residual_scale is None else part * self.residual_scale

        with jax.named_scope("attention"):
            if y is None:
                y = self.norm(x, weights["attn_norm"]) if self.pre_norm else x
            tap("attn_norm", y)
            y, memory = self.mixer(weights, y, angles, self.norm, memory, at)
            y = closed(y, "post_attn_norm")
            tap("attn_out", y)
            x = (x if residual is None else residual) + y
            tap("attn_residual", x)
        with jax.named_scope("mlp"):
            y = self.norm(x, weights["mlp_norm"]) if self.pre_norm else x
            tap("mlp_norm", y)
            if isinstance(self.feed, MoeConfig):
                if routing is not None:
                    routing.append(router_logits(y, weights))
                y = moe_mlp(y, weights, self.feed, self.activation)
            else:
                y = gated_mlp(y, weights, self.activation)
            y = closed(y, "post_mlp_norm")
            tap("mlp", y)
            x = x + y
        tap("residual", x)
        return x, memory


def _dense(hidden: int, width: int, dtype: Any) -> Weights:
    return {
        "gate": ArrayInfo((hidden, width), dtype, ("embed", "mlp")),
        "up": ArrayInfo((hidden, width), dtype, ("embed", "mlp")),
        "down": ArrayInfo((width, hidden), dtype, ("mlp", "embed")),
    }


def _mixture(moe: MoeConfig, hidden: int, dtype: Any, router_dtype: Any) -> Weights:
    e, f = moe.experts, moe.intermediate_size
    experts = {
        "gate": ArrayInfo((e, hidden, f), dtype, ("experts", "embed", "mlp")),
        "up": ArrayInfo((e, hidden, f), dtype, ("experts", "embed", "mlp")),
        "down": ArrayInfo((e, f, hidden), dtype, ("experts", "mlp", "embed")),
    }
    if moe.bias:
        for name, width, axis in (("gate", f, "mlp"), ("up", f, "mlp"), ("down", hidden, None)):
            experts[f"{name}_bias"] = ArrayInfo((e, width), dtype, ("experts", axis), constant(0.0))
    # Two experts that score almost alike change places under rounding, whatever the rest is.
    table: Weights = {
        "router": ArrayInfo((hidden, e), router_dtype, ("embed", None)),
        "experts": experts,
    }
    if moe.router_bias:
        table["router_bias"] = _bias(e, None, router_dtype)
    if moe.correction:
        table["correction"] = _bias(e, None, jnp.float32)
    if moe.shared:
        table["shared"] = _dense(hidden, moe.shared, dtype)
    if moe.shared_gate:
        table["shared_gate"] = ArrayInfo((hidden, 1), dtype, ("embed", None))
    return table


def _bias(size: int, axis: str | None, dtype: Any) -> ArrayInfo:
    return ArrayInfo((size,), dtype, (axis,), constant(0.0))
