"""Attention of new tokens over a committed prefix and over each other.

Keys and values of new tokens are read from the cache like those of old ones. So a token in a narrow cache is
seen by the tree it was verified in exactly as by all that comes after it, and nothing depends on how many
tokens a forward takes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import devices
from eaglejax.devices import Attention
from eaglejax.devices import adapter as adapters
from eaglejax.errors import ConfigError
from eaglejax.nn import kv_codec
from eaglejax.nn.attention_implementations import (
    IMPLEMENTATIONS,
    Wants,
    cpu_refusal,
    pallas_refusal,
    queries_a_call,
)
from eaglejax.nn.kv_codec import PackedKV, Stored
from eaglejax.nn.visible import Chunked, Selected, Visible

log = logging.getLogger(__name__)


_chosen: ContextVar[Attention | None] = ContextVar("attention", default=None)


@contextlib.contextmanager
def attention_by(choice: Attention | str | None) -> Iterator[None]:
    """How attention is computed by what is traced in the body; None: as the device's adapter chooses.

    It is no part of a model: whoever compiles a program, keyed by the choice, says it once for all layers of
    all models in it.
    """
    token = _chosen.set(Attention(choice) if isinstance(choice, str) else choice)
    try:
        yield
    finally:
        _chosen.reset(token)


@functools.cache
def _report(adapter: str, shape: str, refusal: str) -> None:
    log.warning("%s: attention of %s runs on XLA: the kernel %s", adapter, shape, refusal)


def _choose(
    requested: Attention | None,
    q: jax.Array,
    k: Stored,
    v: Stored,
    slots: int,
    wants: Wants,
    block_tables: jax.Array | None,
) -> tuple[str, dict[str, Any]]:
    """Name of the implementation, and what it is told besides attend's arguments. Raises ConfigError."""
    adapter = None
    choice = requested
    if choice is None:
        adapter = devices.current()
        choice = adapter.attention
    options: dict[str, Any] = {}
    if choice.implementation == "xla":
        return "xla", options
    adapter = adapter or devices.current()
    kernel = choice.implementation
    if kernel == "cpu":
        refusal = cpu_refusal(q, k, v, wants)
    else:
        if requested is not None and requested.interpret is not False:
            adapters.check_runs(adapter, requested)
        rows = min(slots, queries_a_call(q, k)) * (q.shape[2] // k.shape[1])
        block = choice.block_kv
        if block is None and kernel == "tpu" and block_tables is None:
            block = adapter.block_kv(head_dim=q.shape[3], dtype=k.dtype.name, rows=rows)
        refusal = pallas_refusal(kernel, block, q, k, v, slots, wants, block_tables)
        options = {"interpret": choice.interpret, "block_kv": block}
    if refusal is None:
        return kernel, options
    shape = (
        f"{slots} new tokens x {q.shape[2]} query heads of {q.shape[3]} over {k.shape[2]} slots of {k.dtype}"
    )
    if requested is not None or adapter.forced:
        raise ConfigError(
            f"attention of {shape} was to use the {kernel!r} kernel, which {refusal}; change "
            "that, or use attention 'xla', which takes everything"
        )
    _report(adapter.name, shape, refusal)
    return "xla", {}


def attend(
    q: jax.Array,
    k: Stored,
    v: Stored,
    lengths: jax.Array,
    visible: Visible,
    positions: jax.Array,
    *,
    slot_positions: jax.Array | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    slot_offset: jax.Array | int = 0,
    block_tables: jax.Array | None = None,
    implementation: Attention | str | None = None,
) -> jax.Array:
    """``attend_with_lse`` without the log-sum-exp, which a CPU's kernel does not compute."""
    options: dict[str, Any] = {"slot_positions": slot_positions, "scale": scale, "window": window}
    options |= {"softcap": softcap, "slot_offset": slot_offset, "block_tables": block_tables}
    how: dict[str, Any] = {"lse": False, "implementation": implementation}
    return _attend(q, k, v, lengths, visible, positions, **how, **options)[0]


def attend_with_lse(
    q: jax.Array,
    k: Stored,
    v: Stored,
    lengths: jax.Array,
    visible: Visible,
    positions: jax.Array,
    *,
    slot_positions: jax.Array | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    slot_offset: jax.Array | int = 0,
    block_tables: jax.Array | None = None,
    implementation: Attention | str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend with ``q`` [B, N, Hq, dk] over ``k`` [B, Hkv, S, dk], ``v`` [B, Hkv, S, dv].

    Gives (result [B, N, Hq, dv] in q's dtype, log-sum-exp of the scaled scores [B, N, Hq] f32).

    Keys and values are arrays or ``PackedKV``; those of the new tokens already sit in the cache. Slots [0,
    lengths[b]) are the prefix: their position is their slot and every query sees them (window permitting).
    Slots lengths[b] .. lengths[b]+M-1 are new; ``visible`` says who sees whom and ``slot_positions`` [B, M]
    where they stand (default: ``positions`` [B, N], for M == N). What later slots hold has no influence;
    ``lengths + M <= S`` is the caller's duty. Every query should see itself; one that sees nothing yields
    zeros and -inf. Hq must be a multiple of Hkv (grouped-query attention, Ainslie et al. 2023). Softmax in
    f32. ``softcap`` c replaces a score s by ``c tanh(s / c)`` before masking.

    A cache in parts: the arrays' first slot is slot ``slot_offset`` (a number or [B] int32) of the row, where
    each device holds some of the slots; the parts' results join by their log-sum-exps
    (``kernels_pallas.tree_attention.merge``). ``block_tables`` [B, nblocks] int32: the arrays are pages [P,
    Hkv, block, d], and these the pages of each row. Where keys are stored as differences from a row's first
    (``kv_codec``), the log-sum-exps of a query are all off by one number, which joining does not notice.

    ``implementation``: None takes what ``attention_by`` says, else what the device's adapter chooses, and XLA
    where its kernel refuses the shapes (logged once); an ``Attention``, or its name, is taken or refused. The
    kernels want the N queries' own slots to be the last of the M. Raises ConfigError.
    """
    options: dict[str, Any] = {"slot_positions": slot_positions, "scale": scale, "window": window}
    options |= {"softcap": softcap, "slot_offset": slot_offset, "block_tables": block_tables}
    out, lse = _attend(
        q, k, v, lengths, visible, positions, lse=True, implementation=implementation, **options
    )
    assert lse is not None
    return out, lse


def _attend(
    q: jax.Array,
    k: Stored,
    v: Stored,
    lengths: jax.Array,
    visible: Visible,
    positions: jax.Array,
    *,
    lse: bool,
    implementation: Attention | str | None,
    **options: Any,
) -> tuple[jax.Array, jax.Array | None]:
    if q.shape[2] % k.shape[1]:
        raise ConfigError(f"{q.shape[2]} query heads are not a multiple of {k.shape[1]} key/value heads")
    b, n, _, _ = q.shape
    m = visible.slots(n)
    refusal = visible.refusal(b, n)
    if refusal:
        raise ConfigError(f"visible does not fit {b} rows of {n} queries: {refusal}")
    if options["slot_positions"] is None and m != n:
        raise ConfigError(f"visible has {m} new slots for {n} queries; give slot_positions")
    tables, offset = options["block_tables"], options["slot_offset"]
    whole = isinstance(offset, int) and offset == 0
    if tables is None and whole and m > k.shape[2]:
        raise ConfigError(f"{m} new slots do not fit a cache of {k.shape[2]} slots")
    wants = Wants(
        lse=lse, parts=tables is not None or not whole, selected=isinstance(visible, Chunked | Selected)
    )
    requested = Attention(implementation) if isinstance(implementation, str) else implementation
    requested = requested or _chosen.get()
    name, chosen = _choose(requested, q, k, v, m, wants, tables)
    dtype = q.dtype
    if isinstance(k, PackedKV) and not k.format.direct:
        q = kv_codec.into_codes(k, q)
    # Sums of codes are rounded to the result's dtype after they have become sums of values.
    turned = v if isinstance(v, PackedKV) and not v.format.direct else None
    out, total = IMPLEMENTATIONS[name](
        q,
        k,
        v,
        lengths,
        visible,
        positions,
        out_dtype=dtype if turned is None else jnp.float32,
        **options,
        **chosen,
    )
    return (out if turned is None else kv_codec.out_of_codes(turned, out).astype(dtype)), total
