"""Loading a target: weights, configuration and tokenizer of whatever a user names."""

from __future__ import annotations

from typing import Any

from eaglejax.checkpoint.gguf import load_gguf
from eaglejax.checkpoint.hf import load_folder
from eaglejax.checkpoint.sources import Source, Spec, resolve
from eaglejax.checkpoint.tokenizer import load_tokenizer
from eaglejax.errors import ConfigError, MismatchError
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target, weight_dtype


def load_target(source: Spec | Source, *, dtype: Any = None, context: int | None = None) -> Target:
    """Load a model with its tokenizer.

    ``source``: see ``checkpoint.sources.resolve``. ``dtype``: one of ``target.DTYPES``, default bfloat16.
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
