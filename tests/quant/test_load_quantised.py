"""Quantising while loading: a folder as in memory, a GGUF file in its own blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_export
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from tiny_model import write_model

from eaglejax.checkpoint.gguf import load as gguf_models
from eaglejax.checkpoint.quantized.write import write_quantized
from eaglejax.checkpoint.safetensors_io import Pending, write_safetensors
from eaglejax.checkpoint.target import load_target
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.models import decoder
from eaglejax.nn.visible import Causal
from eaglejax.quant.array import QuantArray
from eaglejax.quant.blocks import BlockArray
from eaglejax.quant.quantize import quantize_target
from eaglejax.quant.schemes import DEFAULT_EXCLUDE, Plan, get_scheme


@pytest.fixture(autouse=True)
def own_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted files go to the test's folder; compiled kernels stay where they are."""
    monkeypatch.setattr(gguf_models, "cache_dir", lambda: tmp_path / "cache")


def packed(leaf: Any) -> bool:
    return isinstance(leaf, QuantArray | BlockArray)


def leaves(params: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_flatten_with_path(params, is_leaf=packed)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found}


def values(leaf: Any) -> np.ndarray:
    """The numbers of a leaf in the layout of the parameter table, f32."""
    return np.asarray(leaf.dequantize() if packed(leaf) else leaf, np.float32)


# llama turns the rows of q and k and ties nothing; qwen3moe stacks experts; qwen3 ties the head.
@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", Kind.Q8_0), ("llama", Kind.Q5_1), ("qwen3moe", Kind.Q4_0), ("qwen3", Kind.Q5_0)],
)
def test_blocks_of_a_file_are_kept_to_the_bit(name: str, kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf_export.write(path, name, kind)
    wide = load_target(path, dtype="float32")
    want = leaves(wide.params)
    kept = load_target(path, dtype="float32", quant="keep")
    got = leaves(kept.params)
    assert got.keys() == want.keys()
    assert kept.quantization == "keep+w8a16"
    assert {p for p, leaf in got.items() if packed(leaf)} == {p for p, leaf in want.items() if leaf.ndim > 1}
    for path_, leaf in got.items():
        np.testing.assert_array_equal(values(leaf), values(want[path_]), err_msg=path_)
        if packed(leaf):
            assert (leaf.form.name, leaf.rounded, leaf.transposed) == (kind.name, False, path_ == "embed")
            assert leaf.shape == want[path_].shape
    ids = jnp.asarray([[3, 0], [287, 17]])
    np.testing.assert_array_equal(got["embed"].take(ids), want["embed"][ids])
    tied, some = "head" not in got, np.asarray([5, 280, 5, 31])
    head, rows = (
        got["embed" if tied else "head"].columns(jnp.asarray(some)),
        values(want["embed" if tied else "head"]),
    )
    np.testing.assert_array_equal(values(head), rows[some] if tied else rows[:, some])
    assert kept.nbytes < 0.5 * sum(leaf.nbytes for leaf in want.values())
    # What is computed is computed from the file's numbers, and the next load maps what this one arranged.
    prompt = list(range(3, 23))
    expanded, blocks = (last_logits(target, prompt) for target in (wide, kept))
    np.testing.assert_allclose(blocks, expanded, atol=2e-5 * np.abs(expanded).max())
    again = leaves(load_target(path, quant="keep").params)
    np.testing.assert_array_equal(again["layers.0.q"].data, got["layers.0.q"].data)


def last_logits(target: Any, prompt: list[int]) -> np.ndarray:
    tokens = jnp.asarray([prompt])
    cache = decoder.init_cache(target.config, 1, 32, "float32")
    out = decoder.forward(
        target.params, target.config, tokens, jnp.arange(len(prompt))[None], cache, Causal()
    )
    return np.asarray(decoder.unembed(target.params, target.config, out.hidden[:, -1]))


def test_blocks_that_were_damaged_on_disk_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf_export.write(path, "qwen2", Kind.Q8_0)
    load_target(path, quant="keep")
    (made,) = (tmp_path / "cache").rglob("blocks-*.safetensors")
    write_safetensors(
        made, {"layers.0.q": Pending((1, 64), np.dtype(np.uint8), lambda: np.zeros((1, 64), np.uint8))}
    )
    with pytest.raises(CheckpointError, match=r"blocks-.* does not hold this model; delete it"):
        load_target(path, quant="keep")


def test_what_has_no_form_is_requantised_from_the_files_numbers(tmp_path: Path) -> None:
    def edit(writer: Any, tensors: dict[str, Any]) -> None:
        for key, kind in (("attn_q", Kind.Q5_0), ("ffn_down", Kind.F16), ("ffn_up", Kind.Q4_0)):
            for name in list(tensors):
                if key + ".weight" in name:
                    tensors[name] = (tensors[name][0], kind)

    path = tmp_path / "m.gguf"
    gguf_export.write(path, "qwen2", Kind.Q8_0, edit=edit)
    wide = load_target(path, dtype="float32")
    kept = load_target(path, quant="keep-a8")
    want, layer = wide.params["layers"][0], kept.params["layers"][0]
    for name, form in (("q", "Q5_0"), ("up", "Q4_0"), ("k", "Q8_0")):
        assert (layer[name].form.name, layer[name].rounded, layer[name].dtype.name) == (
            form,
            True,
            "bfloat16",
        )
        np.testing.assert_array_equal(layer[name].dequantize(), want[name])
    direct = quantize_target(wide, "w8a8").params["layers"][0]["down"]
    np.testing.assert_array_equal(layer["down"].values, direct.values)
    np.testing.assert_array_equal(layer["down"].scale, direct.scale)
    with pytest.raises(
        ConfigError, match=r"holds the blocks of a GGUF file, for which the eaglejax form has no place"
    ):
        write_quantized(kept, tmp_path / "out")


def test_excluded_weights_and_float_activations(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf_export.write(path, "qwen3moe", Kind.Q8_0)
    plan = Plan(get_scheme("w4a8"), exclude=(*DEFAULT_EXCLUDE, "*.v"), keep=True)
    params = load_target(path, quant=plan).params
    layer = params["layers"][0]
    assert isinstance(layer["v"], jax.Array)
    assert (layer["q"].form.name, layer["q"].rounded) == ("Q8_0", True)
    # What excludes head and embedding are the errors of their weights, and here they have none.
    assert (layer["router"].rounded, params["head"].rounded) == (False, True)
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
