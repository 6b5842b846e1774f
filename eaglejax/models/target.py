"""The target: configuration, weights and tokenizer of one model, as every user of the library holds it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.checkpoint.gguf import load_gguf
from eaglejax.checkpoint.hf import load_folder
from eaglejax.checkpoint.sources import Source, Spec, resolve
from eaglejax.checkpoint.tokenizer import Tokenizer, load_tokenizer
from eaglejax.errors import ConfigError, MismatchError, RequestError
from eaglejax.models.config import ModelConfig
from eaglejax.models.decoder import init_params

DTYPES = ("bfloat16", "float32", "float16")
"""Dtypes that weights are held in."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A model ready to run.

    ``params`` follows ``decoder.param_table(config, dtype)``. ``context``: longest sequence, prompt and
    output together, in tokens. ``eos_ids``: ids that end a text. ``tokenizer`` and ``source`` are None for
    random weights.
    """

    config: ModelConfig
    params: Any
    dtype: np.dtype
    context: int
    tokenizer: Tokenizer | None = None
    source: Source | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """What the user called it, or the family for random weights."""
        return self.source.spec if self.source else f"random {self.config.family}"

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises ``RequestError`` where there is none, so that only token ids can be given."""
        if self.tokenizer is None:
            raise RequestError(f"{self.name} has no tokenizer; give token ids instead of text")
        return self.tokenizer


def load_target(source: Spec | Source, *, dtype: Any = None, context: int | None = None) -> Target:
    """Load a model with its tokenizer.

    ``source``: see ``checkpoint.sources.resolve``. ``dtype``: one of ``DTYPES``, default bfloat16.
    ``context``: at most the positions the model was made for, which is the default; rotary kinds that depend
    on the length are evaluated for it. Raises ``CheckpointError``, ``ConfigError`` or ``MismatchError``
    naming what is wrong.
    """
    dtype = weight_dtype(dtype)
    found = source if isinstance(source, Source) else resolve(source)
    if found.kind == "gguf":
        config, params, tokenizer = load_gguf(found.path, dtype, context=context)
    else:
        config, params = load_folder(found.path, dtype, context=context)
        tokenizer = load_tokenizer(found.path)
    over = [i for i in (*tokenizer.eos_ids, tokenizer.vocab_size - 1) if i >= config.vocab_size]
    if over:
        raise MismatchError(
            f"the tokenizer of {found.path} has id {max(over)}, the model only {config.vocab_size} ids; "
            "they do not belong together"
        )
    return Target(
        config=config,
        params=params,
        dtype=dtype,
        context=_context(context, config),
        tokenizer=tokenizer,
        source=found,
        eos_ids=tokenizer.eos_ids,
    )


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
        found = jnp.dtype("bfloat16" if dtype is None else dtype)
    except TypeError as error:
        raise ConfigError(f"dtype {dtype!r} is not known; use one of {', '.join(DTYPES)}") from error
    if found.name not in DTYPES:
        raise ConfigError(f"dtype {found.name} is not supported for weights; use one of {', '.join(DTYPES)}")
    return found


def _context(context: int | None, config: ModelConfig) -> int:
    """The longest sequence: what was asked for, within what the rotary scaling can stretch to."""
    if context is None:
        return config.max_position
    rope, most = config.rope, config.max_position
    if rope.kind in ("linear", "dynamic", "yarn"):
        most = max(most, int((rope.original_max_position or most) * rope.factor))
    if not 1 <= context <= most:
        raise ConfigError(
            f"context {context} must be between 1 and {most}, the positions this model can have"
        )
    return context
