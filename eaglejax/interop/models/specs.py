"""What the torch models need to know of a configuration, as plain data that travels in a JSON file.

``convert`` makes these from configurations and trees. Rotary frequencies are numbers here, computed once by
``nn.rope``, so that both sides turn by the same angles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from eaglejax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """``inv_freq``: radians a position of each rotated pair, f32 values; ``scale``: factor of cos and sin."""

    inv_freq: tuple[float, ...]
    scale: float


@dataclasses.dataclass(frozen=True)
class MoeSpec:
    """See ``nn.moe.MoeConfig``."""

    experts: int
    top_k: int
    softmax_first: bool
    normalize: bool


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """A target. ``windows``, ``ropes`` (indices into ``rope_table``) and ``sparse`` have one entry a layer;
    the other fields are those of ``ModelConfig``."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_scale: float
    norm_eps: float
    activation: str
    tie_embeddings: bool
    qk_norm: bool
    norm_offset: bool
    sandwich_norms: bool
    attention_softcap: float | None
    final_softcap: float | None
    embed_scale: float | None
    windows: tuple[int | None, ...]
    rope_table: tuple[RopeSpec, ...]
    ropes: tuple[int, ...]
    sparse: tuple[bool, ...]
    moe: MoeSpec | None = None


@dataclasses.dataclass(frozen=True)
class EagleSpec:
    """A draft; fields as in ``EagleConfig``. ``tied``: a borrowed head is the embedding table [V, H].
    ``moe``: how each layer's experts are mixed, None for dense ones."""

    version: int
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    aux: tuple[int, ...]
    norm_eps: float
    activation: str
    aux_norm: str
    norm_before_residual: bool
    head_norm: bool
    feed_normed: bool
    qk_norm: bool
    embed_scale: float | None
    softcap: float | None
    windows: tuple[int | None, ...]
    rope: RopeSpec
    tied: bool
    feature_map: bool = False
    moe: MoeSpec | None = None

    def __post_init__(self) -> None:
        if self.version == 3 and not self.aux:
            raise ConfigError("the draft's spec does not say which boundaries it reads")

    @property
    def taps(self) -> tuple[int, ...]:
        """Hidden-state boundaries of the target that it reads; none where it reads the state behind the final
        norm."""
        return self.aux if self.version == 3 else ()


@dataclasses.dataclass(frozen=True)
class TreeSpec:
    """A draft tree. ``kind`` "dynamic": ``depth``, ``branching`` and ``nodes`` of ``DynamicTree``; "static":
    ``parent`` and ``rank`` of ``StaticTree``. Nodes whose cumulative draft probability is below
    ``min_confidence`` are not proposed."""

    kind: str
    depth: int
    branching: int
    nodes: int
    parent: tuple[int, ...] = ()
    rank: tuple[int, ...] = ()
    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("dynamic", "static"):
            raise ConfigError(f"tree kind {self.kind!r} is not known; it is dynamic or static")
        if self.kind == "static" and not len(self.parent) == len(self.rank) == self.nodes:
            raise ConfigError(
                f"a static tree of {self.nodes} nodes lists {len(self.parent)} parents and {len(self.rank)} "
                "ranks"
            )

    @property
    def levels(self) -> int:
        """Levels that are grown: no path of N nodes is longer than N - 1 drafts."""
        return min(self.depth, self.nodes - 1)

    @property
    def scratch(self) -> int:
        """Draft cache slots that a tree takes behind the committed pairs."""
        if self.kind == "dynamic":
            return (self.levels - 1) * self.branching
        return len(set(self.parent[1:]) - {0})


_NESTED = {"rope": RopeSpec, "moe": MoeSpec, "rope_table": RopeSpec}
_SPECS = {"decoder": DecoderSpec, "eagle": EagleSpec, "tree": TreeSpec}
Spec = DecoderSpec | EagleSpec | TreeSpec


def to_dict(spec: Spec) -> dict[str, Any]:
    """The spec as JSON-ready data, with its ``type``."""
    (kind,) = (name for name, cls in _SPECS.items() if isinstance(spec, cls))
    return {"type": kind, **dataclasses.asdict(spec)}


def from_dict(data: Mapping[str, Any]) -> Any:
    """The spec that :func:`to_dict` wrote. Raises ConfigError that names what is missing or unknown."""
    kind = data.get("type")
    if kind not in _SPECS:
        raise ConfigError(f"spec type {kind!r} is not known; it is one of {', '.join(_SPECS)}")
    return _build(_SPECS[kind], {key: value for key, value in data.items() if key != "type"}, str(kind))


def _build(cls: Any, data: Mapping[str, Any], where: str) -> Any:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(data) - set(fields))
    missing = [name for name, f in fields.items() if name not in data and f.default is dataclasses.MISSING]
    if unknown or missing:
        raise ConfigError(
            f"the {where} spec was written by another version: it lacks [{', '.join(missing)}] and has "
            f"[{', '.join(unknown)}] too many"
        )
    return cls(**{name: _value(name, value) for name, value in data.items()})


def _value(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return _build(_NESTED[name], value, name)
    if isinstance(value, list | tuple):
        return tuple(_value(name, item) for item in value)
    return value
