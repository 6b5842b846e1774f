"""Small drafts and inputs shared by the EAGLE tests."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import pytree, sampling
from eaglejax.drafts.base import Observation
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.model import EagleParams, param_table
from eaglejax.nn.rope import RopeConfig

EAGLE3 = EagleConfig(
    version=3,
    vocab_size=40,
    draft_vocab_size=40,
    hidden_size=16,
    target_hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_aux=3,
    aux=(0, 1, 2),
    head_norm=True,
    own_embedding=True,
    own_head=True,
)
EAGLE1 = dataclasses.replace(
    EAGLE3,
    version=1,
    num_aux=0,
    aux=(),
    head_norm=False,
    fc_bias=True,
    qkv_bias=True,
    num_heads=2,
    head_dim=8,
)
REDUCED = dataclasses.replace(EAGLE3, draft_vocab_size=24, norm_before_residual=True, aux_norm="joined")
MODERN = dataclasses.replace(
    EAGLE3,
    num_layers=2,
    hidden_size=12,
    target_hidden_size=16,
    num_aux=2,
    aux=(1, 3),
    aux_norm="each",
    feed_normed=True,
    qk_norm=True,
    rope=RopeConfig(theta=50000.0),
)
CONFIGS = {"eagle1": EAGLE1, "eagle3": EAGLE3, "reduced": REDUCED, "modern": MODERN}


def make(config: EagleConfig, seed: int = 0, scale: float = 1.0, dtype=jnp.float32) -> EagleParams:
    """A draft whose weights are large enough that its distributions are far from uniform."""
    leaves, tree = jax.tree.flatten(param_table(config), is_leaf=pytree.is_info)
    rng = np.random.default_rng(seed)
    leaves = [
        jnp.asarray(
            rng.normal(1.0, 0.2, x.shape)
            if len(x.shape) == 1
            else rng.normal(0, scale * 2 / np.sqrt(x.shape[0]), x.shape),
            dtype,
        )
        for x in leaves
    ]
    return EagleParams(weights=jax.tree.unflatten(tree, leaves), ids=ids_of(config, seed))


def ids_of(config: EagleConfig, seed: int = 0) -> jax.Array | None:
    if not config.reduced:
        return None
    rng = np.random.default_rng(seed + 1)
    return jnp.asarray(
        np.sort(rng.choice(config.vocab_size, config.draft_vocab_size, replace=False)), jnp.int32
    )


def numpy_weights(params: EagleParams):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params.weights)


def features_of(
    config: EagleConfig, tokens: np.ndarray, start: int, before: int, seed: int = 0
) -> np.ndarray:
    """[n, A, Ht]: what a target might say of ``tokens`` at positions from ``start`` on, ``before`` being the
    token before."""
    rng = np.random.default_rng(seed + 7)
    count = config.num_aux or 1
    a, b = rng.normal(size=(2, config.vocab_size, count, config.target_hidden_size))
    previous = np.concatenate([[before], tokens[:-1]]) if len(tokens) else tokens
    positions = np.arange(start, start + len(tokens))[:, None, None]
    return np.tanh(a[tokens] + b[previous] + np.sin(positions)).astype(np.float32)


def observation(config: EagleConfig, rows, start, width: int) -> Observation:
    """``rows``: one (tokens, following, features) a row, padded on the right to ``width`` with rubbish."""
    batch, count = len(rows), config.num_aux or 1
    tokens = np.full((batch, width), 3, np.int32)
    following = np.full((batch, width), 5, np.int32)
    features = np.full((batch, width, count, config.target_hidden_size), np.nan, np.float32)
    for b, (t, f, x) in enumerate(rows):
        tokens[b, : len(t)], following[b, : len(t)], features[b, : len(t)] = t, f, x
    return Observation(
        tokens=jnp.asarray(tokens),
        following=jnp.asarray(following),
        start=jnp.asarray(start, jnp.int32),
        count=jnp.asarray([len(t) for t, _, _ in rows], jnp.int32),
        features=jnp.asarray(features),
    )


def greedy_rows(batch: int, vocab: int) -> sampling.RowSampling:
    return sampling.rows([sampling.Sampling(seed=b) for b in range(batch)], vocab)
