"""A tiny target, an uncached reference for it, and the loop driven with shapes that all tests share.

One capacity, one prefill width, one batch and two end-of-text ids throughout, so that each proposer compiles
once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.drafts.autoregressive import Autoregressive
from eaglejax.drafts.draft_model.proposer import DraftModel
from eaglejax.drafts.ngram import NGram
from eaglejax.drafts.prediction import Prediction
from eaglejax.drafts.scripted import Scripted
from eaglejax.drafts.tree import StaticTree, chain, from_choices
from eaglejax.models import decoder
from eaglejax.models.config import LayerSpec, ModelConfig
from eaglejax.models.target import Target
from eaglejax.nn.rope import RopeConfig
from eaglejax.nn.visible import Causal
from eaglejax.sampling import Sampling
from eaglejax.speculate.generate import BatchDecoder, DecodeOptions, Generation, Request

VOCAB = 32
CONTEXT = 48
CAPACITY = 64
WIDTH = 16
BATCH = 3
GREEDY = Sampling(seed=0)
SEED = 12
"""Weights whose greedy texts do not fall into a loop: nine in ten of their token pairs are new."""
NO_EOS = (1000, 1001)
"""Two ids that no text holds: the programs are compiled for two."""

CHAIN_3 = from_choices([[0], [0, 0], [0, 0, 0]])
WIDE = from_choices([[0], [1], [2], [3]])
MIXED = from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 1], [0, 1, 0], [1, 1, 0], [1, 1, 1]])


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


def lively(config: ModelConfig, seed: int, scale: float = 25.0) -> Any:
    """Random weights large enough that the law is far from uniform."""
    params = decoder.init_params(config, jax.random.key(seed))
    return jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, params)


@functools.cache
def tiny_target() -> Target:
    """The target of all loop tests (f32, no tokenizer)."""
    config = tiny_config()
    return Target(config=config, params=lively(config, SEED), dtype=np.dtype("float32"), context=CONTEXT)


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Ragged prompts, the last longer than a prefill chunk."""
    rng = np.random.default_rng(5)
    return tuple(tuple(rng.integers(0, VOCAB, size).tolist()) for size in (1, 7, WIDTH + 3))


@functools.partial(jax.jit, static_argnums=1)
def full_forward(params: Any, config: ModelConfig, tokens: jax.Array) -> tuple[jax.Array, Any]:
    """Logits [B, T, V] and the cache after one causal forward over ``tokens`` [B, T] from nothing."""
    batch, size = tokens.shape
    place = jnp.broadcast_to(jnp.arange(size), (batch, size))
    empty = decoder.init_cache(config, batch, size)
    out = decoder.forward(params, config, tokens, place, empty, Causal())
    return decoder.unembed(params, config, out.hidden), out.cache


def pad(rows: Sequence[Sequence[int]], width: int = CONTEXT) -> np.ndarray:
    """[B, width] int32, zeros behind each row."""
    out = np.zeros((len(rows), width), np.int32)
    for row, text in enumerate(rows):
        out[row, : len(text)] = text
    return out


@functools.cache
def greedy_texts(starts: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Prompts continued to the context's end by an argmax over uncached forwards, one token at a time."""
    target = tiny_target()
    texts = [list(p) for p in starts]
    while min(map(len, texts)) < CONTEXT:
        logits = np.asarray(full_forward(target.params, target.config, pad(texts))[0])
        for row, text in enumerate(texts):
            if len(text) < CONTEXT:
                text.append(int(logits[row, len(text) - 1].argmax()))
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


class Predicted(list[Any]):
    """Stands for the params of a proposer whose requests bring predictions: token ids a row, or None."""

    def requests(self) -> list[Request]:
        """Requests that bring them."""
        return [Request((0,), GREEDY, 1, (), None if p is None else tuple(p)) for p in self]


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
        guesses = [r.prediction for r in draft_params.requests()]
    run = BatchDecoder(
        dataclasses.replace(target or tiny_target(), eos_ids=eos),
        proposer,
        None if isinstance(draft_params, Predicted) else draft_params,
        [
            Request(tuple(p), s, n, stop, g, ends)
            for p, s, n, g in zip(starts, samplings, limits, guesses[:many], strict=True)
        ],
        batch=batch,
        options=DecodeOptions(**{"rounds_a_chunk": 4, "prefill_width": WIDTH, **options}),
    )
    for _ in run:
        pass
    return run.results()


@dataclasses.dataclass(frozen=True)
class Case:
    """A proposer and how its params come from the texts that greedy decoding will give."""

    proposer: Any
    kind: str = "plain"

    def params(self, texts: Sequence[Sequence[int]], batch: int = BATCH, turn: int = 0) -> Any:
        """``turn`` varies scripts and predictions without changing a shape."""
        rows = [list(texts[i % len(texts)]) for i in range(batch)]
        if self.kind == "scripted":
            depth = self.proposer.depth
            scripts = [[0], [1], [depth - 1], [depth], [0, depth], [depth, 0, 1, depth - 1]]
            accept = [(scripts[(row + batch * turn) % len(scripts)] * 12)[:12] for row in range(batch)]
            return self.proposer.script(
                [pad([r])[0].tolist() for r in rows], accept, ("last", "alternate", "first")[turn % 3]
            )
        if self.kind == "prediction":
            edits = [
                lambda t: t,
                lambda t: [*t[:20], 7, 7, *t[20:]],
                lambda t: t[3:9] + t[14:],
                lambda t: None,
            ]
            edited = [edits[(row + batch * turn) % 4](r) for row, r in enumerate(rows)]
            return Predicted(edited)
        if self.kind == "model":
            return lively(self.proposer.config, SEED + turn)  # turn 0: the target drafts for itself
        return None


def scripted(tree: StaticTree) -> Case:
    """A scripted proposer over ``tree``."""
    return Case(Scripted(tree, VOCAB), "scripted")


CASES = {
    "ar": Case(Autoregressive()),
    "ngram": Case(NGram(length=4, max_ngram=3)),
    "prediction": Case(Prediction(length=4), "prediction"),
    "draft_model": Case(DraftModel(tiny_config(), length=2), "model"),
    "chain_1": scripted(chain(1)),
    "chain_3": scripted(CHAIN_3),
    "chain_5": scripted(chain(5)),
    "wide": scripted(WIDE),
    "mixed": scripted(MIXED),
}
