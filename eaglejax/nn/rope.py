"""Rotary position embedding (Su et al. 2021) and its context extensions.

The frequencies of a model are constants: kinds that depend on the sequence length (``dynamic``,
``longrope``) are evaluated once, for ``RopeConfig.context``, instead of anew whenever a sequence grows.
Keys already in a cache thus stay valid, cached decoding equals a forward from scratch, and a row does not
depend on how long its batch mates are. With a context no longer than the model's own, ``dynamic`` is plain
RoPE.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.errors import ConfigError
from eaglejax.naming import known_name

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_ALIASES = {"su": "longrope", "mrope": "default"}
"""Earlier names of kinds; of a multimodal rotation only the text's is computed, which is the plain one."""
_PRETRAINED = ("yarn", "llama3", "longrope")  # kinds that refer to the length before extension


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """How positions turn into angles.

    ``max_position`` is the length that the model was published for, ``original_max_position`` the one it
    was pretrained with before extension, ``context`` the length that ``dynamic`` and ``longrope`` are
    evaluated for (default: ``max_position``). ``rotary_fraction`` of each head is rotated, the rest passes.
    The other fields belong to single kinds; ``alpha`` replaces the stretch of ``dynamic`` at a context.
    """

    kind: str = "default"
    theta: float = 10000.0
    max_position: int = 2048
    context: int | None = None
    rotary_fraction: float = 1.0
    factor: float = 1.0
    alpha: float | None = None
    original_max_position: int | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"rope type {self.kind!r} is not supported; use one of {list(KINDS)}")
        if self.theta <= 0 or self.factor <= 0:
            raise ConfigError(f"rope theta {self.theta} and factor {self.factor} must be positive")
        if self.kind == "yarn" and self.theta <= 1:
            raise ConfigError(f"rope type 'yarn' needs a rope_theta above 1, not {self.theta}")
        if not 0 < self.rotary_fraction <= 1:
            raise ConfigError(f"rotary fraction {self.rotary_fraction} must lie in (0, 1]")
        if self.kind in _PRETRAINED and (self.original_max_position or 0) < 2:
            raise ConfigError(f"rope type {self.kind!r} needs original_max_position_embeddings above 1")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"low_freq_factor {self.low_freq_factor} not below high_freq_factor {self.high_freq_factor}"
            )

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions of a head that are rotated (even)."""
        dim = int(head_dim * self.rotary_fraction)
        if dim % 2 or dim == 0:
            raise ConfigError(
                f"rope rotates {dim} of {head_dim} dimensions; it must be an even number above 0"
            )
        return dim


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """(inverse frequencies [rotary_dim / 2] np.float32 in radians a position, factor on cos and sin).

    Raises ConfigError for settings that give no finite numbers.
    """
    dim = rope.rotary_dim(head_dim)
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    try:
        with np.errstate(all="ignore"):
            plain = 1.0 / rope.theta**exponents
            inv_freq, scale = _SCALINGS[rope.kind](rope, plain, dim)
            inv_freq = inv_freq.astype(np.float32)
    except (ArithmeticError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"rope type {rope.kind!r} cannot be computed from {rope}: {error}") from error
    if not (np.isfinite(inv_freq).all() and math.isfinite(scale)):
        raise ConfigError(f"rope type {rope.kind!r} gives frequencies that are not finite: {rope}")
    return inv_freq, float(scale)


def _default(rope: RopeConfig, plain: np.ndarray, dim: int) -> tuple[np.ndarray, float]:
    del rope, dim
    return plain, 1.0


def _linear(rope: RopeConfig, plain: np.ndarray, dim: int) -> tuple[np.ndarray, float]:
    """Position interpolation (Chen et al. 2023)."""
    del dim
    return plain / rope.factor, 1.0


def _dynamic(rope: RopeConfig, plain: np.ndarray, dim: int) -> tuple[np.ndarray, float]:
    """NTK-aware base change at the declared context, or by a fixed ``alpha`` (Hunyuan)."""
    context = max(rope.context or rope.max_position, rope.max_position)
    stretch = rope.alpha or rope.factor * context / rope.max_position - (rope.factor - 1)
    return plain / stretch ** (np.arange(0, dim, 2) / (dim - 2)), 1.0


def _yarn(rope: RopeConfig, plain: np.ndarray, dim: int) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al. 2023): interpolate slow dimensions, keep fast ones, ramp in between."""

    def dimension(rotations: float) -> float:
        assert rope.original_max_position is not None
        return (
            dim
            * math.log(rope.original_max_position / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0, 1)
    scale = rope.attention_factor
    if scale is None:
        scale = _yarn_scale(rope.factor, rope.mscale, rope.mscale_all_dim)
    return plain / rope.factor * ramp + plain * (1 - ramp), scale


def _yarn_scale(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """YaRN's factor on cos and sin where the config gives none."""

    def scale(strength: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def _llama3(rope: RopeConfig, plain: np.ndarray, dim: int) -> tuple[np.ndarray, float]:
    """Llama 3.1: divide wavelengths beyond the pretraining length, keep short ones, blend in between."""
    del dim
    assert rope.original_max_position is not None
    turns = rope.original_max_position * plain / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0, 1)
    return (1 - keep) * plain / rope.factor + keep * plain, 1.0


def _longrope(rope: RopeConfig, plain: np.ndarray, dim: int) -> tuple[np.ndarray, float]:
    """LongRoPE (Ding et al. 2024): a searched factor a dimension, apart for short and long contexts."""
    assert rope.original_max_position is not None
    is_long = (rope.context or rope.max_position) > rope.original_max_position
    name, factors = ("long_factor", rope.long_factor) if is_long else ("short_factor", rope.short_factor)
    if len(factors) != dim // 2:
        raise ConfigError(f"rope {name} has {len(factors)} entries; {dim} rotated dimensions need {dim // 2}")
    if rope.attention_factor is not None:
        scale = rope.attention_factor
    elif rope.factor <= 1:
        scale = 1.0
    else:
        scale = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
    return plain / np.asarray(factors), scale


_SCALINGS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


def rotation(positions: jax.Array, rope: RopeConfig, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) of ``positions`` [B, N], each [B, N, rotary_dim / 2] f32."""
    inv_freq, scale = frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[..., None] * inv_freq
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


class Angles:
    """``rotation`` of one set of ``positions`` [B, N], computed once for layers with the same settings."""

    def __init__(self, positions: jax.Array) -> None:
        self._positions = positions
        self._made: dict[tuple[RopeConfig, int], tuple[jax.Array, jax.Array]] = {}

    def of(self, rope: RopeConfig, head_dim: int) -> tuple[jax.Array, jax.Array]:
        """(cos, sin) under ``rope`` for heads of ``head_dim``."""
        if (rope, head_dim) not in self._made:
            with jax.named_scope("rope"):
                self._made[rope, head_dim] = rotation(self._positions, rope, head_dim)
        return self._made[rope, head_dim]


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the pairs (i, i + rotary_dim / 2) of ``x`` [B, N, heads, d] in f32; result in x's dtype."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    y = x.astype(jnp.float32)
    first, second, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1).astype(x.dtype)


def apply_rope(x: jax.Array, positions: jax.Array, rope: RopeConfig) -> jax.Array:
    """``x`` [B, N, heads, d] rotated by its absolute ``positions`` [B, N]; result in x's dtype."""
    return rotate(x, *rotation(positions, rope, x.shape[-1]))


_OF_KIND: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "alpha"),
    "yarn": (
        *("factor", "attention_factor", "attn_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
}
"""Settings that each kind reads, beside those of ``_SHARED``."""

_SHARED = ("rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_WITHOUT_EFFECT = ("mrope_section", "mrope_interleaved", "finetuned")
"""The three parts of a multimodal position are equal for text, and how a model was tuned is only said."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("factor", "attention_factor", "attn_factor", "low_freq_factor", "beta_slow"), (1,)),
    **{"high_freq_factor": (4,), "beta_fast": (32,), "extrapolation_factor": (1,)},
    **{"mscale": (0, 1), "mscale_all_dim": (0, 1), "truncate": (True,), "apply_yarn_scaling": (True,)},
}
"""Values with which a setting changes nothing, so that a kind without it may carry it."""

_NUMBERS = (
    *("rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "attn_factor", "alpha"),
)
_LISTS = ("short_factor", "long_factor")


def _is_positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= sys.float_info.max


def _check_setting(key: str, value: Any, where: str) -> None:
    """Refuse a value of another type than the setting has."""
    if key in _NUMBERS and not _is_positive(value):
        raise ConfigError(f"{where} = {value!r:.80} must be a number above 0")
    if key in _LISTS and not (isinstance(value, tuple) and all(map(_is_positive, value))):
        raise ConfigError(f"{where} = {value!r:.80} must be a list of numbers above 0")
    if key in ("mscale", "mscale_all_dim") and value != 0 and not _is_positive(value):
        raise ConfigError(f"{where} = {value!r:.80} must be a number of 0 or more")
    if key == "original_max_position_embeddings" and not _is_length(value):
        raise ConfigError(f"{where} = {value!r:.80} must be a whole number above 0")
    if key == "truncate" and not isinstance(value, bool):
        raise ConfigError(f"{where} = {value!r:.80} must be true or false")
    if key == "rope_type" and not isinstance(value, str):
        raise ConfigError(f"{where} = {value!r:.80} must be one of {', '.join(KINDS)}")


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def _check_known(settings: Mapping[str, tuple[Any, str]], kind: str, fixed: bool) -> None:
    """Refuse settings that a kind does not read, unless they change nothing: a misspelt one would."""
    known = [k for k in (*_SHARED, *_OF_KIND[kind]) if k != "alpha" or fixed]
    own = ", ".join(k for k in _OF_KIND[kind] if k in known) or "nothing"
    for key, (value, where) in settings.items():
        if key in known or key in _WITHOUT_EFFECT or value in _NEUTRAL.get(key, ()):
            continue
        near = difflib.get_close_matches(key, [k for k in known if k not in settings], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{where} is not read by rope type {kind!r}, which takes {own}{hint}")


def from_hf(
    config: Mapping[str, Any],
    *,
    layer_type: str | None = None,
    default_theta: float = 10000.0,
    context: int | None = None,
    fixed: bool = False,
) -> RopeConfig:
    """Read a Hugging Face ``config.json``: older ``rope_theta`` and ``rope_scaling``, newer
    ``rope_parameters``.

    ``layer_type`` picks a section where parameters are kept per layer type. The same setting given twice with
    different values is refused (ConfigError), as are an unknown type and a setting that the type does not
    read: a wrong theta only shows as bad text. ``attn_factor`` of yarn (vLLM, GGUF) multiplies the factor on
    cos and sin that would hold without it, ``attention_factor`` replaces it. ``fixed``: the family's
    ``dynamic`` may have an ``alpha``, a stretch that no context changes.
    """
    settings: dict[str, tuple[Any, str]] = {}

    def put(key: str, value: Any, where: str) -> None:
        if value is None:
            return
        key = "rope_type" if key == "type" else key
        _check_setting(key, value, where)
        if key == "rope_type":
            value = known_name(value, KINDS, _ALIASES) or value
        if key in settings and settings[key][0] != value:
            first, first_where = settings[key]
            raise ConfigError(
                f"{where} = {value!r} contradicts {first_where} = {first!r}; keep the right one"
            )
        settings[key] = (value, where)

    for name in ("rope_parameters", "rope_scaling"):
        section, where = config.get(name), name
        if section is None:
            continue
        if not isinstance(section, Mapping):
            raise ConfigError(f"{name} must be an object, not {section!r:.80}")
        if layer_type is not None and layer_type in section:
            section, where = section[layer_type] or {}, f"{name}.{layer_type}"
            if not isinstance(section, Mapping):
                raise ConfigError(f"{where} must be an object, not {section!r:.80}")
        for key, value in section.items():
            if isinstance(value, Mapping):
                raise ConfigError(
                    f"{where}.{key} holds settings per layer type, which this model does not have"
                )
            put(key, tuple(value) if isinstance(value, list) else value, f"{where}.{key}")
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        put(key, config.get(key), key)

    def get(key: str, default: Any = None) -> Any:
        return settings[key][0] if key in settings else default

    kind = get("rope_type", "default")
    if kind not in KINDS:
        raise ConfigError(f"rope type {kind!r:.80} is not supported; use one of {list(KINDS)}")
    _check_known(settings, kind, fixed)
    settings = {key: found for key, found in settings.items() if key in (*_SHARED, *_OF_KIND[kind])}
    max_position = config.get("max_position_embeddings")
    max_position = 2048 if max_position is None else max_position
    if not _is_length(max_position):
        raise ConfigError(f"max_position_embeddings = {max_position!r:.80} must be a whole number above 0")
    original = get("original_max_position_embeddings", max_position)
    factor = get("factor")
    if get("alpha") is not None and factor not in (None, 1):
        raise ConfigError(f"rope alpha {get('alpha')} and factor {factor} both stretch; keep one of them")
    if factor is None:
        if kind in ("linear", "dynamic", "llama3") and get("alpha") is None:
            raise ConfigError(f"rope type {kind!r} needs a factor")
        if kind == "yarn" and "original_max_position_embeddings" not in settings:
            raise ConfigError("rope type 'yarn' needs a factor, or the length before extension")
        factor = max_position / original if kind in ("yarn", "longrope") else 1.0
    if kind == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            if key not in settings:
                raise ConfigError(f"rope type 'llama3' needs {key}")
    attention_factor, strength = get("attention_factor"), get("attn_factor", 1)
    if kind == "yarn" and strength != 1:
        scaled = strength * _yarn_scale(factor, get("mscale"), get("mscale_all_dim"))
        if attention_factor is not None and not math.isclose(attention_factor, scaled, rel_tol=1e-4):
            raise ConfigError(
                f"attention_factor {attention_factor} contradicts attn_factor {strength}, which makes "
                f"{scaled:.6g}; keep the right one"
            )
        attention_factor = scaled
    return RopeConfig(
        kind=kind,
        theta=float(get("rope_theta", default_theta)),
        max_position=max_position,
        context=context,
        rotary_fraction=float(get("partial_rotary_factor", 1.0)),
        factor=float(factor),
        alpha=get("alpha"),
        original_max_position=int(original) if kind in _PRETRAINED else None,
        attention_factor=attention_factor,
        low_freq_factor=float(get("low_freq_factor", 1.0)),
        high_freq_factor=float(get("high_freq_factor", 4.0)),
        beta_fast=float(get("beta_fast", 32.0)),
        beta_slow=float(get("beta_slow", 1.0)),
        mscale=get("mscale"),
        mscale_all_dim=get("mscale_all_dim"),
        truncate=get("truncate", True),
        short_factor=get("short_factor", ()),
        long_factor=get("long_factor", ()),
    )
