"""Memory that decoding takes, counted from the tables of weights and caches before anything is compiled."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.devices import Adapter, machine
from eaglejax.devices.dtypes import dtype_bytes
from eaglejax.errors import ConfigError
from eaglejax.kv_format import KVFormat, kv_format
from eaglejax.models import decoder
from eaglejax.models.config import ModelConfig
from eaglejax.nn.block import Block
from eaglejax.nn.cache import SLOTS
from eaglejax.nn.kv_codec import PackedKV
from eaglejax.pytree import ArrayInfo

F32 = 4
_ANY_LENGTH = 2**31 - 1
"""Slots where none are needed: the largest number of tokens there is."""
ALWAYS_FREE = 1 << 26
"""Bytes that any machine has; what takes fewer is not looked at closely."""
_SPLIT = ("kv_heads", "heads")
"""Logical axes of a cache that devices share."""


def parameter_count(config: ModelConfig) -> int:
    """Elements of all weights of ``config``'s decoder."""
    return sum(math.prod(info.shape) for info in pytree.leaf_paths(decoder.param_table(config)).values())


def _held(config: ModelConfig, dtype: str | KVFormat) -> tuple[ArrayInfo, ...]:
    """The arrays of a cache of one row and one slot."""
    table = decoder.cache_table(config, 1, 1, kv_format(dtype))
    return tuple(jax.tree.leaves(table.layers, is_leaf=pytree.is_info))


def _bytes(infos: Iterable[ArrayInfo], shards: int = 1) -> int:
    """Bytes on one of ``shards`` devices; heads that do not divide are held whole."""
    total = 0
    for info in infos:
        heads = [n for n, axis in zip(info.shape, info.axes, strict=True) if axis in _SPLIT]
        split = shards if heads and heads[0] % shards == 0 else 1
        total += -(-math.prod(info.shape) * jnp.dtype(info.dtype).itemsize // split)
    return total


def cache_bytes_per_token(
    config: ModelConfig, dtype: str | KVFormat, *, lanes: int = 1, shards: int = 1
) -> int:
    """Bytes that one token takes in the caches of all layers, its scales included.

    ``dtype``: a cache format, see ``KVFormat``. ``lanes``: to what multiple a device pads the last dimension
    where it computes. Between programs the cache is kept without padding, so that widths that do not divide
    are held twice, once so and once padded. ``shards``: devices that heads are split over, where they divide.
    """
    grown = [info for info in _held(config, dtype) if SLOTS in info.axes]
    padded = [
        dataclasses.replace(info, shape=(*info.shape[:-1], -(-info.shape[-1] // lanes) * lanes))
        for info in grown
        if info.axes[-1] != SLOTS and info.shape[-1] % lanes
    ]
    return _bytes(grown, shards) + _bytes(padded, shards)


def cache_scale_bytes(config: ModelConfig, dtype: str | KVFormat) -> int:
    """Bytes of the calibrated scales that a cache holds once, whatever its rows and slots."""
    return _bytes(info for info in _held(config, dtype) if "batch" not in info.axes)


def cache_row_bytes(config: ModelConfig, dtype: str | KVFormat, *, shards: int = 1) -> int:
    """Bytes that a cache holds once a row, whatever its slots: recurrent states, and the keys to which others
    are relative."""
    rows = (info for info in _held(config, dtype) if "batch" in info.axes and SLOTS not in info.axes)
    return _bytes(rows, shards)


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
        spare = max(0, self.left() // batch - self.per_row)
        # A model of recurrent layers alone keeps as much of a long text as of a short one.
        return spare // self.per_token if self.per_token else (_ANY_LENGTH if spare else 0)

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
    kv_form = kv_format(cache_dtype)
    scores = scores or not kv_form.kernel
    element = dtype_bytes(weight_dtype)
    weights = -(-int(parameter_count(config) * element) // shards) + extra
    weights += cache_scale_bytes(config, kv_form)
    per_token = cache_bytes_per_token(config, kv_form, lanes=lanes, shards=shards)
    tokens = max(nodes, prefill)
    widest = max(_activations(config.block(i)) for i in range(config.num_layers))
    activations = tokens * F32 * (3 * config.hidden_size + widest // shards)
    logits = 3 * F32 * nodes * config.vocab_size // shards
    row = activations + logits + cache_row_bytes(config, kv_form, shards=shards)
    # A float32 score, its weight in the dtype it meets the values in and its mask, for every query and head.
    met = kv_form.element_bytes if kv_form.plain else element
    per_slot = int(tokens * config.num_heads * (F32 + met + 1) / shards) if per_token else 0
    if scores:
        expanded = int(_expanded(config, kv_form, shards) * element)
        return Footprint(available, weights, per_token + per_slot + expanded, row)
    return Footprint(available, weights, per_token, row + tokens * per_slot)


def _activations(block: Block) -> int:
    """Numbers a token that a layer holds at once, beside the residual stream's."""
    mixer = block.mixer.table(block.hidden, block.hidden, block.norm, jnp.float32)
    matrices = [info for info in mixer.values() if len(info.shape) == 2]
    mixed = sum(
        n for info in matrices for n, axis in zip(info.shape, info.axes, strict=True) if axis != "embed"
    )
    feed = block.feed
    return mixed + 2 * (feed if isinstance(feed, int) else feed.top_k * feed.intermediate_size)


def _expanded(config: ModelConfig, kv_form: KVFormat, shards: int) -> int:
    """Numbers a token of the widest layer's packed sides, which XLA expands."""
    layers = decoder.cache_table(config, 1, 1, kv_form).layers
    widest = 0
    for layer in layers:
        sides = jax.tree.leaves(layer, is_leaf=lambda x: isinstance(x, PackedKV))
        packed = [side.shape for side in sides if isinstance(side, PackedKV)]
        widest = max(widest, sum(-(-h * d // (shards if h % shards == 0 else 1)) for _, h, _, d in packed))
    return widest


def require_free(what: str, needed: int, remedy: str) -> None:
    """Refuse (ConfigError) what takes ``needed`` bytes of the default device before they are allocated, where
    so many are not free. ``what`` takes them; ``remedy``: what takes fewer."""
    if needed > ALWAYS_FREE and needed > (free := machine.free_bytes()):
        raise ConfigError(f"{what} takes about {gib(needed)}, and {gib(free)} of memory are free; {remedy}")


def gib(count: int) -> str:
    """Bytes for a person."""
    return f"{count / machine.GIB:.2f} GiB" if count < 100 * machine.GIB else f"{count / machine.GIB:.0f} GiB"


@functools.lru_cache(maxsize=64)
def row_bytes(
    config: ModelConfig, kv_form: KVFormat, dtype: str, *, slots: int, nodes: int, prefill: int, scores: bool
) -> int:
    """Bytes that decoding a row of ``slots`` takes beside the weights; the other arguments as ``footprint``
    has them."""
    counted = footprint(
        config, 0, weight_dtype=dtype, cache_dtype=kv_form, nodes=nodes, prefill=prefill, scores=scores
    )
    return counted.total(1, slots) - counted.weights


def footprint_on(adapter: Adapter, config: ModelConfig, **options: Any) -> Footprint:
    """What decoding with ``config`` takes on a device: ``footprint``, whose ``options`` these are, by default
    what the adapter chooses."""
    settings: dict[str, Any] = {
        "weight_dtype": adapter.weight_dtype,
        "cache_dtype": adapter.cache_dtype,
        "scores": adapter.attention.implementation == "xla",
        "lanes": adapter.lanes,
    }
    return footprint(config, adapter.memory_bytes, **(settings | options))
