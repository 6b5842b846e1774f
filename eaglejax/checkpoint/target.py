"""Loading a target: weights, configuration and tokenizer of whatever a user names."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from eaglejax.checkpoint.gguf.load import load_gguf
from eaglejax.checkpoint.gguf.packed import load_packed
from eaglejax.checkpoint.hf import load_folder, quantized_form
from eaglejax.checkpoint.quantized.read import exported_rotation, load_quantized
from eaglejax.checkpoint.sources import Source, Spec, resolve
from eaglejax.checkpoint.tokenizer import Tokenizer, load_tokenizer
from eaglejax.errors import ConfigError, MismatchError
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target, weight_dtype
from eaglejax.quant.quantize import quantize_target
from eaglejax.quant.schemes import Plan, Scheme, as_plan


def load_target(
    source: Spec | Source,
    *,
    dtype: Any = None,
    context: int | None = None,
    quant: Plan | Scheme | str | None = None,
    eos: int | str | Sequence[int | str] = (),
    mesh: Mesh | None = None,
) -> Target:
    """Load a model with its tokenizer.

    ``source``: see ``checkpoint.sources.resolve``. ``dtype``: see ``devices.dtypes``, default bfloat16.
    ``context``: at most the positions the model was made for, which is the default; rotary kinds that depend
    on the length are evaluated for it.

    ``quant``: quantise while loading: a scheme's name (``w8a8``, ``w4a8-g32``, ...), a Scheme or a Plan.
    For a GGUF file ``keep`` multiplies its blocks as they are and takes activations in their float dtype,
    ``keep-a8`` rounds them to 8 bits, with a scale for each 32; ``checkpoint.gguf.packed`` says what is kept
    exactly and what is requantised. Static schemes and smoothing need calibration, so that they are for
    ``quantize_target``.

    ``eos``: further tokens, ids or their text, that end a text. Without it, a model whose files name
    none, or one that its tokenizer does not know, is warned of: its answers may go on to their length limit.

    ``mesh``: devices among which plain weights are divided as they are read (see ``docs/devices.md``),
    so that no device ever holds a whole one. Quantised weights are not divided.

    Raises ``CheckpointError``, ``ConfigError`` or ``MismatchError`` naming what is wrong.
    """
    dtype = weight_dtype(dtype)
    plan = None if quant is None else as_plan(quant)
    told: dict[str, Any] = {}
    found = source if isinstance(source, Source) else resolve(source)
    packed = plan is not None or (found.kind == "folder" and quantized_form(found.path) is not None)
    if mesh is not None and packed:
        raise ConfigError("a mesh divides plain weights; leave it out for quantised ones")
    if found.kind == "gguf" and plan is not None:
        config, params, tokenizer = load_packed(found.path, dtype, plan, context=context)
        told["quantization"] = plan.label
    elif found.kind == "gguf":
        config, params, tokenizer = load_gguf(found.path, dtype, context=context, mesh=mesh)
    elif quantized_form(found.path) is not None:
        folder = load_quantized(found.path, dtype, context=context)
        config, params, told = folder.config, folder.params, folder.told()
        tokenizer = load_tokenizer(found.path)
    else:
        config, params = load_folder(found.path, dtype, context=context, mesh=mesh)
        told = exported_rotation(found.path, config)
        tokenizer = load_tokenizer(found.path)
    named = [eos] if isinstance(eos, int | str) else list(eos)
    tokenizer = tokenizer.with_eos(named)
    over = [i for i in (*tokenizer.eos_ids, tokenizer.vocab_size - 1) if i >= config.vocab_size]
    if over:
        raise MismatchError(
            f"the tokenizer of {found.path} has id {max(over)}, the model only {config.vocab_size} ids; "
            "they do not belong together"
        )
    if not named:
        _say_endless(found, tokenizer)
    target = Target(
        config=config,
        params=params,
        dtype=dtype,
        context=_context(context, config),
        tokenizer=tokenizer,
        source=found,
        eos_ids=tokenizer.eos_ids,
        **told,
    )
    return target if plan is None or found.kind == "gguf" else quantize_target(target, plan)


def _say_endless(source: Source, tokenizer: Tokenizer) -> None:
    """Warn where no token ends a text, or where one that is to end it is none of the tokenizer's."""
    unknown = [i for i in tokenizer.eos_ids if tokenizer.backend.id_to_token(i) is None]
    named = tokenizer.specials.get("eos_token")
    if unknown:
        why = f"an end of text that its tokenizer does not know, id {unknown[0]}"
    elif tokenizer.eos_ids:
        return
    elif named is not None:
        why = f"an end of text that its tokenizer does not know, {named!r}"
    else:
        why = "no end of text"
    known = [i for i in tokenizer.eos_ids if i not in unknown]
    ends = "turns of a conversation" if tokenizer.chat_template else "texts"
    warnings.warn(
        f"{source.spec} names {why}: "
        + (
            f"only id {', '.join(map(str, known))} ends {ends}. "
            if known
            else f"nothing ends {ends} before the length limit. "
        )
        + "Name the token that does: --eos on the command line, load_target(..., eos=...), or stop_token_ids "
        "of a request",
        stacklevel=3,
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
