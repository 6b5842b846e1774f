"""Memory that decoding takes, counted by hand: what fits on a device before anything is compiled."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from eaglejax.errors import ConfigError
from eaglejax.nn.kv_format import SCALE_BYTES, KVFormat, kv_format

if TYPE_CHECKING:
    from eaglejax.models.config import ModelConfig

BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int4": 0.5,
}
"""Bytes of one element by dtype."""

F32 = 4


def dtype_bytes(dtype: str) -> float:
    """Bytes of one element. Raises ConfigError for a dtype that is not counted."""
    if dtype not in BYTES:
        raise ConfigError(f"dtype {dtype!r} is not known; use one of {', '.join(BYTES)}")
    return BYTES[dtype]


def parameter_count(config: ModelConfig) -> int:
    """Elements of all weights of ``config``'s decoder."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    attention = 2 * hidden * q + 2 * hidden * kv
    attention += (q + 2 * kv if config.qkv_bias else 0) + (hidden if config.o_bias else 0)
    attention += 2 * head_dim if config.qk_norm else 0
    norms = (4 if config.sandwich_norms else 2) * hidden
    width = config.intermediate_size
    dense = 3 * hidden * width + ((2 * width + hidden) if config.mlp_bias else 0)
    total = config.vocab_size * hidden * (1 if config.tie_embeddings else 2) + hidden
    for layer in range(config.num_layers):
        total += attention + norms
        if config.moe is not None and config.is_sparse(layer):
            moe = config.moe
            total += hidden * moe.experts + 3 * moe.experts * hidden * moe.intermediate_size
        else:
            total += dense
    return total


def cache_bytes_per_token(config: ModelConfig, dtype: str | KVFormat, *, lanes: int = 1) -> int:
    """Bytes of keys and values that one token takes in all layers, its scales included.

    ``dtype``: a cache format, see ``KVFormat``. ``lanes``: to what multiple a device pads the last dimension
    where it computes. Between programs the cache is kept without padding, so that widths that do not divide
    are held twice, once so and once padded.
    """
    format = kv_format(dtype)
    vector = format.vector_bytes(config.head_dim)
    width = format.width(config.head_dim)
    if width % lanes:
        vector += -(-width // lanes) * lanes * format.element_bytes
    return 2 * config.num_layers * config.num_kv_heads * vector


def cache_scale_bytes(config: ModelConfig, dtype: str | KVFormat) -> int:
    """Bytes of the calibrated scales that a cache holds once, whatever its rows and slots."""
    if not kv_format(dtype).static:
        return 0
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * SCALE_BYTES


def cache_row_bytes(config: ModelConfig, dtype: str | KVFormat) -> int:
    """Bytes that a cache holds once a row, whatever its slots: the keys to which others are relative."""
    if not kv_format(dtype).scaled or config.attention_softcap is not None:
        return 0
    return config.num_layers * config.num_kv_heads * config.head_dim * F32


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes on one device: ``weights``, and for each row ``per_token`` bytes a cache slot and ``per_row``.

    ``available`` is what the device gives to them.
    """

    available: int
    weights: int
    per_token: int
    per_row: int

    def total(self, batch: int, context: int) -> int:
        """Bytes that ``batch`` rows of ``context`` slots take."""
        return self.weights + batch * (self.per_row + context * self.per_token)

    def largest_batch(self, context: int) -> int:
        """Most rows of ``context`` slots that fit, 0 when none does. Raises ConfigError, see ``left``."""
        return self.left() // (self.per_row + context * self.per_token)

    def largest_context(self, batch: int) -> int:
        """Most slots a row that ``batch`` rows can have, 0 when none. Raises ConfigError, see ``left``."""
        return max(0, (self.left() // batch - self.per_row) // self.per_token)

    def left(self) -> int:
        """Bytes beside the weights. Raises ConfigError where the weights alone do not fit."""
        if self.weights >= self.available:
            raise ConfigError(
                f"the weights take {self.weights / 2**30:.1f} GiB a device of which "
                f"{self.available / 2**30:.1f} GiB can be used; shard them over at least "
                f"{self.weights // self.available + 1} times as many devices, or use a narrower dtype"
            )
        return self.available - self.weights


def footprint(
    config: ModelConfig,
    available: int,
    *,
    weight_dtype: str,
    cache_dtype: str | KVFormat,
    nodes: int = 1,
    prefill: int = 512,
    scores: bool = True,
    shards: int = 1,
    extra: int = 0,
    lanes: int = 1,
) -> Footprint:
    """What decoding with trees of ``nodes`` nodes and prompt chunks of ``prefill`` tokens takes.

    ``cache_dtype``: format of the cache, see ``KVFormat``. ``scores``: attention holds its scores of the
    whole cache in memory, as XLA does; a kernel's are those among the new tokens alone. A kernel does not
    read the packed codes of codebooks, for which XLA is counted in any case. ``shards``: devices that
    weights, heads and the vocabulary are split over; key/value heads that do not divide are held whole.
    ``extra``: bytes of a draft's weights, held whole.
    ``lanes``: see ``cache_bytes_per_token``.
    The working set is that of the wider of the two forwards, a verify or a prompt chunk: activations of one
    layer, three copies of the logits that are sampled from, and the scores of one layer, with their weights
    and, where XLA reads a narrow cache, one layer's keys and values in the weights' dtype.
    """
    format = kv_format(cache_dtype)
    scores = scores or not format.kernel
    split_kv = shards if config.num_kv_heads % shards == 0 else 1
    element = dtype_bytes(weight_dtype)
    weights = -(-int(parameter_count(config) * element) // shards) + extra
    weights += cache_scale_bytes(config, format)
    per_token = -(-cache_bytes_per_token(config, format, lanes=lanes) // split_kv)
    tokens = max(nodes, prefill)
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    wide = config.intermediate_size
    if config.moe is not None:
        wide = max(wide, config.moe.top_k * config.moe.intermediate_size)
    activations = tokens * F32 * (3 * config.hidden_size + (2 * q + 2 * kv + 2 * wide) // shards)
    logits = 3 * F32 * nodes * config.vocab_size // shards
    row = activations + logits + -(-cache_row_bytes(config, format) // split_kv)
    # A float32 score, its weight in the dtype it meets the values in and its mask, for every query and head.
    met = format.element_bytes if format.plain else element
    per_slot = int(tokens * config.num_heads * (F32 + met + 1) / shards)
    if scores:
        expanded = 0 if format.plain else -(-int(2 * kv * element) // split_kv)
        return Footprint(available, weights, per_token + per_slot + expanded, row)
    return Footprint(available, weights, per_token, row + tokens * per_slot)
