"""Narrow floats with scales are read as the numbers that they stand for, by transformers' own arithmetic."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from published import saved
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from eaglejax.checkpoint.hf import load_folder
from eaglejax.errors import CheckpointError

RNG = np.random.default_rng(8)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 8]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def rewrite(folder: Path, tensors: dict[str, np.ndarray], quantization: dict[str, Any] | None) -> None:
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def fp8(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(tensors in blocks of 16 x 8, the same as floats)."""
    narrow, floats = {}, {}
    for name, value in load_file(folder / "model.safetensors").items():
        if not re.search(r"layers.*(proj|proj_with_mqa)\.weight", name):
            narrow[name] = floats[name] = value
            continue
        scale = RNG.uniform(0.5, 2, [-(-n // b) for n, b in zip(value.shape, (16, 8), strict=True)])
        codes = value.astype(ml_dtypes.float8_e4m3fn)
        narrow[name], narrow[name + "_scale_inv"] = codes, scale.astype(np.float32)
        whole = np.kron(scale.astype(np.float32), np.ones((16, 8), np.float32))
        floats[name] = codes.astype(np.float32) * whole[: value.shape[0], : value.shape[1]]
    return narrow, floats


def mxfp4(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(experts in blocks of 32, the same as floats by transformers)."""
    narrow, floats = {}, {}
    for name, value in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            narrow[name] = floats[name] = value
            continue
        e, rows, out = value.shape
        blocks = RNG.integers(0, 256, (e, out, rows // 32, 16), np.uint8)
        scales = RNG.integers(120, 128, blocks.shape[:3], np.uint8)
        narrow[name + "_blocks"], narrow[name + "_scales"] = blocks, scales
        packed = (torch.tensor(blocks), torch.tensor(scales))
        floats[name] = convert_moe_packed_tensors(*packed, dtype=torch.float32).contiguous().numpy()
    return narrow, floats


CASES = {"deepseek_v3": (fp8, FP8, {}), "gpt_oss": (mxfp4, MXFP4, {"intermediate_size": 64})}


@pytest.mark.parametrize("name", CASES)
def test_narrow_floats_are_the_numbers_that_they_stand_for(name: str, tmp_path: Path) -> None:
    make, quantization, changes = CASES[name]
    saved(name, tmp_path, **changes)
    narrow, floats = make(tmp_path)
    rewrite(tmp_path, floats, None)
    config, want = load_folder(tmp_path, jnp.bfloat16 if name == "gpt_oss" else jnp.float32)
    rewrite(tmp_path, narrow, quantization)
    again, got = load_folder(tmp_path, jnp.bfloat16 if name == "gpt_oss" else jnp.float32)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_scales_that_are_missing_or_do_not_fit_are_refused(tmp_path: Path) -> None:
    saved("deepseek_v3", tmp_path)
    narrow, _ = fp8(tmp_path)
    scale = next(name for name in narrow if name.endswith("_scale_inv"))
    rewrite(tmp_path, narrow | {scale: narrow[scale][:-1]}, FP8)
    with pytest.raises(CheckpointError, match=r"blocks of \(16, 8\) have scales of"):
        load_folder(tmp_path, jnp.float32)
    rewrite(tmp_path, {n: v for n, v in narrow.items() if n != scale}, FP8)
    with pytest.raises(CheckpointError, match="float8_e4m3fn; weights are read as"):
        load_folder(tmp_path, jnp.float32)
    rewrite(tmp_path, narrow, FP8 | {"weight_block_size": None})
    with pytest.raises(CheckpointError, match="weight_block_size of its fp8 weights is None"):
        load_folder(tmp_path, jnp.float32)
