"""What training computes at step k is what the proposer computes at depth k + 1, document by document."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import VOCAB
from train_tools import EXPERTS, draft_config, packed

from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.model import EagleParams, init_eagle
from eaglejax.drafts.eagle.unroll import unroll
from eaglejax.nn.visible import Causal, Tree
from eaglejax.train.batch import shift

STEPS = 4
LENGTHS = (9, 7)


@pytest.mark.parametrize("changes", [{}, {"windows": (3,)}, EXPERTS], ids=["full", "window", "experts"])
def test_training_steps_equal_cached_inference_within_packed_documents(changes):
    config = draft_config(**changes)
    weights = jax.tree.map(lambda w: w * 6 if w.ndim > 1 else w, init_eagle(config, jax.random.key(0)))
    embed = jnp.asarray(np.random.default_rng(0).normal(size=(VOCAB, 32)), jnp.float32)
    params = EagleParams(weights, embed=embed)
    batch = packed(*LENGTHS, capacity=20)
    trained = jax.jit(
        lambda b: unroll(
            params,
            config,
            b.aux,
            shift(b.tokens, 1),
            STEPS,
            positions=b.positions,
            documents=b.documents,
        )
    )(batch)
    begin = 0
    for length in LENGTHS:
        tokens = batch.tokens[:, begin : begin + length]
        aux = batch.aux[:, begin : begin + length]
        for root in (0, length - STEPS - 1):
            for k, state in enumerate(cached_chain(params, config, tokens, aux, root)):
                np.testing.assert_allclose(trained[k][0, begin + root], state, rtol=2e-4, atol=2e-5)
        begin += length


def cached_chain(params, config, tokens, aux, root):
    """States of the drafts behind token ``root`` with a cache, one token at a time, the data's tokens fed."""
    cache = eagle_model.init_cache(config, 1, 32, jnp.float32)
    feature = eagle_model.fuse(params, config, aux)
    for t in range(root + 1):
        at = jnp.asarray([[t]])
        state, cache = eagle_model.step(
            params, config, feature[:, t : t + 1], tokens[:, t + 1 : t + 2], at, cache, Causal(), at
        )
        cache = cache.advance(jnp.ones((1,), jnp.int32))
    yield state[0, 0]
    for k in range(1, STEPS):
        written = jnp.arange(root + 1, root + k + 1)[None]
        state, cache = eagle_model.step(
            params,
            config,
            state,
            tokens[:, root + k + 1 : root + k + 2],
            written[:, -1:],
            cache,
            Tree(jnp.ones((1, 1, k), bool)),
            written,
        )
        yield state[0, 0]
