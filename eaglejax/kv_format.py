"""In what form a cache holds keys and values: by name, with the bytes each form takes.

Jax is not imported here, so that memory can be counted before jax starts; ``kv_codec`` does the arithmetic.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from eaglejax.errors import ConfigError

SCALE_BYTES = 4
"""A scale is a float32."""


@dataclasses.dataclass(frozen=True)
class _Kind:
    """``dtype``: of what is stored. ``bits``: of one number of a key or value. ``scaled``: a scale for every
    token and head stands beside. ``rotation``: see ``codebooks``; such numbers are codes of a codebook."""

    dtype: str
    bits: int
    scaled: bool = False
    rotation: str | None = None


_KINDS = {
    "float32": _Kind("float32", 32),
    "bfloat16": _Kind("bfloat16", 16),
    "float16": _Kind("float16", 16),
    "int8": _Kind("int8", 8, scaled=True),
    "int8-static": _Kind("int8", 8),
    "fp8": _Kind("float8_e4m3fn", 8, scaled=True),
    **{
        f"{rotation}{bits}": _Kind("uint8", bits, scaled=True, rotation=rotation)
        for rotation in ("rotor", "iso", "turbo")
        for bits in (4, 3)
    },
}
FORMATS = tuple(_KINDS)
"""Names of all formats."""

_PLAIN = ("float32", "bfloat16", "float16")
_ALIASES = {"fp8_e4m3": "fp8", "float8_e4m3fn": "fp8"}


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """A form of keys and values; hashable, a compile-time constant.

    float32, bfloat16, float16: as they are. int8: 8-bit integers with one scale a token and head, the largest
    magnitude / 127. int8-static: 8-bit integers with a calibrated scale a channel (``CacheScales``). fp8:
    float8_e4m3fn with one scale a token and head. rotor, iso, turbo with 4 or 3 bits: the vector is rotated
    at random, in blocks of three (RotorQuant), of four (IsoQuant, arXiv:2603.28430) or as a whole
    (TurboQuant, arXiv:2504.19874), and each coordinate becomes the nearest entry of a Lloyd-Max codebook; one
    scale a token and head. ``seed`` draws the rotation. Raises ConfigError for a name that is not known and
    for a seed where nothing is drawn.
    """

    name: str
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in _KINDS:
            raise ConfigError(f"cache format {self.name!r} is not known; use one of {', '.join(FORMATS)}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(f"seed {self.seed!r} of a cache format must be an integer of 0 or more")
        if self.seed and self.rotation is None:
            raise ConfigError(f"cache format {self.name!r} draws no rotation, so a seed means nothing to it")

    @property
    def plain(self) -> bool:
        """Whether keys and values are float arrays as they are."""
        return self.name in _PLAIN

    @property
    def dtype(self) -> str:
        """Dtype of the stored array: codes of narrow formats are uint8, bits packed."""
        return _KINDS[self.name].dtype

    @property
    def bits(self) -> int:
        """Bits of one number."""
        return _KINDS[self.name].bits

    @property
    def scaled(self) -> bool:
        """Whether every token and head has a scale of its own."""
        return _KINDS[self.name].scaled

    @property
    def static(self) -> bool:
        """Whether calibrated scales, one a channel, are needed."""
        return self.name == "int8-static"

    @property
    def rotation(self) -> str | None:
        """How vectors are rotated before they become codes: "rotor", "iso" or "turbo" (None: no codes)."""
        return _KINDS[self.name].rotation

    @property
    def direct(self) -> bool:
        """Whether a stored number, but for its token's scale, is the number itself."""
        return self.rotation is None and not self.static

    @property
    def kernel(self) -> bool:
        """Whether attention kernels read the stored array; else it is expanded before XLA's attention."""
        return self.rotation is None

    def planes(self) -> tuple[int, ...]:
        """Bits of each code that lie together, lowest first: 3 bits are stored as 2 and 1."""
        return (4,) if self.bits == 4 else (2, 1)

    def width(self, head_dim: int) -> int:
        """Stored elements of a vector of ``head_dim`` numbers."""
        if self.rotation is None:
            return head_dim
        return sum(-(-head_dim * plane // 8) for plane in self.planes())

    @property
    def element_bytes(self) -> int:
        """Bytes of one stored element."""
        return 1 if self.bits <= 8 else self.bits // 8

    def vector_bytes(self, head_dim: int) -> int:
        """Bytes of one token's key, or value, in one head, its scale included."""
        return self.width(head_dim) * self.element_bytes + (SCALE_BYTES if self.scaled else 0)

    def describe(self) -> dict[str, Any]:
        """The format as plain values, for reports."""
        described: dict[str, Any] = {"format": self.name, "bits": self.bits}
        return described | ({"seed": self.seed} if self.rotation else {})


def uncalibrated_format(value: Any) -> KVFormat:
    """``kv_format`` for a draft's cache, for which no scales are calibrated. Raises ConfigError."""
    kv_form = kv_format(value)
    if kv_form.static:
        raise ConfigError(
            f"a draft's cache cannot be {kv_form.name!r}: its scales would have to be calibrated; "
            "use 'int8', whose scales come with the tokens"
        )
    return kv_form


def kv_format(value: Any) -> KVFormat:
    """The format that ``value`` names: a KVFormat, a name, or a dtype. Raises ConfigError."""
    if isinstance(value, KVFormat):
        return value
    name = value
    if not isinstance(value, str):
        import numpy as np

        try:
            name = np.dtype(value).name
        except TypeError as error:
            raise ConfigError(
                f"cache format {value!r} is neither a name nor a dtype; use one of {', '.join(FORMATS)}"
            ) from error
    if not isinstance(value, str) and name == "int8":
        raise ConfigError("an int8 cache is named, 'int8' or 'int8-static': the dtype alone says no scales")
    return KVFormat(_ALIASES.get(name, name))
