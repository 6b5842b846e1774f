"""What the target says about training text: its boundaries, final state and likeliest tokens, for packed
rows."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.errors import MismatchError
from eaglejax.identity import model_digest
from eaglejax.models import decoder
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target
from eaglejax.nn.visible import Causal
from eaglejax.train.batch import Batch

BASIS = "original"
"""Basis id of features of a target whose residual stream was not rotated."""

_HEAD_ROWS = 128
"""Rows whose logits over the whole vocabulary exist at one time."""


@pytree.dataclass
class TargetFeatures:
    """``aux`` [B, T, A, Ht] (None without boundaries), ``hidden`` [B, T, Ht] after the final norm, both in
    the target's dtype; ``top`` [B, T] int32 and ``log_norm`` [B, T] f32 of the logits over the whole
    vocabulary."""

    aux: jax.Array | None
    hidden: jax.Array
    top: jax.Array
    log_norm: jax.Array


@functools.partial(jax.jit, static_argnames=("config", "aux"))
def target_features(params: Any, config: ModelConfig, batch: Batch, aux: tuple[int, ...]) -> TargetFeatures:
    """One forward of the target over packed rows; documents do not see each other, padding sees itself."""
    out = _forward(params, config, batch, aux)
    top, log_norm = head_summary(params, config, out.hidden)
    return TargetFeatures(out.aux, out.hidden, top, log_norm)


@functools.partial(jax.jit, static_argnames=("config", "aux"))
def boundaries(params: Any, config: ModelConfig, batch: Batch, aux: tuple[int, ...]) -> jax.Array:
    """``TargetFeatures.aux`` alone, for which the head need not be asked."""
    found = _forward(params, config, batch, aux).aux
    assert found is not None
    return found


def _forward(params: Any, config: ModelConfig, batch: Batch, aux: tuple[int, ...]) -> decoder.Forward:
    b, t = batch.tokens.shape
    visible = Causal(batch.documents)
    dtype = params["embed"].dtype if hasattr(params["embed"], "dtype") else jnp.bfloat16
    cache = decoder.init_cache(config, b, t, dtype)
    return decoder.forward(params, config, batch.tokens, batch.positions, cache, visible, aux=aux)


def head_summary(params: Any, config: ModelConfig, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(argmax [...] int32, log-sum-exp [...] f32) of the target's logits for ``hidden`` [..., Ht], a few rows
    at a time, so that the logits of a whole batch never exist."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    chunk = min(_HEAD_ROWS, flat.shape[0])
    padded = jnp.pad(flat, ((0, -flat.shape[0] % chunk), (0, 0)))

    def one(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = decoder.unembed(params, config, rows)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), jax.nn.logsumexp(logits, axis=-1)

    top, norm = jax.lax.map(one, padded.reshape(-1, chunk, padded.shape[-1]))
    shape, n = hidden.shape[:-1], flat.shape[0]
    return top.reshape(-1)[:n].reshape(shape), norm.reshape(-1)[:n].reshape(shape)


def with_features(target: Target, batch: Batch, aux: tuple[int, ...]) -> Batch:
    """The batch with the target's features beside its tokens, computed here and now."""
    found = target_features(target.params, target.config, batch, aux)
    return dataclasses.replace(
        batch, aux=found.aux, hidden=found.hidden, top=found.top, log_norm=found.log_norm
    )


def fingerprint(target: Target) -> str:
    """What the features depend on: the digest of the target's architecture and weights."""
    return model_digest(target.config, target.params)


def identity(target: Target, aux: tuple[int, ...]) -> dict[str, Any]:
    """All that must agree for cached features to be those that would be computed now."""
    tokenizer = target.tokenizer
    template = None if tokenizer is None else tokenizer.chat_template
    return {
        "model": fingerprint(target),
        "tokenizer": None if tokenizer is None else tokenizer.hash,
        "template": None if template is None else hashlib.sha256(template.encode()).hexdigest()[:32],
        "aux": list(aux),
        "hidden": "after the final norm",
        "dtype": target.dtype.name,
        "basis": target.basis or BASIS,
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
    }


def check_identity(found: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """Raise MismatchError naming every entry that differs."""
    names = sorted(set(found) | set(wanted))
    wrong = [
        f"{name} is {found.get(name)!r}, needed is {wanted.get(name)!r}"
        for name in names
        if found.get(name) != wanted.get(name)
    ]
    if wrong:
        raise MismatchError(
            f"the features in {where} were made otherwise: {'; '.join(wrong)}. Name another folder, or "
            "make them "
            "anew with `eaglejax features`"
        )
