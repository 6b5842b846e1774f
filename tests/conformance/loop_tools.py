"""Tiny targets, an uncached reference for them, and the loop driven with shapes that all tests share.

One capacity, one prefill width, one batch and two end-of-text ids throughout, so that each proposer compiles
once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scripted import Predicted

from eaglejax import sampling
from eaglejax.kv_format import KVFormat
from eaglejax.models import decoder
from eaglejax.models.config import LayerSpec, ModelConfig
from eaglejax.models.target import Target
from eaglejax.nn.rope import RopeConfig
from eaglejax.nn.visible import Causal
from eaglejax.quant.kv import calibrate_cache
from eaglejax.sampling import Sampling
from eaglejax.speculate import rounds
from eaglejax.speculate.generate import BatchDecoder, DecodeOptions, Generation, Request

VOCAB = 32
CONTEXT = 48
CAPACITY = 64
WIDTH = 16
BATCH = 3
CHUNK = 4
"""Rounds between looks at the host."""
GREEDY = Sampling(seed=0)
COLD = Sampling(frequency_penalty=2.0, repetition_penalty=1.3, presence_penalty=0.5, seed=0)
HOT = Sampling(temperature=0.9, top_p=0.9, frequency_penalty=0.3, seed=7)
WARM = Sampling(temperature=0.6, top_k=9, repetition_penalty=1.2, seed=7)
"""Rows of one batch: whoever is beside HOT or WARM runs the program for all of them."""
SEED = 12
"""Weights whose greedy texts do not fall into a loop: nine in ten of their token pairs are new."""
NO_EOS = (1000, 1001)
"""Two ids that no text holds: the programs are compiled for two."""

SMALL_VOCAB = 5
SMALL_PROMPT = (1, 4, 1, 4, 2, 1)
"""Of the small targets, whose answers are counted."""


WORDS = (
    *(bytes([97 + i]) for i in range(22)),
    b" the",
    b" of",
    b"ing",
    b"ab",
    b"\n",
    b".",
    b"!!",
    b" ",
    b"ba",
    b"(x)",
)
"""A text for each token of the tiny targets."""


@dataclasses.dataclass(frozen=True)
class PieceTokenizer:
    """Tokens are byte strings; in SHARDS some are parts of a character, which need not come out whole."""

    pieces: tuple[bytes, ...]
    special_ids: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


def tiny_config(**changes: Any) -> ModelConfig:
    """Two layers, grouped heads, one of the layers with a sliding window."""
    config = ModelConfig(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=CONTEXT,
        rope=RopeConfig(),
        query_scale=8**-0.5,
        layers=(LayerSpec(window=11), LayerSpec()),
    )
    return dataclasses.replace(config, **changes)


def small_config(**changes: Any) -> ModelConfig:
    """One layer over five tokens, whose every answer of three tokens can be listed."""
    small = {"vocab_size": SMALL_VOCAB, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 1}
    return tiny_config(**{**small, "num_layers": 1, "layers": (LayerSpec(window=11),), **changes})


def lively(config: ModelConfig, seed: int, scale: float = 25.0) -> Any:
    """Random weights large enough that the distribution is far from uniform."""
    params = decoder.init_params(config, jax.random.key(seed))
    return jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, params)


@dataclasses.dataclass(frozen=True)
class Layers:
    """A kind of target by what its layers keep of a token; hashable.

    ``tiny``, ``small``: configurations for texts and for distributions. ``cache``: format of the keys and
    values. ``exact``: whether the cache holds what was computed, to float32's rounding; else numbers differ
    by a little where rounding decides.
    """

    name: str = "float32"
    tiny: Callable[[], ModelConfig] = tiny_config
    small: Callable[[], ModelConfig] = small_config
    cache: str = "float32"

    @property
    def exact(self) -> bool:
        return self.cache == "float32"

    def target(self) -> Target:
        """For texts: what ``prompts`` belong to (no tokenizer)."""
        return _target(self, False)

    def small_target(self) -> Target:
        """For distributions: what ``SMALL_PROMPT`` belongs to."""
        return _target(self, True)


PLAIN = Layers()


@functools.cache
def _target(layers: Layers, small: bool) -> Target:
    config = layers.small() if small else layers.tiny()
    params = lively(config, 3, 12.0) if small else lively(config, SEED)
    target = Target(config=config, params=params, dtype=np.dtype("float32"), context=CONTEXT)
    texts = [SMALL_PROMPT] if small else prompts()
    scales = calibrate_cache(target, texts) if KVFormat(layers.cache).static else None
    return dataclasses.replace(target, cache_format=layers.cache, cache_scales=scales)


def tiny_target() -> Target:
    """The target of all loop tests (f32, no tokenizer)."""
    return PLAIN.target()


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Ragged prompts, the last longer than a prefill chunk."""
    rng = np.random.default_rng(5)
    return tuple(tuple(rng.integers(0, VOCAB, size).tolist()) for size in (1, 7, WIDTH + 3))


