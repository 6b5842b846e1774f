"""The target: configuration, weights and tokenizer of one model, as every user of the library holds it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.devices.dtypes import check_weight_dtype
from eaglejax.errors import ConfigError, RequestError
from eaglejax.kv_format import KVFormat
from eaglejax.models.config import ModelConfig
from eaglejax.models.decoder import init_params
from eaglejax.nn.cache import CacheScales

if TYPE_CHECKING:
    from eaglejax.checkpoint.sources import Source
    from eaglejax.checkpoint.tokenizer import Tokenizer
    from eaglejax.rotation.basis import Basis


@dataclasses.dataclass(frozen=True)
class Target:
    """A model ready to run.

    ``params`` follows ``decoder.param_table(config, dtype)``. ``context``: longest sequence, prompt and
    output together, in tokens. ``eos_ids``: ids that end a text. ``tokenizer`` and ``source`` are None for
    random weights. ``basis``: id of the rotation that the residual stream is in, None for the basis the model
    was trained in; ``rotation``: that rotation with its matrix, where it is at hand. ``quantization``: name
    of the scheme its weights are packed with, None for plain arrays. ``cache_format``: form of keys and
    values that its files ask for (``kv_format``), None where they leave it open; ``cache_scales``: what an
    int8-static cache of this target needs.
    """

    config: ModelConfig
    params: Any
    dtype: np.dtype
    context: int
    tokenizer: Tokenizer | None = None
    source: Source | None = None
    eos_ids: tuple[int, ...] = ()
    basis: str | None = None
    rotation: Basis | None = None
    quantization: str | None = None
    cache_format: str | KVFormat | None = None
    cache_scales: CacheScales | None = None

    @property
    def name(self) -> str:
        """What the user called it, or the family for random weights."""
        return self.source.spec if self.source else f"random {self.config.family}"

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))

    def need_source(self) -> Source:
        """Where it was read from; raises ``ConfigError`` for a target that was made here."""
        if self.source is None:
            raise ConfigError(f"{self.name} was read from no files, so that none of them can hold its draft")
        return self.source

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises ``RequestError`` where there is none, so that only token ids can be given."""
        if self.tokenizer is None:
            raise RequestError(f"{self.name} has no tokenizer; give token ids instead of text")
        return self.tokenizer


def random_target(
    config: ModelConfig, seed: int = 0, dtype: Any = "float32", eos_ids: tuple[int, ...] = ()
) -> Target:
    """A target with random weights and no tokenizer."""
    dtype = weight_dtype(dtype)
    params = init_params(config, jax.random.key(seed), dtype)
    return Target(config=config, params=params, dtype=dtype, context=config.max_position, eos_ids=eos_ids)


def weight_dtype(dtype: Any) -> np.dtype:
    """The dtype a user named, default bfloat16; raises ``ConfigError`` for one that weights are not held
    in."""
    try:
        name = jnp.dtype("bfloat16" if dtype is None else dtype).name
    except TypeError:
        name = str(dtype)
    check_weight_dtype(name)
    return jnp.dtype(name)
