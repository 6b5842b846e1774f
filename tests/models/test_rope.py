"""Rotary kinds against transformers, and the spellings of their settings that configs use."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers as tf
from transformers.models.llama import modeling_llama

from eaglejax.errors import ConfigError
from eaglejax.nn import rope as rope_lib

HEAD_DIM = 16
BASE = {"max_position_embeddings": 64, "hidden_size": 64, "num_attention_heads": 4}
FACTORS = {
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn_no_truncation": {**YARN, "truncate": False, "beta_fast": 4.0, "beta_slow": 2.0},
    "yarn_mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn_attention_factor": {**YARN, "attention_factor": 0.7},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 16, **FACTORS},
    "longrope_factor": {
        "rope_type": "longrope",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        **FACTORS,
    },
}


def hf_rotated(settings, x: np.ndarray) -> np.ndarray:
    """transformers' rotation of x [N, heads, d] at positions 0..N-1, as updated for that length."""
    config = tf.LlamaConfig(**BASE, rope_parameters={"rope_theta": 500.0, **settings})
    q = torch.asarray(x)[None].transpose(1, 2)
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, torch.arange(x.shape[0])[None])
    return modeling_llama.apply_rotary_pos_emb(q, q, cos, sin)[0][0].transpose(0, 1).numpy()


def ours_rotated(settings, x: np.ndarray, context: int | None) -> np.ndarray:
    config = {**BASE, "rope_theta": 500.0, "rope_scaling": settings}
    rope = rope_lib.from_hf(config, context=context)
    return np.asarray(rope_lib.apply_rope(jnp.asarray(x)[None], jnp.arange(x.shape[0])[None], rope))[0]


@pytest.mark.parametrize("length", [12, 64, 100], ids=["short", "published", "beyond"])
@pytest.mark.parametrize("kind", KINDS)
def test_rotation_equals_transformers_for_the_declared_context(kind, length):
    x = np.random.default_rng(0).standard_normal((length, 3, HEAD_DIM)).astype(np.float32)
    want = hf_rotated(KINDS[kind], x)
    np.testing.assert_allclose(ours_rotated(KINDS[kind], x, context=length), want, rtol=0, atol=2e-5)


def test_context_decides_for_every_position_alike():
    """A short prefix of a long context turns as the long one does, so that keys in a cache never go stale."""
    x = np.ones((8, 1, HEAD_DIM), np.float32)
    for kind in ("dynamic", "longrope"):
        short, long = (ours_rotated(KINDS[kind], x, context=c) for c in (8, 128))
        assert not np.allclose(short, long)
        np.testing.assert_array_equal(long[:4], ours_rotated(KINDS[kind], x[:4], context=128))


def test_rotary_fraction_leaves_the_rest_of_a_head_alone():
    rope = rope_lib.from_hf({**BASE, "partial_rotary_factor": 0.5})
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, HEAD_DIM)), jnp.float32)
    got = rope_lib.apply_rope(x, jnp.arange(5)[None], rope)
    np.testing.assert_array_equal(got[..., 8:], x[..., 8:])
    np.testing.assert_allclose(
        got[..., :8], rope_lib.apply_rope(x[..., :8], jnp.arange(5)[None], rope_lib.from_hf(BASE))
    )


SPELLINGS = {
    "top_level": {"rope_theta": 5e5},
    "nested": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    "both_equal": {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}},
    "scaling_null": {"rope_theta": 5e5, "rope_scaling": None},
    "old_and_new_type_key": {"rope_theta": 5e5, "rope_scaling": {"type": "default", "rope_type": "default"}},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_theta_is_read_from_every_place(spelling):
    rope = rope_lib.from_hf({**BASE, **SPELLINGS[spelling]})
    assert rope == rope_lib.RopeConfig(theta=5e5, max_position=64)


def test_an_absent_theta_is_the_familys_default():
    assert rope_lib.from_hf(BASE).theta == 10000.0
    assert rope_lib.from_hf(BASE, default_theta=1e6).theta == 1e6


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
def test_scaling_type_is_read_under_both_names(section, key):
    rope = rope_lib.from_hf({**BASE, section: {key: "linear", "factor": 2.0, "rope_theta": 7.0}})
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 7.0)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, ["rope_theta", "500000.0", "10000.0"]),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, ["linear", "yarn"]),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 4.0}},
            ["rope_scaling.factor", "rope_parameters.factor"],
        ),
        ({"rope_scaling": {"rope_type": "ntk"}}, ["ntk", "llama3"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["linear", "factor"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["low_freq_factor"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "object"]),
        ({"rope_scaling": {**YARN, "atention_factor": 0.7}}, ["atention_factor", "did you mean attention"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0}}, ["rope_scaling.alpha"]),
        ({"rope_parameters": {**YARN, "extrapolation_factor": 0.5}}, ["extrapolation_factor", "yarn"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 4}}, ["beta_fast", "linear"]),
        ({"rope_scaling": {"factor": 2.0}}, ["rope_scaling.factor", "default"]),
        ({"rope_scaling": {**KINDS["llama3"], "attention_factor": 0.7}}, ["attention_factor", "llama3"]),
        ({"rope_scaling": {**YARN, "attn_factor": 0.9, "attention_factor": 0.7}}, ["contradicts", "0.7"]),
        ({"rope_scaling": {**YARN, "truncate": "no"}}, ["truncate", "true or false"]),
        ({"rope_scaling": {**YARN, "factor": 10**400}}, ["factor", "number above 0"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention"]),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings, names):
    with pytest.raises(ConfigError) as error:
        rope_lib.from_hf({**BASE, **settings})
    for name in names:
        assert name in str(error.value)


def test_the_other_spelling_of_yarns_factor_is_honoured():
    """vLLM and GGUF files know ``attn_factor``, which multiplies what transformers would compute."""
    usual = rope_lib.frequencies(rope_lib.from_hf({**BASE, "rope_scaling": YARN}), HEAD_DIM)[1]
    assert usual == pytest.approx(1.1386, abs=1e-4)
    for more in ({"attn_factor": 0.878}, {"attn_factor": 0.878, "attention_factor": 0.878 * usual}):
        found = rope_lib.from_hf({**BASE, "rope_scaling": {**YARN, **more}})
        assert rope_lib.frequencies(found, HEAD_DIM)[1] == pytest.approx(0.878 * usual)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_published_settings_that_change_nothing_are_let_be(kind):
    more = {"type": kind, "original_max_position_embeddings": 16, "finetuned": True, "attn_factor": 1.0}
    plain = {**BASE, "rope_scaling": KINDS[kind]}
    assert rope_lib.from_hf({**BASE, "rope_scaling": {**KINDS[kind], **more}}) == rope_lib.from_hf(plain)


def test_longrope_factors_must_fit_the_head():
    rope = rope_lib.from_hf({**BASE, "rope_scaling": KINDS["longrope"]})
    with pytest.raises(ConfigError, match="long_factor has 8 entries"):
        rope_lib.frequencies(rope, 32)


def test_configs_are_hashable_and_distinct():
    ropes = [rope_lib.from_hf({**BASE, "rope_scaling": s}) for s in KINDS.values()]
    assert len(set(ropes)) == len(ropes)
    assert dataclasses.replace(ropes[0], context=128) not in ropes
