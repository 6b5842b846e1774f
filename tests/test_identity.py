"""Descriptions and digests outlive the code: a field that is added with a default changes none of them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.identity import described, digest, model_digest
from eaglejax.models.config import ModelConfig
from eaglejax.models.families import from_hf

GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 512}


def target() -> ModelConfig:
    return from_hf({**GEMMA, "final_logit_softcapping": 30.0})


def draft() -> EagleConfig:
    return EagleConfig(
        version=3,
        vocab_size=64,
        draft_vocab_size=64,
        hidden_size=16,
        target_hidden_size=16,
        intermediate_size=40,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        num_aux=3,
        aux=(1, 2, 4),
        rope=target().rope,
    )


def grown(config, value):
    """The same configuration, of a class that has one field more, whose default is 3."""
    names = [(f.name, f.type) for f in dataclasses.fields(config)]
    field = ("extra", int, dataclasses.field(default=3))
    wider = dataclasses.make_dataclass("Wider", [field], bases=(type(config),), frozen=True)
    return wider(**{name: getattr(config, name) for name, _ in names}, extra=value)


@pytest.mark.parametrize("make", [target, draft])
def test_a_new_field_with_a_default_leaves_every_digest(make):
    config, params = make(), {"w": jnp.arange(600.0)}
    assert described(grown(config, 3)) == described(config)
    assert digest(grown(config, 3), "data") == digest(config, "data")
    assert model_digest(grown(config, 3), params) == model_digest(config, params)
    assert digest(grown(config, 4)) != digest(config)
    assert model_digest(grown(config, 4), params) != model_digest(config, params)


def test_what_is_set_and_what_the_weights_are_is_in_it():
    config, weights = target(), np.arange(600.0, dtype=np.float32)
    other = dataclasses.replace(config, rope=dataclasses.replace(config.rope, theta=5.0))
    assert digest(other) != digest(config)
    found = {
        model_digest(c, {"w": w})
        for c in (config, other)
        for w in (weights, weights + 1, weights.reshape(2, 300), weights.astype(np.float64))
    }
    assert len(found) == 8


def test_digests_are_those_of_this_version():
    """Kept under these names on people's disks."""
    assert digest({"a": (1, 2.5)}, None) == "9b6b414b059e5e3b20e6efc474662acf"


def test_what_has_no_stable_text_is_refused():
    with pytest.raises(TypeError, match="ndarray has no description"):
        described({"a": np.zeros(2)})
