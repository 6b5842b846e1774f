"""What producers write otherwise than we do loads to the same parameters: labels, file names, spellings."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import packed_targets as tiny
import pytest

from eaglejax.checkpoint.hf import load_folder
from eaglejax.checkpoint.quantized.read import load_quantized
from eaglejax.checkpoint.quantized.write import write_quantized
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.naming import known_name
from eaglejax.quant.schemes import SCHEMES, as_plan, get_scheme

DESCRIPTION = "quant_model_description.json"


def section(**settings):
    return lambda folder: tiny.edit_json(
        folder / "config.json", lambda c: c["quantization_config"].update(settings)
    )


def described(change):
    return lambda folder: tiny.edit_json(folder / DESCRIPTION, change)


def renamed(old, new):
    """Give files another name, also in the index that names them."""

    def change(folder):
        for path in list(folder.glob(f"{old}*")):
            if path.name.endswith(".index.json"):
                path.write_text(path.read_text().replace(old, new))
            path.rename(path.with_name(path.name.replace(old, new)))

    return change


def spelt(old, new):
    """Give the types of a description another spelling."""
    return described(lambda d: d.update({k: new for k, v in d.items() if v == old}))


def group(part, drop=(), **settings):
    """Change one part of the only group of a quantization_config."""

    def change(config):
        (found,) = config["quantization_config"]["config_groups"].values()
        place = found if part is None else found[part]
        place |= settings
        for key in drop:
            del place[key]

    return lambda folder: tiny.edit_json(folder / "config.json", change)


def every(*changes):
    def change(folder):
        for one in changes:
            one(folder)

    return change


def older_key(config):
    config["compression_config"] = config.pop("quantization_config")


def wrapped(tensors):
    """Names as a multimodal model has them."""
    for name in list(tensors):
        tensors[f"language_model.{name}"] = tensors.pop(name)


CHANGES = {
    "status in capitals": ("compressed-tensors", "w8a8", section(quantization_status="COMPRESSED")),
    "nothing to transform": ("compressed-tensors", "w8a8", section(transform_config={"config_groups": {}})),
    "sparsity of none": ("compressed-tensors", "w8a8", section(sparsity_config={"format": "Dense"})),
    "no format: whole bytes": (
        "compressed-tensors",
        "w8a8",
        every(section(format=None), group(None, format=None)),
    ),
    "no format: packed": (
        "compressed-tensors",
        "w4a16-g16",
        every(section(format=None), group(None, drop=["format"])),
    ),
    "defaults left out": (
        "compressed-tensors",
        "w8a8",
        every(
            group("weights", drop=["type", "num_bits", "symmetric", "strategy"], group_size=-1),
            group("input_activations", drop=["type", "num_bits", "symmetric", "strategy"]),
        ),
    ),
    "strategy by group size": ("compressed-tensors", "w4a16-g16", group("weights", strategy=None)),
    "order of columns that leaves no trace": (
        "compressed-tensors",
        "w4a16-g16",
        group("weights", actorder="weight"),
    ),
    "settings under the older key": (
        "compressed-tensors",
        "w8a8",
        lambda folder: tiny.edit_json(folder / "config.json", older_key),
    ),
    "expressions for wrapped names": (
        "compressed-tensors",
        "w8a8",
        every(
            lambda folder: tiny.edit_tensors(folder, wrapped),
            section(ignore=["re:^language_model\\.lm_head"]),
            group(None, targets=["re:^language_model\\.model\\.layers\\..*_proj$"]),
        ),
    ),
    "cache type in small letters": (
        "modelslim",
        "w8a8",
        described(lambda d: d.update(kv_cache_type="c8", kv_quant_type="c8")),
    ),
    "status frozen": ("compressed-tensors", "w8a8", section(quantization_status="frozen")),
    "dense": ("compressed-tensors", "w8a8", section(sparsity_config={"format": "dense", "targets": []})),
    "other ignored modules": (
        "compressed-tensors",
        "w8a8",
        section(ignore=["lm_head", "embed_tokens", "model.norm", "model.layers.0.input_layernorm"]),
    ),
    "ignored blocks and classes": (
        "compressed-tensors",
        "w8a8",
        section(ignore=["lm_head", "model.embed_tokens", "Embedding", "LlamaRMSNorm", "re:.*norm"]),
    ),
    "older format name": ("compressed-tensors", "w8a8", section(format="naive-quantized")),
    "types in small letters": ("modelslim", "w8a8", spelt("W8A8_DYNAMIC", "w8a8-dynamic")),
    "types of layers": ("modelslim", "w8a8", spelt("W8A8_DYNAMIC", "W8A8-Linear")),
    "static types of layers": ("modelslim", "w8a8-static", spelt("W8A8", "W8A8-Linear")),
    "description of an older name": (
        "modelslim",
        "w8a8",
        renamed("quant_model_description", "quant_model_description_w8a8_dynamic"),
    ),
    "weights of an older name": (
        "modelslim",
        "w8a8",
        renamed("quant_model_weights", "quant_model_weight_w8a8_dynamic"),
    ),
    "weights of the plain name": ("modelslim", "w8a8", renamed("quant_model_weights", "model")),
}


@pytest.mark.filterwarnings("ignore:.*is taken for it")
@pytest.mark.parametrize("case", CHANGES)
def test_what_is_written_otherwise_is_the_same_model(case, tmp_path):
    form, scheme, change = CHANGES[case]
    target = tiny.make_target("llama", tiny.SCHEMES[scheme])
    write_quantized(target, tmp_path / "out", form=form, config=tiny.raw_config("llama"))
    want = load_quantized(tmp_path / "out", np.dtype("float32"))
    change(tmp_path / "out")
    got = load_quantized(tmp_path / "out", np.dtype("float32"))
    assert dataclasses.replace(got, params=None) == dataclasses.replace(want, params=None)
    jax.tree.map(np.testing.assert_array_equal, got.params, want.params)


def test_a_description_of_another_name_is_said_and_two_are_refused(tmp_path):
    target = tiny.make_target("llama", tiny.SCHEMES["w8a8"])
    write_quantized(target, tmp_path / "out", form="modelslim", config=tiny.raw_config("llama"))
    described_ = tmp_path / "out" / DESCRIPTION
    described_.rename(described_.with_name("quant_model_description_w8a8.json"))
    with pytest.warns(UserWarning, match=r"quant_model_description_w8a8\.json is taken for it"):
        load_quantized(tmp_path / "out", np.dtype("float32"))
    (tmp_path / "out" / "quant_description.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"quant_description\.json, quant_model_description_w8a8\.json"):
        load_quantized(tmp_path / "out", np.dtype("float32"))


@pytest.mark.parametrize(
    ("written", "meant"),
    [("W8A8", "w8a8"), ("w8a8_static", "w8a8-static"), ("W8A8-Linear", "w8a8"), ("W8A8_DYNAMIC", "w8a8")],
)
def test_schemes_are_matched_whatever_the_case_and_hyphens(written, meant):
    assert get_scheme(written) == SCHEMES[meant]
    assert as_plan(written) == as_plan(meant)


def test_groups_and_kept_blocks_too():
    assert get_scheme("W4A8-G32") == get_scheme("w4a8-g32")
    assert as_plan("W4A16_g32") == as_plan("w4a16-g32")
    assert as_plan("KEEP_A8") == as_plan("keep-a8")
    for unknown in ("w2a2", "", "w4a8-gg"):
        with pytest.raises(ConfigError, match="not known"):
            as_plan(unknown)


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_other_tools_descriptions_beside_plain_settings_are_named(name, tmp_path):
    """modelopt, AutoGPTQ and AutoAWQ leave config.json alone."""
    target = tiny.make_target("llama", tiny.SCHEMES["w8a8"])
    write_quantized(target, tmp_path / "out", form="compressed-tensors", config=tiny.raw_config("llama"))
    tiny.edit_json(tmp_path / "out" / "config.json", lambda c: c.pop("quantization_config"))
    with pytest.raises(CheckpointError, match=r"holds quantised weights \(model\.layers.*weight_scale\)"):
        load_folder(tmp_path / "out", np.dtype("float32"))
    (tmp_path / "out" / name).write_text("{}")
    with pytest.raises(CheckpointError, match=f"quantised as {name} describes"):
        load_folder(tmp_path / "out", np.dtype("float32"))


def test_an_exact_name_wins_over_a_spelling():
    assert known_name("a-b", ("ab", "a-b")) == "a-b"
    assert known_name("EAGLE-3", ("eagle1", "eagle3")) == "eagle3"
    assert known_name("suffix", ("ngram",), {"Suffix_": "ngram"}) == "ngram"
    assert known_name("eagle4", ("eagle1", "eagle3")) is None
