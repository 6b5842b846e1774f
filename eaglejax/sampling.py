"""The one sampling transform: what a user asks for, the distribution it gives, and every draw from it.

Order: logit bias -> repetition, presence and frequency penalties (:func:`process`) -> temperature -> top-k
-> top-p -> min-p -> softmax (:func:`distribution`). Autoregressive decoding, drafting and verification all
use these functions, so a distribution is the same wherever it is computed. Distributions are f32. What a user
writes stands in ``sampling_settings``, which needs no jax.
"""

from __future__ import annotations

import dataclasses
import enum
import secrets
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import pytree
from eaglejax.errors import ConfigError, RequestError
from eaglejax.sampling_edge import blocks_of, edge_of, mass
from eaglejax.sampling_settings import Sampling

HEAD = 256
"""Largest logits that a CPU sorts before it searches for the edge of a filter."""

SMALL = 4096
"""Vocabularies below this are filtered all distributions at once on any device."""


class Purpose(enum.IntEnum):
    """What a key is for; folded into a round's key so that no two purposes share draws."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3


@pytree.dataclass
class RowSampling:
    """The settings of every row of a batch, one array a field; built by :func:`rows`.

    [B] f32 (``top_k`` int32): the fields of :class:`Sampling`. ``keys`` [B] typed PRNG keys, each from its
    row's own seed. ``bias`` [B, V] f32 or None. ``counts`` [B, V] int32 or None: how often each token has
    been generated, the root included. ``in_prompt`` [B, V] bool or None. The static flags say that some row
    needs a step; they skip work and never change a row's result.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    keys: jax.Array
    bias: jax.Array | None = None
    counts: jax.Array | None = None
    in_prompt: jax.Array | None = None
    sampled: bool = pytree.static(default=True)
    filtered: bool = pytree.static(default=True)
    penalised: bool = pytree.static(default=False)
    biased: bool = pytree.static(default=False)


