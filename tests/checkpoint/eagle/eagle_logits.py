"""What a draft's files compute, on features that stay the same from form to form."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from eagle_files import (
    FLAT,
    small_target,
)

from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.files.load import bind, read_weights
from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.drafts.eagle.unroll import unroll

target = small_target
TARGET_CONFIG = small_target().config


@functools.lru_cache
def runner(config):
    rng = np.random.default_rng(9)
    features = jnp.asarray(
        rng.normal(size=(1, 5, config.num_aux or 1, config.target_hidden_size)), jnp.float32
    )
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (1, 5)))

    @jax.jit
    def run(params):
        states = unroll(params, config, features, tokens, 2)
        return jnp.stack([eagle_model.logits(params, config, s) for s in states])

    return run


def logits(folder, **options):
    """Logits of two draft steps on fixed features, in the target's vocabulary's order of the draft."""
    file = read_draft(folder, **options)
    config = file.config.fit(TARGET_CONFIG)
    params = bind(config, read_weights(file, jnp.float32), target(), file.ids)
    return np.asarray(runner(config)(params)), config, file


SGLANG = FLAT | {"architectures": ["LlamaForCausalLMEagle3"]}
