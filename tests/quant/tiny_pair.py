"""A tiny target with drafts trained on its own greedy texts, so that they are accepted almost whole.

Trained rather than built by hand: such a draft leans on everything it reads, so every slip costs acceptance.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from eagle_loop import CONTEXT, draft_config, target_config

from eaglejax.drafts.autoregressive import Autoregressive
from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.load import bind
from eaglejax.drafts.eagle.model import EagleParams, init_eagle
from eaglejax.drafts.eagle.unroll import unroll
from eaglejax.measure.quality import Texts
from eaglejax.models import decoder
from eaglejax.models.target import Target
from eaglejax.nn.visible import Causal
from eaglejax.sampling import Sampling
from eaglejax.speculate.generate import BatchDecoder, DecodeOptions, Request

DEPTH, STEPS, RATE = 2, 300, 1e-2
PROMPTS = tuple(tuple((5 * i + 3 * j * j + 1) % 24 for j in range(3 + i)) for i in range(6))


@functools.cache
def target() -> Target:
    """Three layers, every norm with a weight of its own, an untied head (as rotation leaves it)."""
    config = target_config(num_layers=3, qkv_bias=True)
    rng = np.random.default_rng(7)

    def lively(path: Any, x: jax.Array) -> jax.Array:
        if "norm" in str(path[-1]):
            return jnp.asarray(np.exp(rng.normal(0, 0.5, x.shape)), jnp.float32)
        return x * 15.0 if x.ndim > 1 else jnp.asarray(rng.normal(0, 0.3, x.shape), jnp.float32)

    params = jax.tree_util.tree_map_with_path(lively, decoder.init_params(config, jax.random.key(21)))
    return Target(config=config, params=params, dtype=np.dtype("float32"), context=CONTEXT)


def decode(
    which: Target, proposer: Any, params: Any, prompts: Any = PROMPTS
) -> tuple[list[list[int]], list[list[int]]]:
    """(tokens, tokens settled a round) of each prompt, greedy, to the end of the context."""
    run = BatchDecoder(
        which,
        proposer,
        params,
        [Request(tuple(p), Sampling(seed=0), CONTEXT) for p in prompts],
        options=DecodeOptions(rounds_a_chunk=1, prefill_width=16),
    )
    trace: list[list[int]] = [[] for _ in prompts]
    for piece in run:
        trace[piece.row].append(len(piece.token_ids))
    return [r.token_ids for r in run.results()], trace


@functools.cache
def texts() -> tuple[tuple[int, ...], ...]:
    """What the target writes behind each prompt, the prompt included."""
    answers, _ = decode(target(), Autoregressive(), None)
    return tuple((*p, *a) for p, a in zip(PROMPTS, answers, strict=True))


@functools.cache
def written() -> Texts:
    """The same as a diagnosis takes them."""
    return Texts.of([(p, t[len(p) :]) for p, t in zip(PROMPTS, texts(), strict=True)])


def features(which: Target, tokens: np.ndarray, aux: tuple[int, ...]) -> jax.Array:
    """[B, T, A, H]: the boundaries ``aux``, or the post-norm state for none."""
    return _features(which.params, which.config, jnp.asarray(tokens), aux)


@functools.partial(jax.jit, static_argnums=(1, 3))
def _features(params: Any, config: Any, tokens: jax.Array, aux: tuple[int, ...]) -> jax.Array:
    b, n = tokens.shape
    place = jnp.broadcast_to(jnp.arange(n), (b, n))
    out = decoder.forward(params, config, tokens, place, decoder.init_cache(config, b, n), Causal(), aux=aux)
    return out.aux if aux else out.hidden[:, :, None]


VERSIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "eagle1": (1, {"head_dim": 8}),
    "eagle3": (3, {"aux": (1, 2, 3), "aux_norm": "each", "head_dim": 8}),
}


def config(name: str) -> EagleConfig:
    """The draft's: embedding borrowed, EAGLE-1's head too; norms before EAGLE-3's fc."""
    version, changes = VERSIONS[name]
    return draft_config(target().config, version, **changes)


@functools.cache
def draft(name: str) -> tuple[EagleConfig, EagleParams]:
    """A draft trained by heart on ``texts()``, three steps ahead."""
    return train(config(name), target(), np.asarray(texts()))


def train(
    setup: EagleConfig, which: Target, tokens: np.ndarray, shift: int = 0
) -> tuple[EagleConfig, EagleParams]:
    """Train on ``tokens`` [B, T]; ``shift`` pairs each token with the features that many positions later."""
    seen = features(which, tokens, setup.aux)[:, : tokens.shape[1] - 1]
    weights = _train(
        setup, init_eagle(setup, jax.random.key(3)), which.params, jnp.roll(seen, -shift, 1), tokens
    )
    return setup, bind(setup, weights, which)


@functools.partial(jax.jit, static_argnums=0)
def _train(setup: EagleConfig, weights: Any, params: Any, seen: jax.Array, tokens: jax.Array) -> Any:
    weights = jax.tree.map(lambda x: x * 6 if x.ndim > 1 else x, weights)
    following = tokens[:, 1:]
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, STEPS))

    def loss(own: Any) -> jax.Array:
        joined = EagleParams(own, embed=params["embed"], head=None if setup.own_head else params["head"])
        total = 0.0
        for k, state in enumerate(unroll(joined, setup, seen, following, DEPTH)):
            logits = eagle_model.logits(joined, setup, state)[:, : -(k + 1)]
            total += optax.softmax_cross_entropy_with_integer_labels(logits, following[:, k + 1 :]).mean()
        return total

    def step(carry: Any, _: None) -> Any:
        own, state = carry
        value, grads = jax.value_and_grad(loss)(own)
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(own, updates), state), value

    (own, _), _ = jax.lax.scan(step, (weights, optimizer.init(weights)), None, length=STEPS)
    return own
