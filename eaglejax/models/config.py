"""Architecture of a target: every family is a setting of one decoder.

``from_hf`` reads a Hugging Face ``config.json``. What a family's published configs may leave out is listed in
``FAMILIES`` as data; a missing key that has no such default is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from eaglejax.devices import Attention
from eaglejax.errors import ConfigError
from eaglejax.models.config_reader import ConfigReader
from eaglejax.nn import rope as rope_lib
from eaglejax.nn.mlp import activation
from eaglejax.nn.moe import MoeConfig
from eaglejax.nn.rope import RopeConfig

FINAL = "final"
"""Name of the hidden state behind the final norm, which the head reads, among the boundaries."""

Boundary = int | str
"""Which hidden state: 0 = embedding after any scaling, i = output of block i (the residual stream, before any
final norm), or ``FINAL``."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of a decoder; hashable, a compile-time constant.

    ``sliding[i]`` says that layer i attends within ``window`` positions (itself included) and uses
    ``sliding_rope`` (None: ``rope``). ``sparse[i]`` says that layer i's feed-forward block is the mixture
    ``moe``. ``norm_offset``: norm weights are stored as distance from one. ``sandwich_norms``: a second
    norm closes each of the two blocks of a layer before its residual sum. ``embed_scale`` (rounded to the
    embedding's dtype) multiplies the embedding, ``query_scale`` the attention scores. Of rotated targets:
    ``qk_rotation`` turns queries and keys behind RoPE by the Hadamard matrix of ``head_dim``,
    ``post_rotation`` what a closing norm yields by the matrix of that name among the weights. ``attention``:
    how it is computed (None: as the device's adapter chooses); it is no part of the architecture.
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
    window: int | None = None
    sliding: tuple[bool, ...] = ()
    sliding_rope: RopeConfig | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embed_scale: float | None = None
    moe: MoeConfig | None = None
    sparse: tuple[bool, ...] = ()
    qk_rotation: bool = False
    post_rotation: bool = False
    attention: Attention | None = None

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
        for name, needs in (("sliding", "window"), ("sparse", "moe")):
            flags = getattr(self, name)
            if len(flags) not in (0, self.num_layers):
                raise ConfigError(f"{name} has {len(flags)} entries for {self.num_layers} layers")
            if any(flags) and not getattr(self, needs):
                raise ConfigError(f"{name} marks layers but {needs} is {getattr(self, needs)!r}")
        if self.post_rotation and not self.sandwich_norms:
            raise ConfigError("post_rotation turns what closing norms yield, and this model has none")
        activation(self.activation)
        for rope in (self.rope, self.sliding_rope):
            if rope is not None:
                rope_lib.frequencies(rope, self.head_dim)

    def layer_window(self, layer: int) -> int | None:
        """Attention window of a layer in positions, None for full attention."""
        return self.window if self.sliding and self.sliding[layer] else None

    def layer_rope(self, layer: int) -> RopeConfig:
        """Rotary settings of a layer."""
        if self.sliding_rope is not None and self.sliding and self.sliding[layer]:
            return self.sliding_rope
        return self.rope

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's feed-forward block is a mixture of experts."""
        return bool(self.sparse) and self.sparse[layer]


_ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {"sliding_window": 4096},
    "mixtral": {"sliding_window": None, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "qwen2": {**_QWEN_WINDOW, "max_window_layers": 28},
    "qwen3": {**_QWEN_WINDOW, "max_window_layers": 28, "attention_bias": False, "head_dim": 128},
    "qwen3_moe": {
        **_QWEN_WINDOW,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "norm_topk_prob": False,
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
}
"""Supported ``model_type``s, each with the keys that its configs may leave out and what is then meant."""


def from_hf(config: Mapping[str, Any], *, context: int | None = None) -> ModelConfig:
    """ModelConfig of a Hugging Face ``config.json`` given as a dict.

    ``context``: longest sequence that length-dependent rotary kinds are evaluated for (see ``nn.rope``).
    Raises ConfigError for an unknown architecture and for settings that are missing or contradict each other.
    """
    family = config.get("model_type")
    if family == "gemma3":
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise ConfigError("a gemma3 config must hold its language model under 'text_config'")
        # Multimodal checkpoints keep only some keys outside; those describe the text model too.
        config = {
            **text,
            "tie_word_embeddings": text.get("tie_word_embeddings", config.get("tie_word_embeddings")),
        }
        family = "gemma3_text"
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(
            f"model_type {family!r:.80} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    read = ConfigReader(family, config, FAMILIES[family])
    if read.flag("use_bidirectional_attention"):
        raise ConfigError(
            "use_bidirectional_attention is set: this is an encoder, which cannot generate text"
        )
    heads = read.integer("num_attention_heads")
    hidden = read.integer("hidden_size")
    layers = read.count("num_hidden_layers")
    head_dim = read.integer("head_dim", hidden // heads)
    act = read.choice("hidden_activation" if family == "gemma3_text" else "hidden_act", "silu")
    if act not in _ACTIVATION_NAMES:
        raise ConfigError(f"activation {act!r:.80} is not supported; use one of {sorted(_ACTIVATION_NAMES)}")
    read.refuse_foreign(
        query_pre_attn_scalar=head_dim,
        hidden_activation=act,
        attention_multiplier=head_dim**-0.5,
        rotary_dim=head_dim,
        no_rope_layers=[1] * layers,
    )
    # The class of qwen2 has a bias on q, k and v whatever its config says, and none on o.
    attention_bias = read.flag("attention_bias") and family != "qwen2"
    gemma = family == "gemma3_text"
    window, sliding = _sliding(read, layers)
    moe, sparse = _mixture(read, layers)
    theta = read.defaults.get("rope_theta", 10000.0)
    rope = rope_lib.from_hf(
        {**config, "max_position_embeddings": read.integer("max_position_embeddings")},
        layer_type="full_attention" if gemma else None,
        default_theta=theta,
        context=context,
    )
    return ModelConfig(
        family=family,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=read.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        max_position=read.integer("max_position_embeddings"),
        rope=rope,
        query_scale=(read.number("query_pre_attn_scalar", head_dim) or head_dim) ** -0.5,
        norm_eps=read.fraction("rms_norm_eps", 1e-6),
        activation=_ACTIVATION_NAMES[act],
        tie_embeddings=read.flag("tie_word_embeddings"),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=read.flag("mlp_bias"),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        norm_offset=gemma,
        sandwich_norms=gemma,
        window=window,
        sliding=sliding,
        sliding_rope=_local_rope(read, context) if gemma else None,
        attention_softcap=read.number("attn_logit_softcapping") if gemma else None,
        final_softcap=read.number("final_logit_softcapping") if gemma else None,
        embed_scale=float(hidden) ** 0.5 if gemma else None,
        moe=moe,
        sparse=sparse,
    )


def _sliding(read: ConfigReader, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """(window, which layers use it) of a config."""
    types, window = read.kinds(layers), read.given("sliding_window")
    if read.family == "llama":
        if window is not None and read.integer("sliding_window") < read.integer("max_position_embeddings"):
            raise ConfigError(
                f"sliding_window is {window}, which llama models do not have; remove the key, or name the "
                "model_type that has it"
            )
        window = None
    if read.family == "llama" or (
        "use_sliding_window" in read.defaults and not read.flag("use_sliding_window")
    ):
        if types is not None and set(types) != {"full_attention"}:
            raise ConfigError(
                f"layer_types {sorted(set(types))} do not go with a {read.family} config without a window"
            )
        return None, ()
    if read.family in ("mistral", "mixtral", "qwen3_moe"):
        # These families slide on every layer or on none; a mixed list would belong to another architecture.
        if types is not None and set(types) != {"full_attention" if window is None else "sliding_attention"}:
            raise ConfigError(
                f"layer_types {sorted(set(types))} do not go with {read.family}'s one window {window!r:.80}"
            )
        flags = (window is not None,) * layers
    elif types is not None:
        unknown = set(types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ConfigError(
                f"layer_types holds {sorted(unknown)}; known are full_attention and sliding_attention"
            )
        flags = tuple(t == "sliding_attention" for t in types)
    elif read.family == "gemma3_text":
        pattern = read.integer("_sliding_window_pattern", read.integer("sliding_window_pattern"))
        flags = tuple(bool((i + 1) % pattern) for i in range(layers))
    else:
        flags = tuple(
            window is not None and i >= read.integer("max_window_layers", least=0) for i in range(layers)
        )
    if not any(flags):
        return None, ()
    if window is None:
        raise ConfigError("sliding_window is None; layers that slide need a positive integer")
    return read.integer("sliding_window"), flags


def _mixture(read: ConfigReader, layers: int) -> tuple[MoeConfig | None, tuple[bool, ...]]:
    """(mixture, which layers have it) of a config."""
    if read.family not in ("mixtral", "qwen3_moe"):
        return None, ()
    given = [k for k in ("num_experts", "num_local_experts") if read.config.get(k) is not None]
    counts = {read.count(k) for k in given}
    if len(counts) != 1:
        raise ConfigError(
            f"the number of experts is given as {sorted(counts) or 'nothing'}; give num_experts once"
        )
    experts = counts.pop()
    top_k = read.integer("num_experts_per_tok")
    if read.family == "mixtral":
        width = read.integer("intermediate_size")
        moe = MoeConfig(experts, top_k, width, softmax_first=False, normalize=False)
        return moe, (True,) * layers
    step = read.integer("decoder_sparse_step")
    dense = read.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(type(i) is int for i in dense):
        raise ConfigError(f"mlp_only_layers is {dense!r:.80}; it must be a list of layers")
    moe = MoeConfig(
        experts,
        top_k,
        read.integer("moe_intermediate_size"),
        softmax_first=True,
        normalize=read.flag("norm_topk_prob"),
    )
    return moe, tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))


def _local_rope(read: ConfigReader, context: int | None) -> RopeConfig:
    """Rotary settings of Gemma 3's sliding layers, which context extension leaves alone."""
    name = "sliding_attention"
    sections = read.config.get("rope_parameters")
    section = (sections.get(name) if isinstance(sections, Mapping) else None) or {}
    return rope_lib.from_hf(
        {
            "rope_parameters": section,
            "rope_theta": read.config.get("rope_local_base_freq"),
            "max_position_embeddings": read.integer("max_position_embeddings"),
        },
        default_theta=read.defaults["rope_local_base_freq"],
        context=context,
    )
