"""What a vendor's operators take, as data, and the refusal of what they do not."""

from __future__ import annotations

import dataclasses

from eaglejax.errors import ConfigError


class LimitError(ConfigError):
    """A device's operator does not take something: ``operator``, ``limit`` (its name), ``value`` and what
    would be right (``allowed``)."""

    def __init__(self, adapter: str, operator: str, limit: str, value: object, allowed: object) -> None:
        super().__init__(f"{adapter}: {operator} does not take {limit} {value}; it takes {allowed}")
        self.adapter, self.operator, self.limit = adapter, operator, limit
        self.value, self.allowed = value, allowed


@dataclasses.dataclass(frozen=True)
class AttentionLimits:
    """What one attention operator takes. None: no limit that is published.

    ``dtypes``: of queries, keys and values. ``head_dim``: smallest and largest; ``head_dim_multiple``.
    ``heads``: most query heads; ``group``: most query heads of a key/value head. ``batch``: most rows.
    ``decode_queries``: most queries a request when it decodes over a paged cache, whose blocks hold a
    multiple of ``block_multiple`` slots and at most ``block_max``. ``mask_dtype``, ``mask_shape``,
    ``masked_is`` (the mask's value at an unseen slot) and ``sparse_mode`` say how visibility is handed over.
    ``empty_rows``: whether a query may see nothing. ``softcap``: whether scores can be capped.
    """

    operator: str
    dtypes: tuple[str, ...]
    head_dim: tuple[int, int] | None = None
    head_dim_multiple: int = 1
    heads: int | None = None
    group: int | None = None
    batch: int | None = None
    decode_queries: int | None = None
    block_multiple: int | None = None
    block_max: int | None = None
    mask_dtype: str = "bool"
    mask_shape: str = "[B, N, S]"
    masked_is: bool = False
    sparse_mode: int | None = None
    empty_rows: bool = True
    softcap: bool = True


@dataclasses.dataclass(frozen=True)
class MergeLimits:
    """What merges partial attentions: most ``parts``, head sizes, dtypes of the partial outputs."""

    operator: str
    dtypes: tuple[str, ...]
    parts: int | None = None
    head_dim: tuple[int, int] | None = None
    head_dim_multiple: int = 1


@dataclasses.dataclass(frozen=True)
class QuantLimits:
    """What quantises activations and multiplies integers. ``dtypes``: of activations and results;
    ``group_scales``: whether weights may have a scale a group of rows; ``largest``: most rows or columns of a
    weight."""

    operator: str
    dtypes: tuple[str, ...]
    group_scales: bool = True
    largest: int | None = None


@dataclasses.dataclass(frozen=True)
class Limits:
    """All limits of a backend; ``source`` says where they are published. ``attention`` has one entry an
    operator, of which the first that takes the dtype is used."""

    attention: tuple[AttentionLimits, ...]
    merge: MergeLimits
    quant: QuantLimits
    source: str
