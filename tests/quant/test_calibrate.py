"""Calibration sees what the linear layers multiply, of real tokens alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_tools import CONTEXT, full_forward, lively, tiny_config, tiny_target

from eaglejax.errors import ConfigError, RequestError
from eaglejax.models.config import LayerSpec
from eaglejax.models.target import Target
from eaglejax.nn.moe import MoeConfig
from eaglejax.nn.norm import rms_norm
from eaglejax.quant.calibrate import Statistics, calibrate
from eaglejax.quant.quantize import quantize_target

PROMPTS = [np.random.default_rng(n).integers(0, 32, size).tolist() for n, size in enumerate((1, 7, 21))]


def widest(found: Statistics) -> dict[str, np.ndarray]:
    return {path: np.stack([range_.low, range_.high]) for path, range_ in found.inputs.items()}


def test_the_ranges_are_those_of_the_uncached_forward() -> None:
    target = tiny_target()
    found = calibrate(target, PROMPTS, width=8)
    assert (found.prompts, found.tokens) == (3, 29)
    rows = []
    for prompt in PROMPTS:
        embedded = target.params["embed"][jnp.asarray(prompt)]
        rows.append(rms_norm(embedded, target.params["layers"][0]["attn_norm"], target.config.norm_eps))
    seen = np.concatenate(rows)
    for name in ("q", "k", "v"):
        np.testing.assert_allclose(found.inputs[f"layers.0.{name}"].low, seen.min(0), rtol=1e-5)
        np.testing.assert_allclose(found.inputs[f"layers.0.{name}"].high, seen.max(0), rtol=1e-5)
    np.testing.assert_array_equal(found.inputs["head"].absmax, np.abs(widest(found)["head"]).max(0))
    assert {path.partition(".")[0] for path in found.inputs} == {"layers", "head"}


def test_chunks_and_what_fills_them_up_change_nothing() -> None:
    config = tiny_config(
        tie_embeddings=True,
        layers=(
            LayerSpec(window=11),
            LayerSpec(moe=MoeConfig(4, 2, 16, scores="softmax", normalize=True)),
        ),
    )
    target = Target(config=config, params=lively(config, 5), dtype=np.dtype("float32"), context=CONTEXT)
    narrow, wide = (widest(calibrate(target, PROMPTS, width=width)) for width in (8, 64))
    assert narrow.keys() == wide.keys()
    assert {"embed", "layers.1.router", "layers.1.experts.down"} <= narrow.keys()
    for path, ranges in narrow.items():
        np.testing.assert_allclose(ranges, wide[path], rtol=1e-4, atol=1e-5, err_msg=path)


def test_more_prompts_only_widen() -> None:
    few, more = (widest(calibrate(tiny_target(), PROMPTS[-n:], width=8)) for n in (1, 2))
    for path, (low, high) in more.items():
        assert (low <= few[path][0]).all()
        assert (high >= few[path][1]).all()


def test_static_scales_hold_the_calibration_texts() -> None:
    """On the texts it was calibrated with, a static scheme clips nothing."""
    target = tiny_target()
    found = calibrate(target, PROMPTS, width=8)
    packed = quantize_target(target, "w8a8-static", statistics=found)
    gate = packed.params["layers"][1]["gate"]
    assert float(gate.input_scale) == pytest.approx(found.inputs["layers.1.gate"].absmax.max() / 127)
    tokens = np.asarray(PROMPTS[2])[None]
    want = np.asarray(full_forward(target.params, target.config, tokens)[0])
    got = np.asarray(full_forward(packed.params, packed.config, tokens)[0])
    assert np.abs(got - want).mean() < 0.1 * np.abs(want).mean()


def test_what_cannot_be_calibrated() -> None:
    target = tiny_target()
    broken = jax.tree.map(lambda x: x, target.params)
    broken["layers"][0]["mlp_norm"] = broken["layers"][0]["mlp_norm"].at[0].set(np.nan)
    cases: list[tuple[type[Exception], str, Any]] = [
        (ConfigError, "there are no prompts", lambda: calibrate(target, [])),
        (ConfigError, "width is 0", lambda: calibrate(target, PROMPTS, width=0)),
        (RequestError, "prompt 1 has 0 tokens", lambda: calibrate(target, [[1], []])),
        (
            RequestError,
            "prompt 0 has 49 tokens; the target takes 1 to 48",
            lambda: calibrate(target, [[1] * 49]),
        ),
        (RequestError, "has ids from 3 to 32", lambda: calibrate(target, [[3, 32]])),
        (ConfigError, "is quantised", lambda: calibrate(quantize_target(target, "w8a8"), PROMPTS)),
        (
            ConfigError,
            "the inputs of 11 layers, head among them, are not finite",
            lambda: calibrate(dataclasses.replace(target, params=broken), PROMPTS, width=8),
        ),
    ]
    for kind, message, call in cases:
        with pytest.raises(kind, match=message):
            call()