@functools.partial(jax.jit, static_argnums=(1, 3, 5))
def full_forward(
    params: Any,
    config: ModelConfig,
    tokens: jax.Array,
    form: str = "float32",
    scales: Any = None,
    aux: tuple[Any, ...] = (),
) -> tuple[jax.Array, Any, jax.Array | None]:
    """Logits [B, T, V], the cache and the boundaries ``aux`` [B, T, A, H] after one causal forward over
    ``tokens`` [B, T] from nothing."""
    batch, size = tokens.shape
    place = jnp.broadcast_to(jnp.arange(size), (batch, size))
    empty = decoder.init_cache(config, batch, size, form, scales)
    out = decoder.forward(params, config, tokens, place, empty, Causal(), aux=aux)
    return decoder.unembed(params, config, out.hidden), out.cache, out.aux


def logits_of(target: Target, texts: np.ndarray) -> np.ndarray:
    """[B, T, V] of one causal forward over ``texts`` [B, T], through a cache as the target asks for."""
    form = target.cache_format or "float32"
    return np.asarray(full_forward(target.params, target.config, texts, form, target.cache_scales)[0])


def pad(rows: Sequence[Sequence[int]], width: int = CONTEXT) -> np.ndarray:
    """[B, width] int32, zeros behind each row."""
    out = np.zeros((len(rows), width), np.int32)
    for row, text in enumerate(rows):
        out[row, : len(text)] = text
    return out


