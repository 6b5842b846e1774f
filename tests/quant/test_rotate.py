"""A rotated target is the same function of its tokens, in every family, and says in which basis it is."""

from __future__ import annotations

import dataclasses
import functools

import hf_export
import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest

from eaglejax.checkpoint.basis_file import read_basis, write_basis
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.models import decoder
from eaglejax.models.target import Target
from eaglejax.nn.cache import CacheScales
from eaglejax.nn.visible import Causal
from eaglejax.quant.online import HadamardInput
from eaglejax.rotation.rotate import Rotation, product, rotate_target

H = 32
TOKENS = np.random.default_rng(3).integers(1, 48, (2, 10)).astype(np.int32)


@functools.cache
def target(name: str) -> Target:
    config, params = published.case(name)[:2] if name in published.TARGETS else hf_export.build(name)[1:]
    return Target(config=config, params=params, dtype=np.dtype("float32"), context=config.max_position)


def whole(params, config):
    """Logits, every boundary, post-norm state and the keys of layer 0 of one causal forward over TOKENS."""
    b, n = TOKENS.shape
    place = jnp.broadcast_to(jnp.arange(n), (b, n))
    with jax.default_matmul_precision("highest"):
        cache = decoder.init_cache(config, b, n)
        aux = tuple(range(config.num_layers + 1))
        out = decoder.forward(params, config, jnp.asarray(TOKENS), place, cache, Causal(), aux=aux)
        return decoder.unembed(params, config, out.hidden), out.aux, out.hidden, out.cache.layers[0].k


def run(t: Target):
    return [np.asarray(x) for x in whole(t.params, t.config)]


def distance(got, want) -> float:
    return float(np.max(np.abs(got - want)) / np.max(np.abs(want)))


def gamma_of(t: Target) -> np.ndarray:
    return np.asarray(t.params["norm"]) + (1.0 if t.config.norm_offset else 0.0)


# F of the families (40, 24) and head sizes (8, 12) all have Hadamard matrices; so has H = 32.
@pytest.mark.parametrize("name", [*hf_export.FAMILIES, "granite", "qwen2_moe"])
def test_logits_are_the_original_and_features_are_turned(name):
    """Everything at once: norms, R1, R2, R3, R4; random orthogonal, so that no symmetry hides a transpose."""
    plain, rotation = target(name), Rotation("random", H, seed=2)
    turned = rotate_target(plain, rotation, r2=True, r3=True, r4=True)
    q = rotation.matrix().astype(np.float32)
    logits, aux, hidden, keys = run(plain)
    got_logits, got_aux, got_hidden, got_keys = run(turned)
    assert distance(got_logits, logits) < 1e-5
    assert distance(got_aux, aux @ q) < 1e-5, "boundaries are pre-norm: turned, no gamma"
    assert distance(got_hidden, (hidden / gamma_of(plain)) @ q) < 1e-5, "the last feature lost its gamma too"
    assert distance(got_aux, aux) > 0.5
    assert distance(got_keys, keys) > 0.2, "R3 turns what the cache holds"
    assert turned.basis == rotation.basis_id == turned.rotation.id
    assert not turned.config.tie_embeddings
    table = jax.tree.map(
        lambda i: i.shape, decoder.param_table(turned.config), is_leaf=lambda x: hasattr(x, "axes")
    )
    plain_tree = jax.tree.map(
        lambda x: x.shape, turned.params, is_leaf=lambda x: isinstance(x, HadamardInput)
    )
    assert jax.tree.structure(table) == jax.tree.structure(plain_tree)


@pytest.mark.parametrize(
    ("name", "rotation", "parts"),
    [
        ("llama_biased", Rotation("hadamard", H, seed=1), {"r2": False}),
        ("gemma3", Rotation("block", H, block=8), {"r2": False}),
        ("gemma3", Rotation("identity", H), {"r2": False}),
        ("llama_biased", None, {"r2": True}),
        ("qwen3_moe", None, {"r2": False, "r4": True}),
    ],
    ids=["hadamard", "block", "norms-alone", "values-alone", "down-alone"],
)
def test_each_part_alone_keeps_the_logits(name, rotation, parts):
    plain = target(name)
    turned = rotate_target(plain, rotation, **parts)
    logits, aux, hidden, _ = run(plain)
    got_logits, got_aux, got_hidden, _ = run(turned)
    assert distance(got_logits, logits) < 1e-5
    if rotation is None:
        assert turned.basis is None
        assert distance(got_hidden, hidden) < 1e-5
    elif rotation.kind == "identity":
        assert distance(got_aux, aux) < 1e-5, "gamma folded without a turn changes no boundary"
        assert distance(got_hidden, hidden / gamma_of(plain)) < 1e-5
        assert distance(got_hidden, hidden) > 0.05
        assert "post_rotation" not in turned.params


