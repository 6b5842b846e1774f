"""What a family of targets says of itself, and what several say alike: activations, windows, mixtures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from eaglejax.errors import ConfigError
from eaglejax.models.config import LayerSpec
from eaglejax.models.config_reader import ConfigReader
from eaglejax.nn.moe import MoeConfig

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Activations by their spelling in configs."""

Layers = Callable[[ConfigReader, int, int | None], tuple[LayerSpec, ...]]
"""(reader, number of layers, context) -> one LayerSpec a layer, or () where layers are alike."""


def no_layers(
    read: ConfigReader, count: int, context: int | None, kind: str = "full_attention"
) -> tuple[LayerSpec, ...]:
    """Layers that are all alike, of the ``kind`` that ``layer_types`` may call them; a config that says
    otherwise is refused."""
    del context
    types, window = read.kinds(count), read.given("sliding_window")
    if window is not None and read.integer("sliding_window") < read.integer("max_position_embeddings"):
        raise ConfigError(
            f"sliding_window is {window}, which {read.family} models do not have; remove the key, or name "
            "the model_type that has it"
        )
    _no_kinds(read, types, kind)
    return ()


@dataclasses.dataclass(frozen=True)
class Family:
    """A ``model_type``.

    ``defaults``: keys that its configs may leave out, and what is then meant. ``layers``: what layers have of
    their own. ``fields``: further fields of ModelConfig, from the reader. ``activation``: the key that names
    it. ``rope_section``: where rotary parameters are kept per layer type, the model's own. ``fixed_rope``:
    its dynamic rotation may be stretched once and for all (see ``nn.rope.from_hf``).
    """

    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layers: Layers = no_layers
    fields: Callable[[ConfigReader], dict[str, Any]] = lambda read: {}
    activation: str = "hidden_act"
    rope_section: str | None = None
    fixed_rope: bool = False


def _no_kinds(read: ConfigReader, types: tuple[str, ...] | None, kind: str = "full_attention") -> None:
    if types is not None and set(types) != {kind}:
        raise ConfigError(
            f"layer_types {sorted(set(types))} do not go with a {read.family} config without a window"
        )


def sliding(read: ConfigReader, flags: tuple[bool, ...], **of_sliding: Any) -> tuple[LayerSpec, ...]:
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


def one_window(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    """Every layer slides or none; a mixed list would belong to another architecture."""
    del context
    if _switched_off(read, count):
        return ()
    types, window = read.kinds(count), read.given("sliding_window")
    if types is not None and set(types) != {"full_attention" if window is None else "sliding_attention"}:
        raise ConfigError(
            f"layer_types {sorted(set(types))} do not go with {read.family}'s one window {window!r:.80}"
        )
    return sliding(read, (window is not None,) * count)


def kinds_or(read: ConfigReader, count: int, otherwise: Callable[[], tuple[bool, ...]]) -> tuple[bool, ...]:
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


def window_from_layer(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
    """Layers from ``max_window_layers`` on slide (Qwen2, Qwen3)."""
    del context
    if _switched_off(read, count):
        return ()

    def otherwise() -> tuple[bool, ...]:
        first = read.integer("max_window_layers", least=0)
        return tuple(read.given("sliding_window") is not None and i >= first for i in range(count))

    return sliding(read, kinds_or(read, count, otherwise))


def alternating(pattern: int) -> Layers:
    """Every ``pattern``-th layer is full and the others slide, unless ``layer_types`` says it."""

    def layers(read: ConfigReader, count: int, context: int | None) -> tuple[LayerSpec, ...]:
        del context
        return sliding(
            read, kinds_or(read, count, lambda: tuple(bool((i + 1) % pattern) for i in range(count)))
        )

    return layers


def rotary_layers(read: ConfigReader, count: int) -> tuple[bool, ...]:
    """Which layers turn by position: all but every ``no_rope_layer_interval``-th, unless ``no_rope_layers``
    says it (1: it turns)."""
    interval = read.integer("no_rope_layer_interval")
    rotary = read.get("no_rope_layers") or [int(bool((i + 1) % interval)) for i in range(count)]
    if not isinstance(rotary, list | tuple) or len(rotary) != count or not set(rotary) <= {0, 1}:
        raise ConfigError(f"no_rope_layers is {rotary!r:.80}; it must hold {count} times 1, or 0 for no RoPE")
    return tuple(bool(r) for r in rotary)


def experts(read: ConfigReader) -> int:
    """The number of experts, under any of its names."""
    given = [
        k for k in ("num_experts", "num_local_experts", "n_routed_experts") if read.config.get(k) is not None
    ]
    counts = {read.count(k) for k in given}
    if len(counts) != 1:
        raise ConfigError(
            f"the number of experts is given as {sorted(counts) or 'nothing'}; give num_experts once"
        )
    return counts.pop()


def with_mixture(
    layers: tuple[LayerSpec, ...], moe: MoeConfig, sparse: tuple[bool, ...]
) -> tuple[LayerSpec, ...]:
    """``layers`` (none: all alike) with the mixture where ``sparse`` says so."""
    layers = layers or (LayerSpec(),) * len(sparse)
    return tuple(
        dataclasses.replace(layer, moe=moe) if flag else layer
        for layer, flag in zip(layers, sparse, strict=True)
    )


def every_so_many(read: ConfigReader, count: int) -> tuple[bool, ...]:
    """Which layers are mixtures: every ``decoder_sparse_step``-th, but for ``mlp_only_layers``."""
    step = read.integer("decoder_sparse_step")
    dense = read.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(type(i) is int for i in dense):
        raise ConfigError(f"mlp_only_layers is {dense!r:.80}; it must be a list of layers")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(count))
