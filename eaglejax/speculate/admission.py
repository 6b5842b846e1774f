"""What is decoded at all: requests that can be served, and batches that memory has room for."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.devices import Attention, current
from eaglejax.drafts.autoregressive import Autoregressive
from eaglejax.drafts.base import Bound, Proposer, Request
from eaglejax.drafts.limits import MOST_PREDICTED
from eaglejax.drafts.registry import check_basis_of
from eaglejax.errors import ConfigError, RequestError
from eaglejax.kv_format import KVFormat
from eaglejax.models import memory
from eaglejax.models.target import Target
from eaglejax.sampling import Sampling


def bound_for(target: Target, proposer: Proposer | Bound | None) -> Bound:
    """``proposer`` with its weights, as a user gives it: None is plain decoding.

    Raises ConfigError for what is no proposer, MismatchError for a draft in another basis than the target's.
    """
    proposer = Autoregressive() if proposer is None else proposer
    bound = proposer if isinstance(proposer, Bound) else Bound(proposer)
    if not isinstance(bound.proposer, Proposer):
        raise ConfigError(
            f"proposer is {bound.proposer!r}; give an object such as NGram(length=7), what load_draft "
            "returned, or None for plain decoding"
        )
    check_basis_of(bound, target)
    return bound


def check_request(request: Request, context: int, vocab_size: int) -> None:
    """Refuse what cannot be decoded. Raises RequestError."""
    if not request.prompt:
        raise RequestError("the prompt is empty: it holds no token; give at least one")
    if len(request.prompt) > context:
        raise RequestError(
            f"the prompt has {len(request.prompt)} tokens but the target's context is {context}; shorten it"
        )
    limit = request.max_new_tokens
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise RequestError(f"max_new_tokens is {limit!r}; it must be an integer of 0 or more")
    if limit and len(request.prompt) == context:
        raise RequestError(
            f"the prompt fills the target's context of {context} tokens, so that none is left for an answer; "
            "shorten it"
        )
    # A predicted id beyond the vocabulary has no probability that could refuse it.
    for name, ids in (("prompt", request.prompt), ("prediction", request.prediction or ())):
        bad = [t for t in ids if not 0 <= t < vocab_size]
        if bad:
            raise RequestError(f"{name} token id {bad[0]} is not in the vocabulary [0, {vocab_size})")
    if len(request.prediction or ()) > MOST_PREDICTED:
        raise RequestError(
            f"the prediction has {len(request.prediction or ())} tokens; at most {MOST_PREDICTED} are read"
        )
    for token in request.stop_token_ids:
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
            raise RequestError(f"stop_token_ids holds {token!r}, which is no id in [0, {vocab_size})")
    for text in request.stop:
        if not isinstance(text, str):
            raise RequestError(f"stop string {text!r} is {type(text).__name__}; it must be a text")
        if not text:
            raise RequestError("a stop string is empty; it would stop every answer before its first token")
    if not isinstance(request.sampling, Sampling):
        raise RequestError(f"sampling is {request.sampling!r}; it must be a Sampling")
    bias = dict(request.sampling.logit_bias or ())
    if bias and max(bias) >= vocab_size:
        raise RequestError(f"logit_bias names token {max(bias)}; the vocabulary ends at {vocab_size - 1}")
    if len(bias) == vocab_size and all(value == float("-inf") for value in bias.values()):
        raise RequestError("logit_bias bans every token of the vocabulary; leave at least one")


def check_room(
    target: Target,
    proposer: Proposer,
    draft_params: Any,
    *,
    batch: int,
    slots: int,
    prefill: int,
    cache: KVFormat,
    attention: Attention | None,
    inputs: Any,
) -> None:
    """Refuse (ConfigError) a batch of ``batch`` rows with ``slots`` cache slots each that does not fit beside
    the weights: the caches of target and draft, and what the wider of a verify and a prompt chunk of
    ``prefill`` tokens holds at a time. A target on several devices is taken to be shared out evenly."""
    row = memory.row_bytes(
        target.config,
        cache,
        target.dtype.name,
        slots=slots,
        nodes=proposer.nodes,
        prefill=prefill,
        scores=(attention or current().attention).implementation == "xla",
    )
    needed = batch * row
    if needed > memory.ALWAYS_FREE:
        state = jax.eval_shape(
            lambda params, told: proposer.init(params, batch=batch, capacity=slots, inputs=told),
            draft_params,
            inputs,
        )
        needed += sum(math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(state))
    first = jax.tree.leaves(target.params)[0]
    devices = len(first.sharding.device_set) if isinstance(first, jax.Array) else 1
    memory.require_free(
        f"decoding {batch} row{'s' if batch > 1 else ''} of {slots} tokens, weights apart,",
        needed // devices,
        "take a smaller batch or fewer tokens (max_new_tokens), narrower prompt chunks (prefill_width) or a "
        "narrower cache (cache_dtype)",
    )
