"""Which weights are quantised, how well scales are chosen, what smoothing changes and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import hf_export
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_tools import full_forward, lively, tiny_config, tiny_target

from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.load import bind
from eaglejax.drafts.eagle.model import init_eagle
from eaglejax.errors import ConfigError
from eaglejax.models.target import Target
from eaglejax.nn.linear import linear
from eaglejax.pytree import leaf_paths, unflatten
from eaglejax.quant.array import QuantArray
from eaglejax.quant.calibrate import InputRange, Statistics, calibrate, weight_paths
from eaglejax.quant.quantize import quantize_array, quantize_target
from eaglejax.quant.schemes import DEFAULT_EXCLUDE, Plan, as_plan, get_scheme
from eaglejax.quant.smooth import plan_smoothing
from eaglejax.rotation.rotate import rotate_target

TOKENS = np.random.default_rng(7).integers(0, 32, (1, 20))
W8A8, W4A8, W8A16 = get_scheme("w8a8"), get_scheme("w4a8"), get_scheme("w8a16")


def packed_paths(params: Any) -> set[str]:
    leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, QuantArray))[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, x in leaves
        if isinstance(x, QuantArray)
    }


@functools.cache
def statistics() -> Statistics:
    return calibrate(tiny_target(), TOKENS.tolist(), width=20)


def logits(target: Target) -> np.ndarray:
    return np.asarray(full_forward(target.params, target.config, TOKENS)[0])


def test_a_plan_says_which_weights() -> None:
    layers = [f"layers.{i}.{x}" for i in range(2) for x in ("q", "k", "v", "o", "gate", "up", "down")]
    assert packed_paths(quantize_target(tiny_target(), "w8a8").params) == set(layers)
    plan = Plan(W8A8, exclude=("*.q", "layers.1.*"), overrides=(("*.up", W4A8), ("embed", W8A16)))
    found = quantize_target(tiny_target(), plan)
    assert packed_paths(found.params) == {
        "embed",
        "head",
        *(p for p in layers if p[7] == "0" and p[-2:] != ".q"),
    }
    assert found.params["layers"][0]["up"].bits == 4
    assert found.params["embed"].transposed
    assert found.params["layers"][1]["o"] is tiny_target().params["layers"][1]["o"]
    assert (found.quantization, tiny_target().quantization) == ("w8a8+mixed", None)


def test_a_weight_behind_an_online_turn_goes_by_its_own_path() -> None:
    turned = rotate_target(tiny_target(), None, r4=True)
    found = quantize_target(turned, Plan(W8A8, exclude=("layers.0.down",), overrides=(("*.down", W4A8),)))
    first, second = (layer["down"].inner for layer in found.params["layers"])
    assert isinstance(first, jax.Array)
    assert second.bits == 4
    with pytest.raises(ConfigError, match=r"paths such as embed, head, layers.0.down, layers.0.gate"):
        quantize_target(turned, Plan(W8A8, exclude=("*.down.inner",)))


def test_a_looked_up_table_takes_no_activations() -> None:
    plan = Plan(get_scheme("w8a8-static"), exclude=())
    found = quantize_target(tiny_target(), plan, statistics=statistics())
    assert found.params["embed"].activation is None
    assert found.params["head"].activation == "static"
    assert np.isfinite(logits(found)).all()


@pytest.mark.parametrize("name", ["w8a8", "w8a16", "w8a8-static"])
def test_eight_bits_change_little(name: str) -> None:
    want = logits(tiny_target())
    got = logits(quantize_target(tiny_target(), name, statistics=statistics()))
    assert 0 < np.abs(got - want).mean() < 0.1 * np.abs(want).mean()


@pytest.mark.parametrize(("scheme", "least_gain"), [("w4a8", 1.02), ("w4a8-g16", 1.02), ("w8a8", 1.0)])
def test_the_search_finds_scales_with_less_error(scheme: str, least_gain: float) -> None:
    weight = np.random.default_rng(3).standard_t(4, (128, 24)).astype(np.float32)
    minmax, searched = (
        float(jnp.sum((quantize_array(weight, get_scheme(scheme), search=s).dequantize() - weight) ** 2))
        for s in ("minmax", "mse")
    )
    assert minmax >= least_gain * searched


def test_the_search_beats_every_other_scale_it_could_have_taken() -> None:
    weight = np.random.default_rng(5).normal(size=(64, 3)).astype(np.float32)
    found = quantize_array(weight, W4A8, search="mse")
    best = np.full(3, np.inf)
    for ratio in np.linspace(0.4, 1.0, 31):
        scale = np.abs(weight).max(0) / 7 * ratio
        error = ((np.clip(np.round(weight / scale), -8, 7) * scale - weight) ** 2).sum(0)
        best = np.minimum(best, error)
    np.testing.assert_allclose(((np.asarray(found.dequantize()) - weight) ** 2).sum(0), best, rtol=1e-4)


@pytest.mark.parametrize(("scheme", "search"), itertools.product((W8A8, W4A8), ("minmax", "mse")))
def test_columns_of_zeros_and_of_next_to_nothing(scheme: Any, search: Any) -> None:
    weight = np.zeros((8, 4), np.float32)
    weight[:, 1] = 1e-39
    weight[:, 2] = 1e30
    weight[3, 3] = -1.0
    found = quantize_array(weight, scheme, search=search)
    assert np.isfinite(np.asarray(found.scale)).all()
    np.testing.assert_allclose(
        found.dequantize(), np.where(weight == np.float32(1e-39), 0, weight), rtol=1e-5
    )


def test_weights_that_cannot_be_quantised_are_named() -> None:
    weight = np.ones((24, 4), np.float32)
    refused: list[tuple[str, Any, Any]] = [
        (
            r"gate has 24 input rows, which groups of 16 do not divide; a group size of 8 would",
            weight,
            "w4a8-g16",
        ),
        (r"gate has 23 input rows, but 4-bit rows come in pairs", weight[:23], "w4a8"),
        (r"gate has 23 input rows, .* no even group size does", weight[:23], "w8a8-g2"),
        ("gate holds values that are not finite", np.where(weight > 0, np.nan, weight), "w8a8"),
        ("gate holds values that are not finite", np.full((4, 4), np.inf, np.float32), "w4a16"),
        (r"gate is int32 \(24, 4\)", weight.astype(np.int32), "w8a8"),
        (r"gate is float32 \(24,\)", weight[:, 0], "w8a8"),
        ("gate: scheme w8a8-static needs the range of the input", weight, "w8a8-static"),
    ]
    for message, array, scheme in refused:
        with pytest.raises(ConfigError, match=message):
            quantize_array(array, get_scheme(scheme), where="gate")
    with pytest.raises(ConfigError, match="smoothing factors of gate must be 24 positive numbers"):
        quantize_array(weight, W8A8, smooth=np.zeros(24, np.float32), where="gate")
    rows = quantize_array(weight[:23], W8A8)
    assert rows.shape == (23, 4)


def test_plans_that_cannot_be_are_refused() -> None:
    target = tiny_target()
    done = quantize_target(target, "w8a8")
    for message, call in {
        r"'layers.9.q'": lambda: quantize_target(target, Plan(W8A8, exclude=("layers.9.q",))),
        "excludes every weight": lambda: quantize_target(target, Plan(W8A8, exclude=("*",))),
        "is quantised already": lambda: quantize_target(done, "w8a8"),
        "only a GGUF file has integers to keep": lambda: quantize_target(target, "keep"),
        "pass statistics=calibrate": lambda: quantize_target(target, "w8a8-static"),
        "pass statistics": lambda: quantize_target(target, Plan(W8A8, smooth=0.5)),
        "quant 'w3a3' is not known": lambda: quantize_target(target, "w3a3"),
        "quant is 8": lambda: as_plan(8),
        "exclude is 'head'": lambda: Plan(W8A8, exclude="head"),  # type: ignore[arg-type]
        r"exclude is \['head'\]": lambda: Plan(W8A8, exclude=["head"]),  # type: ignore[arg-type]
        "give a tuple of pairs": lambda: Plan(W8A8, overrides=[("*", W8A8)]),  # type: ignore[arg-type]
        "search is 'best'": lambda: Plan(W8A8, search="best"),  # type: ignore[arg-type]
        "smooth is 2": lambda: Plan(W8A8, smooth=2.0),
        "pairs of a glob and a Scheme": lambda: Plan(W8A8, overrides=(("*", "w8a8"),)),  # type: ignore[arg-type]
        "holds nothing for layers.0.down": lambda: quantize_target(
            target, "w8a8-static", statistics=Statistics({}, 1, 1)
        ),
        "holds 3 channels for layers.0.down": lambda: quantize_target(
            target,
            Plan(get_scheme("w8a8-static"), exclude=("*.[qkvo]", "*.gate", "*.up", "head", "embed")),
            statistics=Statistics({"layers.0.down": InputRange(np.zeros(3), np.ones(3))}, 1, 1),
        ),
    }.items():
        with pytest.raises(ConfigError, match=message):
            call()


def outlier_target() -> Target:
    """Three channels of the stream carry large values, as trained models have them, and biases on q, k, v."""
    config = tiny_config(qkv_bias=True)
    params = lively(config, 12)
    for layer in params["layers"]:
        layer["attn_norm"] = layer["attn_norm"].at[jnp.array([2, 5, 11])].set(40.0)
        layer["mlp_norm"] = layer["mlp_norm"].at[jnp.array([1, 5])].set(30.0)
        layer["v_bias"] = layer["v_bias"] + 0.3
        for name in ("q", "k", "v"):
            layer[name] = layer[name].at[jnp.array([2, 5, 11])].divide(40.0)
        for name in ("gate", "up"):
            layer[name] = layer[name].at[jnp.array([1, 5])].divide(30.0)
    return Target(config=config, params=params, dtype=np.dtype("float32"), context=48)


def test_smoothing_moves_outliers_and_nothing_else() -> None:
    target = outlier_target()
    found = calibrate(target, TOKENS.tolist(), width=20)
    plain = quantize_target(target, "w8a8")
    smooth = quantize_target(target, Plan(W8A8, smooth=0.5), statistics=found)
    want = logits(target)
    error, plain_error = (np.abs(logits(t) - want).mean() for t in (smooth, plain))
    assert error < 0.5 * plain_error
    layer, before = smooth.params["layers"][0], target.params["layers"][0]
    # Norms, the columns of v and those of up take all the divisions; none is left for the forward.
    assert all(layer[name].smooth is None for name in ("q", "k", "v", "o", "gate", "up", "down"))
    assert not np.array_equal(layer["attn_norm"], before["attn_norm"])
    assert not np.array_equal(layer["v_bias"], before["v_bias"])


def test_smoothing_divides_at_the_input_where_a_reader_stays_float() -> None:
    target = outlier_target()
    found = calibrate(target, TOKENS.tolist(), width=20)
    plan = Plan(W8A8, exclude=("*.k", "*.up", "embed", "head"), smooth=0.5)
    smooth = quantize_target(target, plan, statistics=found)
    layer = smooth.params["layers"][0]
    assert layer["attn_norm"] is target.params["layers"][0]["attn_norm"]
    for name in ("q", "v", "gate", "down"):
        assert layer[name].smooth is not None
    assert layer["o"].smooth is None  # v's columns take it, as v is quantised
    plain = quantize_target(target, dataclasses.replace(plan, smooth=None))
    want = logits(target)
    assert np.abs(logits(smooth) - want).mean() < 0.7 * np.abs(logits(plain) - want).mean()


@pytest.mark.parametrize("name", ["llama_biased", "gemma3", "qwen3_moe"])
def test_smoothing_alone_changes_no_logit(name: str) -> None:
    """Biases; norms that store w of 1 + w; experts beside a router that stays float, or does not."""
    _, config, params = hf_export.build(name)
    target = Target(config=config, params=params, dtype=np.dtype("float32"), context=config.max_position)
    found = calibrate(target, [TOKENS[0].tolist()], width=20)
    want = logits(target)
    leaves, paths = leaf_paths(params), weight_paths(config, params)
    for exclude in (DEFAULT_EXCLUDE, ("embed", "head"), ("*.k", "*.up", "embed", "head")):
        plan = Plan(W8A8, exclude=exclude, smooth=0.5)
        smoothing = plan_smoothing(leaves, config, plan, found, paths)
        assert smoothing.rows
        changed = {
            path: smoothing.vectors.get(path, smoothing.weight(path, leaf)) for path, leaf in leaves.items()
        }
        moved = [path for path, leaf in leaves.items() if not np.array_equal(changed[path], leaf)]
        assert moved
        turned = dataclasses.replace(target, params=unflatten(params, jax.tree.map(jnp.asarray, changed)))
        np.testing.assert_allclose(logits(turned), want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("tied", [False, True])
def test_a_draft_takes_rows_of_a_quantised_head(tied: bool) -> None:
    config = tiny_config(tie_embeddings=tied)
    target = Target(config=config, params=lively(config, 3), dtype=np.dtype("float32"), context=48)
    packed = quantize_target(target, Plan(W8A8, exclude=()))
    ids = np.array([1, 4, 9, 30], np.int32)
    draft = EagleConfig(
        version=3,
        vocab_size=32,
        draft_vocab_size=4,
        hidden_size=16,
        target_hidden_size=16,
        intermediate_size=16,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        num_aux=1,
        aux=(1,),
        target_rows=True,
    )
    weights = init_eagle(draft, jax.random.key(0))
    params = bind(draft, weights, packed, ids)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16)), jnp.float32)
    whole = packed.params["embed" if tied else "head"]
    np.testing.assert_array_equal(
        linear(x, params.head, transposed=params.tied), linear(x, whole, transposed=tied)[:, ids]
    )