def rows(
    samplings: Sequence[Sampling],
    vocab_size: int,
    prompts: Sequence[Sequence[int]] | None = None,
    *,
    whole: bool = False,
) -> RowSampling:
    """Settings of a batch over a vocabulary of ``vocab_size`` (V) tokens.

    ``prompts``: token ids of every row, read by the repetition penalty alone. ``whole``: every array is there
    and every flag is set, whatever the rows ask for, for batches whose rows come and go. Raises ConfigError
    for a biased token outside the vocabulary, a bias that bans every token, or a repetition penalty without
    prompts; RequestError for a prompt token outside the vocabulary.
    """
    if not samplings:
        raise ConfigError("a batch needs at least one row of sampling settings")
    if prompts is not None and len(prompts) != len(samplings):
        raise ConfigError(f"{len(samplings)} sampling settings for {len(prompts)} prompts; give one a prompt")
    penalised = whole or any(s.penalised for s in samplings)
    biased = whole or any(s.logit_bias for s in samplings)

    def column(name: str) -> jax.Array:
        return jnp.asarray([getattr(s, name) for s in samplings], jnp.float32)

    # What is positive stays positive in f32, where denormals may flush to zero.
    tiny = np.finfo(np.float32).tiny
    heat = [max(s.temperature, tiny) if s.temperature > 0 else 0.0 for s in samplings]
    seeds = [secrets.randbits(64) if s.seed is None else int(s.seed) for s in samplings]
    words = np.asarray([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32)
    shape = (len(samplings), vocab_size)
    return RowSampling(
        temperature=jnp.asarray(heat, jnp.float32),
        top_k=jnp.asarray([s.top_k or 0 for s in samplings], jnp.int32),
        top_p=jnp.maximum(column("top_p"), tiny),
        min_p=column("min_p"),
        repetition=column("repetition_penalty"),
        presence=column("presence_penalty"),
        frequency=column("frequency_penalty"),
        keys=jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32"),
        bias=jnp.asarray(_bias_table(samplings, vocab_size)) if biased else None,
        counts=jnp.zeros(shape, jnp.int32) if penalised else None,
        in_prompt=jnp.asarray(_prompt_table(samplings, vocab_size, prompts)) if penalised else None,
        sampled=whole or any(s.temperature > 0 for s in samplings),
        filtered=whole or any(s.temperature > 0 and s.filtered for s in samplings),
        penalised=penalised,
        biased=biased,
    )


def _bias_table(samplings: Sequence[Sampling], vocab_size: int) -> np.ndarray:
    table = np.zeros((len(samplings), vocab_size), np.float32)
    for row, sampling in enumerate(samplings):
        for token, value in dict(sampling.logit_bias or ()).items():
            if token >= vocab_size:
                raise ConfigError(f"logit_bias names token {token}; the vocabulary ends at {vocab_size - 1}")
            table[row, token] = value
        if np.isneginf(table[row]).all():
            raise ConfigError("logit_bias bans every token of the vocabulary; leave at least one")
    return table


def _prompt_table(
    samplings: Sequence[Sampling], vocab_size: int, prompts: Sequence[Sequence[int]] | None
) -> np.ndarray:
    table = np.zeros((len(samplings), vocab_size), bool)
    if prompts is None:
        if any(s.repetition_penalty != 1.0 for s in samplings):
            raise ConfigError("repetition_penalty counts the prompt's tokens too; give the prompts")
        return table
    for row, prompt in enumerate(prompts):
        ids = np.asarray(prompt, np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
            raise RequestError(f"prompt {row} holds a token outside the vocabulary of {vocab_size} tokens")
        table[row, ids] = True
    return table


def count_tokens(rows: RowSampling, tokens: jax.Array, count: jax.Array) -> RowSampling:
    """Count ``tokens`` [B, M], of which the first ``count`` [B] are real, as generated."""
    if rows.counts is None:
        return rows
    real = jnp.arange(tokens.shape[1])[None, :] < count[:, None]
    row = jnp.arange(tokens.shape[0])[:, None]
    return dataclasses.replace(rows, counts=rows.counts.at[row, tokens].add(real.astype(jnp.int32)))


def _spread(per_row: jax.Array, like: jax.Array) -> jax.Array:
    """[B] shaped to broadcast against ``like`` [B, ...]."""
    return per_row.reshape(per_row.shape + (1,) * (like.ndim - 1))


def _penalise(logits: jax.Array, count: jax.Array, in_prompt: jax.Array, rows: RowSampling) -> jax.Array:
    """Penalties on ``logits`` [B, ...] of tokens generated ``count`` times."""
    repetition = _spread(rows.repetition, logits)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(in_prompt | (count > 0), repeated, logits)
    # Each step is rounded by itself: a compiler that merged a product into the subtraction in one program and
    # not in another would part plain and speculative decoding.
    presence = jnp.where(count > 0, _spread(rows.presence, logits), 0.0)
    frequency = jnp.where(count > 0, _spread(rows.frequency, logits) * count, 0.0)
    return logits - presence - frequency


def process(
    logits: jax.Array,
    rows: RowSampling,
    tokens: jax.Array | None = None,
    ancestors: jax.Array | None = None,
) -> jax.Array:
    """Bias and penalties: ``logits`` [B, M, V] -> [B, M, V] f32.

    ``tokens`` [B, N] are a tree's, whose node 0 (the root) already is in ``rows.counts``. Position i of the
    logits is penalised for the generated tokens and for those of the nodes that ``ancestors`` [B, M, N]
    marks: a tree's own forward has M = N and marks ancestors-or-self; a draft that is still growing asks for
    the few positions it needs. Without ``tokens`` every position is penalised for the generated tokens alone.
    """
    logits = logits.astype(jnp.float32)
    if rows.biased:
        assert rows.bias is not None
        logits = logits + rows.bias[:, None, :]
    if not rows.penalised:
        return logits
    assert rows.counts is not None
    assert rows.in_prompt is not None
    out = _penalise(logits, rows.counts[:, None, :], rows.in_prompt[:, None, :], rows)
    if tokens is None or ancestors is None or tokens.shape[1] == 1:
        return out
    # Only the ancestors' own tokens differ from position to position: M x N values rather than M x V counts.
    above = ancestors.at[:, :, 0].set(False)
    same = (tokens[:, :, None] == tokens[:, None, :]).astype(jnp.int32)
    count = jnp.einsum("bik,bkj->bij", above.astype(jnp.int32), same)
    count = count + jnp.take_along_axis(rows.counts, tokens, axis=1)[:, None, :]
    seen = jnp.take_along_axis(rows.in_prompt, tokens, axis=1)[:, None, :]
    where = jnp.broadcast_to(tokens[:, None, :], above.shape)
    value = _penalise(jnp.take_along_axis(logits, where, axis=2), count, seen, rows)
    # A node that is no ancestor writes nowhere.
    where = jnp.where(above, where, logits.shape[-1])
    row, position = jnp.arange(above.shape[0])[:, None, None], jnp.arange(above.shape[1])[None, :, None]
    return out.at[row, position, where].set(value, mode="drop")


@pytree.dataclass
class Cut:
    """A distribution as scalars [B, ...], from which a token's probability follows by its logit alone.

    ``peak``: largest logit; ``temperature`` (1 at greedy rows, whose distribution is a ``where`` of the
    caller); ``edge``: smallest logit that top-k and top-p keep; ``floor``: least weight that min-p keeps;
    ``total``: weight of what is kept. The most likely token weighs 1.
    """

    peak: jax.Array
    temperature: jax.Array
    edge: jax.Array
    floor: jax.Array
    total: jax.Array


def weigh(logits: jax.Array, by: Cut) -> jax.Array:
    """Unnormalised probabilities of ``logits``, against which the scalars of ``by`` broadcast."""
    # The difference comes first: dividing large logits by a small temperature would give inf - inf.
    weights = jnp.exp((logits - by.peak) / by.temperature)
    return jnp.where((logits >= by.edge) & (weights >= by.floor), weights, 0.0)


def prob(logits: jax.Array, by: Cut) -> jax.Array:
    """Probabilities of ``logits``, against which the scalars of ``by`` broadcast; 0 without support."""
    return weigh(logits, by) / jnp.where(by.total > 0, by.total, 1.0)


def cut(processed: jax.Array, rows: RowSampling) -> Cut:
    """Scalars [B, ...] of the distributions of ``processed`` [B, ..., V]; ties at top-k's and top-p's edge
    are kept.

    Top-k keeps a token while fewer than k are larger; top-p while the larger ones hold less than p of the
    mass that top-k left.
    """
    shape = processed.shape[:-1]
    each = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    settings = [jnp.broadcast_to(_spread(x, processed[..., 0]), shape) for x in each]
    if not rows.filtered or processed.shape[-1] < SMALL:
        return _cut(processed, *settings, filtered=rows.filtered)
    # A CPU searches one distribution at a time, which stays in its cache; an accelerator all of them at once.
    flat = (processed.reshape(-1, processed.shape[-1]), *(x.reshape(-1) for x in settings))
    cuts = jax.lax.platform_dependent(
        *flat,
        cpu=lambda *each: jax.lax.map(lambda one: _cut(*one, head=HEAD), each),
        default=lambda *each: _cut(*each),
    )
    return jax.tree.map(lambda x: x.reshape(shape), cuts)


def _cut(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    filtered: bool = True,
    head: int = 0,
) -> Cut:
    """:func:`cut` of ``logits`` [..., V] with settings [...], sorting the ``head`` largest logits first."""
    live = temperature > 0
    peak = jnp.max(logits, axis=-1)
    found = Cut(
        peak=jnp.where(jnp.isfinite(peak), peak, 0.0),
        temperature=jnp.where(live, temperature, 1.0),
        edge=jnp.full_like(peak, -jnp.inf),
        floor=jnp.zeros_like(peak),
        total=jnp.ones_like(peak),
    )
    if filtered:
        ranked = jax.lax.top_k(logits, head)[0] if head else None
        fewer = top_k.astype(jnp.float32)
        on = live & (top_k > 0) & (top_k < logits.shape[-1])
        edge = edge_of(logits, lambda z: jnp.ones_like(z), fewer, found.edge, on, ranked)
        found = dataclasses.replace(found, edge=edge)
        above = jax.tree.map(lambda x: x[..., None], found)
        budget = top_p * mass(weigh(logits, above))
        edge = edge_of(logits, lambda z: weigh(z, above), budget, edge, live & (top_p < 1.0), ranked)
        found = dataclasses.replace(found, edge=edge, floor=min_p)
    return dataclasses.replace(found, total=mass(weigh(logits, jax.tree.map(lambda x: x[..., None], found))))


def distribution(processed: jax.Array, rows: RowSampling) -> jax.Array:
    """Probabilities [B, ..., V] f32 of ``processed`` logits [B, ..., V] over any vocabulary, a draft's too.

    Greedy rows are one-hot at the lowest id of the largest logit. A distribution without support (every
    logit -inf) is zero everywhere, never NaN.
    """
    best = greedy(processed)[..., None] == jnp.arange(processed.shape[-1], dtype=jnp.int32)
    if not rows.sampled:
        return best.astype(jnp.float32)
    probs = prob(processed, jax.tree.map(lambda x: x[..., None], cut(processed, rows)))
    return jnp.where(_spread(rows.temperature > 0, probs), probs, best.astype(jnp.float32))


def greedy(processed: jax.Array) -> jax.Array:
    """Lowest id of the largest value: [..., V] -> [...] int32."""
    blocks = blocks_of(processed, -jnp.inf)
    # The first block that holds the maximum, then its first lane: an argmax over V is many times slower on
    # a CPU.
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    lane = jnp.argmax(jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :], axis=-1)
    return (block * blocks.shape[-1] + lane).astype(jnp.int32)


def draw(weights: jax.Array, keys: jax.Array) -> jax.Array:
    """Tokens [...] int32 drawn with ``keys`` [...] from ``weights`` [..., V] f32 >= 0, of any positive sum.

    Inversion in two steps, block then lane, each with a uniform of its own, so that the many rare tokens of
    a large vocabulary keep their share (one f32 uniform, or f32 Gumbel noise, cannot resolve them). A token
    of zero weight is never drawn; when all weights are zero the result is 0.
    """
    blocks = blocks_of(weights, 0.0)
    luck = uniforms(keys, 2)
    block = _invert(jnp.sum(blocks, axis=-1), luck[..., 0])
    chosen = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return (block * blocks.shape[-1] + _invert(chosen, luck[..., 1])).astype(jnp.int32)


def uniforms(keys: jax.Array, count: int) -> jax.Array:
    """[...] keys -> [..., count] f32, uniform over the open interval (0, 1).

    Two draws each: one f32 uniform is a multiple of 2**-23, so that its 0 would pass for chances of 1e-31.
    """
    flat = jax.vmap(lambda key: jax.random.uniform(key, (2 * count,), jnp.float32))(keys.reshape(-1))
    coarse, fine = flat[:, :count], flat[:, count:]
    # In the middle of a step of the finer grid, and never rounded up to 1.
    both = jnp.minimum(coarse + (fine + 2.0**-24) * 2.0**-23, 1.0 - 2.0**-24)
    return both.reshape(*keys.shape, count)


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Index of the first positive weight whose running sum passes ``uniform`` of the whole."""
    # Rounding may let a parallel running sum grow over a zero weight; only positive ones are looked at.
    running = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0.0)
    return jnp.argmax(running > (uniform * jnp.max(running, axis=-1))[..., None], axis=-1)


def fold(keys: jax.Array, data: jax.Array | int) -> jax.Array:
    """``fold_in`` of ``data`` (one number, or [B]) into ``keys`` [B]."""
    return jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(jnp.asarray(data, jnp.uint32), keys.shape))


def round_keys(rows: RowSampling, lengths: jax.Array) -> jax.Array:
    """Keys [B] of the round whose root sits at position ``lengths`` [B], which no other round shares."""
    return fold(rows.keys, lengths)
