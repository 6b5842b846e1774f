"""Architecture of a target: every family is a setting of one decoder, layer by layer where layers differ."""

from __future__ import annotations

import dataclasses

from eaglejax.errors import ConfigError
from eaglejax.nn import rope as rope_lib
from eaglejax.nn.block import Block, GroupedQuery, Mixer, Norm
from eaglejax.nn.mlp import activation
from eaglejax.nn.moe import MoeConfig
from eaglejax.nn.rope import RopeConfig

FINAL = "final"
"""Name of the hidden state behind the final norm, which the head reads, among the boundaries."""

Boundary = int | str
"""Which hidden state: 0 = embedding after any scaling, i = output of block i (the residual stream, before any
final norm), or ``FINAL``."""


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What a layer has of its own; None: what the model has.

    ``window``: attention within so many positions, the query's own included (None: all). ``rope``: rotary
    settings. ``moe``: its feed-forward block is this mixture (None: the model's dense one). ``mixer``: how
    its tokens meet, ``nn.latent.LatentAttention`` or ``nn.recurrent.GatedDelta`` (None: the model's
    grouped-query attention). ``rotary`` False: positions turn nothing. ``chunk``: attention within the
    chunks of so many positions that the text is divided into (None: all).
    """

    window: int | None = None
    rope: RopeConfig | None = None
    moe: MoeConfig | None = None
    mixer: Mixer | None = None
    rotary: bool = True
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name, size in (("window", self.window), ("chunk", self.chunk)):
            if size is not None and size < 1:
                raise ConfigError(f"a layer's {name} is {size}; it must be at least 1")
        if self.mixer is not None and (self.window is not None or self.rope is not None):
            raise ConfigError("window and rope are of grouped-query attention; another mixer has its own")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of a decoder; hashable, a compile-time constant.

    ``layers``: one LayerSpec a layer, or none at all where no layer has anything of its own. ``norm_offset``:
    norm weights are stored as distance from one. ``sandwich_norms``: a second norm closes each of the two
    blocks of a layer before its residual sum. ``embed_scale`` (rounded to the embedding's dtype) multiplies
    the embedding, ``query_scale`` the attention scores; ``logits_scaling`` divides the logits. What begins
    with ``qk_norm``, ``attention_gate``, ``attention_sinks`` and ``temperature``: see
    ``nn.block.GroupedQuery``, but that rotated layers alone have ``qk_norm_bare``, the others alone
    ``temperature``; ``pre_norm``
    and ``residual_scale``: see ``nn.block.Block``. Of rotated targets: ``qk_rotation`` turns queries and keys
    behind RoPE by the Hadamard matrix of ``head_dim``, ``post_rotation`` what a closing norm yields by the
    matrix of that name among the weights.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope: RopeConfig
    query_scale: float
    norm_eps: float = 1e-6
    activation: str = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: bool = False
    sandwich_norms: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embed_scale: float | None = None
    layers: tuple[LayerSpec, ...] = ()
    qk_rotation: bool = False
    post_rotation: bool = False
    qk_norm_whole: bool = False
    qk_norm_last: bool = False
    attention_gate: bool = False
    attention_sinks: bool = False
    pre_norm: bool = True
    residual_scale: float | None = None
    logits_scaling: float | None = None
    qk_norm_bare: bool = False
    temperature: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} heads are not a multiple of {self.num_kv_heads} key/value heads"
            )
        if len(self.layers) not in (0, self.num_layers):
            raise ConfigError(f"layers has {len(self.layers)} entries for {self.num_layers} layers")
        if self.layers and set(self.layers) == {LayerSpec()}:
            object.__setattr__(self, "layers", ())  # one spelling, so that equal models are equal
        if self.post_rotation and not self.sandwich_norms:
            raise ConfigError("post_rotation turns what closing norms yield, and this model has none")
        activation(self.activation)
        for rope in {self.rope, *(layer.rope for layer in self.layers if layer.rope is not None)}:
            rope_lib.frequencies(rope, self.head_dim)

    def layer(self, index: int) -> LayerSpec:
        """What a layer has: its own, and the model's rotary settings where it has none (None: it is not
        rotated, or has a mixer of its own)."""
        spec = self.layers[index] if self.layers else LayerSpec()
        if spec.mixer is not None or spec.rope is not None or not spec.rotary:
            return spec
        return dataclasses.replace(spec, rope=self.rope)

    def block(self, index: int) -> Block:
        """A layer in full, as ``nn.block`` runs it."""
        spec = self.layer(index)
        mixer = spec.mixer
        if mixer is None:
            mixer = GroupedQuery(
                heads=self.num_heads,
                kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                scale=self.query_scale,
                rope=spec.rope,
                window=spec.window,
                softcap=self.attention_softcap,
                qkv_bias=self.qkv_bias,
                o_bias=self.o_bias,
                qk_norm=self.qk_norm,
                qk_norm_whole=self.qk_norm_whole,
                qk_norm_last=self.qk_norm_last,
                hadamard=self.qk_rotation,
                sinks=self.attention_sinks,
                gated=self.attention_gate,
                qk_norm_bare=self.qk_norm_bare and spec.rope is not None,
                chunk=spec.chunk,
                temperature=self.temperature if spec.rope is None else None,
            )
        return Block(
            hidden=self.hidden_size,
            mixer=mixer,
            feed=spec.moe or self.intermediate_size,
            activation=self.activation,
            norm=Norm(self.norm_eps, self.norm_offset),
            sandwich=self.sandwich_norms,
            mlp_bias=self.mlp_bias,
            pre_norm=self.pre_norm,
            residual_scale=self.residual_scale,
        )

    def require_grouped(self, what: str) -> None:
        """Raise ConfigError, saying that ``what`` knows grouped-query attention and gates that multiply, for
        models of other parts."""
        if self.activation == "swiglu_clamped":
            raise ConfigError(f"{what} does not know the clamped gates of a {self.family} model")
        other = [i for i, layer in enumerate(self.layers) if layer.mixer is not None]
        if other:
            kind = type(self.layers[other[0]].mixer).__name__
            raise ConfigError(f"{what} knows grouped-query attention alone; layer {other[0]} is {kind}")