def test_an_embedding_without_a_power_of_two_has_a_hadamard_rotation():
    for size in (12, 28, 896, 640):
        matrix = Rotation("hadamard", size, seed=3).matrix()
        assert np.max(np.abs(matrix @ matrix.T - np.eye(size))) < 1e-6
        assert np.allclose(np.abs(matrix), size**-0.5)


def test_products_are_rounded_once():
    """bf16 weights times an f64 matrix, then bf16: not a bit further from the exact product than rounding."""
    rng = np.random.default_rng(0)
    left = rng.normal(size=(6, 64)).astype(jnp.bfloat16)
    q = Rotation("random", 64).matrix()
    exact = left.astype(np.float64) @ q
    got = np.asarray(product(left, q, jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    assert np.array_equal(got, exact.astype(jnp.bfloat16))


def test_what_cannot_be_rotated_is_refused():
    plain = target("qwen3")
    with pytest.raises(ConfigError, match="rotated already"):
        rotate_target(rotate_target(plain, Rotation("random", H)), Rotation("random", H))
    with pytest.raises(ConfigError, match="rotate first"):
        rotate_target(dataclasses.replace(plain, quantization="w8a8"), Rotation("random", H))
    with pytest.raises(ConfigError, match="does not fit a hidden size of 32"):
        rotate_target(plain, Rotation("random", 16))
    with pytest.raises(ConfigError, match="no rotation"):
        rotate_target(plain, np.eye(H) * 1.1)
    with pytest.raises(ConfigError, match="seed of a rotation is -1"):
        Rotation("random", H, seed=-1)
    with pytest.raises(ConfigError, match="random or a block"):
        Rotation("hadamard", 92)
    with pytest.raises(ConfigError, match="do not divide"):
        Rotation("block", 32, block=12)
    with pytest.raises(ConfigError, match="block size goes with"):
        Rotation("hadamard", 32, block=8)
    with pytest.raises(ConfigError, match="no matrix of order"):
        rotate_target(
            dataclasses.replace(plain, config=dataclasses.replace(plain.config, head_dim=14)), None, r3=True
        )


@pytest.mark.parametrize(
    ("first", "said"),
    [({"r3": True}, "R3"), ({"r4": True}, "R4")],
    ids=["queries-and-keys", "down"],
)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_an_online_rotation_counts_as_one(name, first, said):
    turned = rotate_target(target(name), None, **first)
    for rotation in (None, Rotation("random", H)):
        with pytest.raises(ConfigError, match=rf"is rotated already \({said}\)"):
            rotate_target(turned, rotation, r4=True)


def test_calibrated_scales_of_a_cache_do_not_outlive_a_rotation():
    plain = target("qwen3")
    shape = (plain.config.num_kv_heads, plain.config.head_dim)
    side = (jnp.ones(shape),) * plain.config.num_layers
    static = dataclasses.replace(plain, cache_format="int8-static", cache_scales=CacheScales(k=side, v=side))
    with pytest.raises(ConfigError, match="rotate, then calibrate again"):
        rotate_target(static, None)


def test_the_exported_matrix_comes_back_exactly_and_changes_are_noticed(tmp_path):
    turned = rotate_target(target("gemma3"), Rotation("random", H, seed=5))
    path = write_basis(tmp_path, turned.rotation)
    back = read_basis(path)
    assert back.id == turned.basis
    assert np.array_equal(back.matrix, turned.rotation.matrix)
    assert np.array_equal(back.gamma, gamma_of(target("gemma3")))
    raw = bytearray(path.read_bytes())
    raw[-8] ^= 1  # the last bit of an entry: as good a rotation, but another one
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="was changed"):
        read_basis(path)
