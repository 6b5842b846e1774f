"""Families of targets: how the ``config.json`` of a ``model_type`` is read.

A family is one ``Family``: what its published configs may leave out, and what sets it apart from the common
decoder. A missing key that has no default is refused by name, as is one that other families compute with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.models.config import LayerSpec, ModelConfig
from eaglejax.models.config_reader import ConfigReader
from eaglejax.nn import rope as rope_lib
from eaglejax.nn.moe import MoeConfig
from eaglejax.nn.rope import RopeConfig

_ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}

Layers = Callable[[ConfigReader, int, int | None], tuple[LayerSpec, ...]]
"""(reader, number of layers, context) -> one LayerSpec a layer, or () where layers are alike."""


def no_layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    """Layers that are all alike; a config that says otherwise is refused."""
    del context
    types, window = read.kinds(count), read.given("sliding_window")
    if window is not None and read.integer("sliding_window") < read.integer("max_position_embeddings"):
        raise ConfigError(
            f"sliding_window is {window}, which {read.family} models do not have; remove the key, or name "
            "the model_type that has it"
        )
    _no_kinds(read, types)
    return ()


@dataclasses.dataclass(frozen=True)
class Family:
    """A ``model_type``.

    ``defaults``: keys that its configs may leave out, and what is then meant. ``layers``: what layers have of
    their own. ``fields``: further fields of ModelConfig, from the reader. ``activation``: the key that names
    it. ``rope_section``: where rotary parameters are kept per layer type, the model's own.
    """

    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layers: Layers = no_layers
    fields: Callable[[ConfigReader], dict[str, Any]] = lambda read: {}
    activation: str = "hidden_act"
    rope_section: str | None = None


FAMILIES: dict[str, Family] = {}
"""Supported families by ``model_type``."""

NESTED = {"gemma3": "gemma3_text"}
"""Multimodal ``model_type``s that keep a text model of a family under ``text_config``."""


def register(name: str, family: Family) -> None:
    """Make configs of ``model_type`` ``name`` readable. Raises ConfigError for a name that is taken."""
    if name in FAMILIES or name in NESTED:
        raise ConfigError(f"model_type {name!r} is registered already")
    FAMILIES[name] = family


def from_hf(config: Mapping[str, Any], *, context: int | None = None) -> ModelConfig:
    """ModelConfig of a Hugging Face ``config.json`` given as a dict.

    ``context``: longest sequence that length-dependent rotary kinds are evaluated for (see ``nn.rope``).
    Raises ConfigError for an unknown architecture and for settings that are missing or contradict each other.
    """
    name = config.get("model_type")
    if isinstance(name, str) and name in NESTED:
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise ConfigError(f"a {name} config must hold its language model under 'text_config'")
        # Multimodal checkpoints keep only some keys outside; those describe the text model too.
        config = {
            **text,
            "tie_word_embeddings": text.get("tie_word_embeddings", config.get("tie_word_embeddings")),
        }
        name = NESTED[name]
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(
            f"model_type {name!r:.80} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[name]
    read = ConfigReader(name, config, family.defaults)
    if read.flag("use_bidirectional_attention"):
        raise ConfigError(
            "use_bidirectional_attention is set: this is an encoder, which cannot generate text"
        )
    heads = read.integer("num_attention_heads")
    hidden = read.integer("hidden_size")
    count = read.count("num_hidden_layers")
    head_dim = read.integer("head_dim", hidden // heads)
    act = read.choice(family.activation, "silu")
    if act not in _ACTIVATION_NAMES:
        raise ConfigError(f"activation {act!r:.80} is not supported; use one of {sorted(_ACTIVATION_NAMES)}")
    read.refuse_foreign(
        query_pre_attn_scalar=head_dim,
        hidden_activation=act,
        attention_multiplier=head_dim**-0.5,
        rotary_dim=head_dim,
        no_rope_layers=[1] * count,
    )
    biased = read.flag("attention_bias")
    fields: dict[str, Any] = {
        "family": name,
        "vocab_size": read.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": read.integer("intermediate_size"),
        "num_layers": count,
        "num_heads": heads,
        "num_kv_heads": read.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "max_position": read.integer("max_position_embeddings"),
        "rope": rope_lib.from_hf(
            {**config, "max_position_embeddings": read.integer("max_position_embeddings")},
            layer_type=family.rope_section,
            default_theta=read.defaults.get("rope_theta", 10000.0),
            context=context,
        ),
        "query_scale": (read.number("query_pre_attn_scalar", head_dim) or head_dim) ** -0.5,
        "norm_eps": read.fraction("rms_norm_eps", 1e-6),
        "activation": _ACTIVATION_NAMES[act],
        "tie_embeddings": read.flag("tie_word_embeddings"),
        "qkv_bias": biased,
        "o_bias": biased,
        "mlp_bias": read.flag("mlp_bias"),
        "layers": family.layers(read, count, context),
    }
    return ModelConfig(**{**fields, **family.fields(read)})


def _no_kinds(read: ConfigReader, types: tuple[str, ...] | None) -> None:
    if types is not None and set(types) != {"full_attention"}:
        raise ConfigError(
            f"layer_types {sorted(set(types))} do not go with a {read.family} config without a window"
        )


def _sliding(read: ConfigReader, flags: tuple[bool, ...], **of_sliding: Any) -> tuple[LayerSpec, ...]:
    """Layers that slide where ``flags`` say so, with ``of_sliding`` as more of their own."""
    if not any(flags):
        return ()
    if read.given("sliding_window") is None:
        raise ConfigError("sliding_window is None; layers that slide need a positive integer")
    slides = LayerSpec(window=read.integer("sliding_window"), **of_sliding)
    return tuple(slides if flag else LayerSpec() for flag in flags)


def _switched_off(read: ConfigReader, count: int) -> bool:
    """Whether a family that has a switch for windows has them off."""
    if "use_sliding_window" not in read.defaults or read.flag("use_sliding_window"):
        return False
    _no_kinds(read, read.kinds(count))
    return True


def _one_window(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    """Every layer slides or none; a mixed list would belong to another architecture."""
    del context
    if _switched_off(read, count):
        return ()
    types, window = read.kinds(count), read.given("sliding_window")
    if types is not None and set(types) != {"full_attention" if window is None else "sliding_attention"}:
        raise ConfigError(
            f"layer_types {sorted(set(types))} do not go with {read.family}'s one window {window!r:.80}"
        )
    return _sliding(read, (window is not None,) * count)


def _kinds_or(read: ConfigReader, count: int, otherwise: Callable[[], tuple[bool, ...]]) -> tuple[bool, ...]:
    """Which layers slide: as ``layer_types`` says, else ``otherwise``."""
    types = read.kinds(count)
    if types is None:
        return otherwise()
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ConfigError(
            f"layer_types holds {sorted(unknown)}; known are full_attention and sliding_attention"
        )
    return tuple(t == "sliding_attention" for t in types)


def _window_from_layer(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    """Layers from ``max_window_layers`` on slide (Qwen2, Qwen3)."""
    del context
    if _switched_off(read, count):
        return ()

    def otherwise() -> tuple[bool, ...]:
        first = read.integer("max_window_layers", least=0)
        return tuple(read.given("sliding_window") is not None and i >= first for i in range(count))

    return _sliding(read, _kinds_or(read, count, otherwise))


def _gemma3_layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    """Every so-manieth layer is full; the others slide, with rotary settings that context extension leaves
    alone."""

    def otherwise() -> tuple[bool, ...]:
        pattern = read.integer("_sliding_window_pattern", read.integer("sliding_window_pattern"))
        return tuple(bool((i + 1) % pattern) for i in range(count))

    flags = _kinds_or(read, count, otherwise)
    return _sliding(read, flags, rope=_local_rope(read, context))


def _local_rope(read: ConfigReader, context: int | None) -> RopeConfig:
    sections = read.config.get("rope_parameters")
    section = (sections.get("sliding_attention") if isinstance(sections, Mapping) else None) or {}
    return rope_lib.from_hf(
        {
            "rope_parameters": section,
            "rope_theta": read.config.get("rope_local_base_freq"),
            "max_position_embeddings": read.integer("max_position_embeddings"),
        },
        default_theta=read.defaults["rope_local_base_freq"],
        context=context,
    )


def _gemma3_fields(read: ConfigReader) -> dict[str, Any]:
    return {
        "qk_norm": True,
        "norm_offset": True,
        "sandwich_norms": True,
        "attention_softcap": read.number("attn_logit_softcapping"),
        "final_softcap": read.number("final_logit_softcapping"),
        "embed_scale": float(read.integer("hidden_size")) ** 0.5,
    }


def _experts(read: ConfigReader) -> int:
    given = [k for k in ("num_experts", "num_local_experts") if read.config.get(k) is not None]
    counts = {read.count(k) for k in given}
    if len(counts) != 1:
        raise ConfigError(
            f"the number of experts is given as {sorted(counts) or 'nothing'}; give num_experts once"
        )
    return counts.pop()


def _with_mixture(
    layers: tuple[LayerSpec, ...], moe: MoeConfig, sparse: tuple[bool, ...]
) -> tuple[LayerSpec, ...]:
    layers = layers or (LayerSpec(),) * len(sparse)
    return tuple(
        dataclasses.replace(layer, moe=moe) if flag else layer
        for layer, flag in zip(layers, sparse, strict=True)
    )


def _mixtral_layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    moe = MoeConfig(
        _experts(read),
        read.integer("num_experts_per_tok"),
        read.integer("intermediate_size"),
        softmax_first=False,
        normalize=False,
    )
    return _with_mixture(_one_window(read, count, context), moe, (True,) * count)


def _qwen_moe_layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    step = read.integer("decoder_sparse_step")
    dense = read.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(type(i) is int for i in dense):
        raise ConfigError(f"mlp_only_layers is {dense!r:.80}; it must be a list of layers")
    moe = MoeConfig(
        _experts(read),
        read.integer("num_experts_per_tok"),
        read.integer("moe_intermediate_size"),
        softmax_first=True,
        normalize=read.flag("norm_topk_prob"),
    )
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(count))
    return _with_mixture(_one_window(read, count, context), moe, sparse)


_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}

register("llama", Family({"attention_bias": False, "mlp_bias": False}))
register("mistral", Family({"sliding_window": 4096}, _one_window))
register(
    "mixtral", Family({"sliding_window": None, "rope_theta": 1e6, "rms_norm_eps": 1e-5}, _mixtral_layers)
)
register(
    "qwen2",
    # Its class has a bias on q, k and v whatever its config says, and none on o.
    Family(
        {**_QWEN_WINDOW, "max_window_layers": 28},
        _window_from_layer,
        lambda read: {"qkv_bias": True, "o_bias": False},
    ),
)
register(
    "qwen3",
    Family(
        {**_QWEN_WINDOW, "max_window_layers": 28, "attention_bias": False, "head_dim": 128},
        _window_from_layer,
        lambda read: {"qk_norm": True},
    ),
)
register(
    "qwen3_moe",
    Family(
        {
            **_QWEN_WINDOW,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "norm_topk_prob": False,
        },
        _qwen_moe_layers,
        lambda read: {"qk_norm": True},
    ),
)
register(
    "gemma3_text",
    Family(
        {
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
        _gemma3_layers,
        _gemma3_fields,
        activation="hidden_activation",
        rope_section="full_attention",
    ),
)