def penalised(logits: np.ndarray, how: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """The penalties written out a second time, for one position: [V] f64."""
    logits = logits.astype(np.float64)
    for token in {*prompt, *answer} if how.repetition_penalty != 1 else ():
        up = logits[token] > 0
        logits[token] *= 1 / how.repetition_penalty if up else how.repetition_penalty
    for token in set(answer):
        logits[token] -= how.presence_penalty + how.frequency_penalty * list(answer).count(token)
    return logits


@functools.cache
def greedy_texts(
    starts: tuple[tuple[int, ...], ...], layers: Layers = PLAIN, how: Sampling = GREEDY
) -> tuple[tuple[int, ...], ...]:
    """Prompts continued to the context's end by an argmax over uncached forwards, one token at a time."""
    texts = [list(p) for p in starts]
    while min(map(len, texts)) < CONTEXT:
        logits = logits_of(layers.target(), pad(texts))
        for row, text in enumerate(texts):
            if len(text) < CONTEXT:
                size = len(starts[row])
                here = penalised(logits[row, len(text) - 1], how, text[:size], text[size:])
                text.append(int(here.argmax()))
    return tuple(map(tuple, texts))


def expected(
    prompt: Sequence[int], text: Sequence[int], limit: int, eos: Sequence[int]
) -> tuple[list[int], str]:
    """What plain decoding gives: tokens up to the first end-of-text id or the limit, and why it stopped."""
    answer = list(text[len(prompt) :])[: max(limit, 0)]
    for n, token in enumerate(answer):
        if token in eos:
            return answer[: n + 1], "stop"
    return answer, "length"


def split(proposer: Any, params: Any) -> tuple[Any, Any]:
    """The proposer's weights and its inputs, from what ``Case.params`` gives."""
    if isinstance(params, Predicted):
        return None, proposer.inputs(params.requests(), len(params))
    return params, ()


def decode(
    proposer: Any,
    draft_params: Any,
    starts: Sequence[Sequence[int]],
    *,
    target: Target | None = None,
    limits: int | Sequence[int] = CONTEXT,
    samplings: Sampling | Sequence[Sampling] = GREEDY,
    eos: tuple[int, ...] = NO_EOS,
    stop: tuple[str, ...] = (),
    ends: tuple[int, ...] = (),
    batch: int = BATCH,
    **options: Any,
) -> list[Generation]:
    """One batch through the public decoder with the shapes that all tests share."""
    many = len(starts)
    limits = [limits] * many if isinstance(limits, int) else limits
    samplings = [samplings] * many if isinstance(samplings, Sampling) else samplings
    guesses: list[Any] = [None] * many
    if isinstance(draft_params, Predicted):
        draft_params, guesses = None, [r.prediction for r in draft_params.requests()][:many]
    run = BatchDecoder(
        dataclasses.replace(target or tiny_target(), eos_ids=eos),
        proposer,
        draft_params,
        [
            Request(tuple(p), s, n, stop, g, ends)
            for p, s, n, g in zip(starts, samplings, limits, guesses, strict=True)
        ],
        batch=batch,
        options=DecodeOptions(**{"rounds_a_chunk": CHUNK, "prefill_width": WIDTH, **options}),
    )
    for _ in run:
        pass
    return run.results()


def empty_state(
    program: rounds.Program,
    params: rounds.Params,
    target: Target,
    settings: Sequence[Sampling],
    starts: Sequence[Sequence[int]],
    budget: Sequence[int],
    eos: tuple[int, ...] = NO_EOS,
    inputs: Any = (),
) -> rounds.DecodeState:
    """The state before any prompt, in the shapes that ``decode`` compiles for."""
    return rounds.jit_init_state(
        program,
        params,
        sampling.rows(settings, target.config.vocab_size, starts),
        capacity=CAPACITY,
        budget=jnp.asarray(budget, jnp.int32),
        eos=jnp.asarray(sorted(eos), jnp.int32),
        cache_dtype=KVFormat(target.cache_format or "float32"),
        cache_scales=target.cache_scales,
        inputs=inputs,
    )


def prefill(
    program: rounds.Program,
    params: rounds.Params,
    state: rounds.DecodeState,
    texts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    emit: bool = True,
) -> tuple[rounds.DecodeState, np.ndarray]:
    """``lengths[b]`` tokens of each of ``texts`` taken in by chunks (0: the row is left alone); the state and
    the first tokens [B] of rows that begin. ``emit`` False: no row begins; the token behind the last one is
    read from the text too."""
    lengths, first = np.asarray(lengths), np.zeros(len(texts), np.int32)
    text = pad(texts, CONTEXT + WIDTH + 1)
    for begin in range(0, max(lengths), WIDTH):
        count = np.clip(lengths - begin, 0, WIDTH).astype(np.int32)
        last = (count > 0) & (lengths <= begin + WIDTH) & emit
        parts = (text[:, begin : begin + WIDTH], text[:, begin + 1 : begin + WIDTH + 1], count, last)
        state, record = rounds.jit_prefill_chunk(program, params, state, *map(jnp.asarray, parts))
        first = np.where(last, np.asarray(record.tokens)[:, 0], first)
    return state, first


def start(
    program: rounds.Program,
    params: rounds.Params,
    target: Target | None = None,
    settings: Sequence[Sampling] = (GREEDY,) * BATCH,
    budget: Sequence[int] | None = None,
    inputs: Any = (),
) -> rounds.DecodeState:
    """The state after the prompts."""
    target, sizes = target or tiny_target(), [len(p) for p in prompts()]
    budget = [CONTEXT - n for n in sizes] if budget is None else budget
    state = empty_state(program, params, target, settings, prompts(), budget, inputs=inputs)
    return prefill(program, params, state, prompts(), sizes)[0]


def one_round(
    program: rounds.Program, params: rounds.Params, state: rounds.DecodeState
) -> tuple[rounds.DecodeState, rounds.Record]:
    """The next state, and the round's record without the axis of rounds; ``state`` is donated."""
    state, records, ran = rounds.jit_run_rounds(
        program, params, state, jax.device_put(np.int32(1)), most=CHUNK
    )
    assert int(ran) == 1
    return state, jax.tree.map(lambda x: np.asarray(x)[0], records)
