"""Quantising while loading: a folder as in memory, a GGUF file with its own integers where they fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_export
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from tiny_model import write_model

from eaglejax.checkpoint.gguf import load as gguf_models
from eaglejax.checkpoint.target import load_target
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.quant import DEFAULT_EXCLUDE, Plan, QuantArray, get_scheme, quantize_target


@pytest.fixture(autouse=True)
def own_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted files go to the test's folder; compiled kernels stay where they are."""
    monkeypatch.setattr(gguf_models, "cache_dir", lambda: tmp_path / "cache")


def leaves(params: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, QuantArray))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found}


def values(leaf: Any) -> np.ndarray:
    """The numbers of a leaf in the layout of the parameter table, f32."""
    return np.asarray(leaf.dequantize() if isinstance(leaf, QuantArray) else leaf, np.float32)


# llama turns the rows of q and k and ties nothing; qwen3moe stacks experts; qwen3 ties the head.
@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", Kind.Q8_0), ("llama", Kind.Q4_0), ("qwen3moe", Kind.Q4_0), ("qwen3", Kind.Q8_0)],
)
def test_integers_of_a_file_are_kept_to_the_bit(name: str, kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf_export.write(path, name, kind)
    want = leaves(load_target(path, dtype="float32").params)
    kept = load_target(path, dtype="float32", quant="keep")
    got = leaves(kept.params)
    assert got.keys() == want.keys()
    assert kept.quantization == "keep+w8a16"
    packed = {path for path, leaf in got.items() if isinstance(leaf, QuantArray)}
    assert packed == {path for path, leaf in want.items() if leaf.ndim > 1}
    bits = 8 if kind is Kind.Q8_0 else 4
    for path_, leaf in got.items():
        np.testing.assert_array_equal(values(leaf), values(want[path_]), err_msg=path_)
        if path_ in packed:
            assert (leaf.bits, leaf.activation, leaf.groups) == (bits, None, leaf.rows // 32)
            assert leaf.transposed == (path_ == "embed")
    assert kept.nbytes < 0.5 * sum(leaf.nbytes for leaf in want.values())


def test_what_does_not_fit_is_requantised_from_the_files_numbers(tmp_path: Path) -> None:
    def edit(writer: Any, tensors: dict[str, Any]) -> None:
        for key, kind in (("attn_q", Kind.Q5_0), ("ffn_down", Kind.F16), ("ffn_up", Kind.Q4_0)):
            for name in list(tensors):
                if key + ".weight" in name:
                    tensors[name] = (tensors[name][0], kind)

    path = tmp_path / "m.gguf"
    gguf_export.write(path, "qwen2", Kind.Q8_0, edit=edit)
    wide = load_target(path, dtype="float32")
    want, layer = wide.params["layers"][0], load_target(path, quant="keep-a8").params["layers"][0]
    forms = {
        "q": (8, 1),  # Q5_0: requantised, one scale a column
        "down": (8, 1),  # F16
        "up": (4, 1),  # Q4_0 and
        "k": (8, 1),  # Q8_0: kept, groups of 32 of the 32 rows
    }
    for name, (bits, groups) in forms.items():
        assert (layer[name].bits, layer[name].groups, layer[name].activation) == (bits, groups, "dynamic")
        assert layer[name].dtype == np.dtype("bfloat16")
    for name in ("up", "k"):
        np.testing.assert_array_equal(layer[name].dequantize(), want[name])
        assert layer[name].scale.ndim == 2
    for name in ("q", "down"):
        direct = quantize_target(wide, "w8a8").params["layers"][0][name]
        np.testing.assert_array_equal(layer[name].values, direct.values)
        np.testing.assert_array_equal(layer[name].scale, direct.scale)


def test_excluded_weights_and_float_activations(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf_export.write(path, "qwen3moe", Kind.Q8_0)
    plan = Plan(get_scheme("w4a8"), exclude=(*DEFAULT_EXCLUDE, "*.v"), keep=True)
    params = load_target(path, quant=plan).params
    layer = params["layers"][0]
    assert isinstance(layer["v"], jax.Array)
    assert (layer["q"].bits, layer["q"].activation) == (8, "dynamic")
    assert (layer["router"].activation, params["head"].activation, params["embed"].activation) == (None,) * 3
    plain = load_target(path, quant="w4a8").params
    assert plain["layers"][0]["q"].bits == 4
    assert plain["layers"][0]["experts"]["up"].shape == layer["experts"]["up"].shape
    assert isinstance(plain["head"], jax.Array)


def test_a_folder_is_quantised_like_the_target_in_memory(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    loaded, made = load_target(folder, quant="w4a8-g16"), quantize_target(load_target(folder), "w4a8-g16")
    assert loaded.quantization == made.quantization == "w4a8-g16"
    jax.tree.map(np.testing.assert_array_equal, loaded.params, made.params)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # what dequantising them gives
def test_refusals(tmp_path: Path) -> None:
    folder, path = write_model(tmp_path / "tiny"), tmp_path / "m.gguf"

    def edit(writer: Any, tensors: dict[str, Any]) -> None:
        tensors["blk.0.attn_q.weight"][0][:] = np.inf

    with np.errstate(all="ignore"):
        gguf_export.write(path, "qwen2", Kind.Q8_0, edit=edit)
    with pytest.raises(ConfigError, match="only a GGUF file has integers to keep"):
        load_target(folder, quant="keep")
    with pytest.raises(ConfigError, match=r"quant 'w9' is not known; use one of w8a8, .*keep-a8"):
        load_target(folder, quant="w9")
    with pytest.raises(ConfigError, match="load the target without quant, then quantize_target"):
        load_target(path, quant="w8a8-static")
    with pytest.raises(ConfigError, match=r"no weight of the model matches 'layers.7"):
        load_target(path, quant=Plan(get_scheme("w8a8"), exclude=("layers.7.*",)))
    with pytest.raises(CheckpointError, match=r"'blk.0.attn_q.weight' has block scales that are not finite"):
        load_target(path, quant="keep")
    with pytest.raises(ConfigError, match=r"layers.0.q holds values that are not finite"):
        load_target(path, quant="w8a8")
