"""Files and descriptions that do not fit are refused by name, whatever the layout."""

import dataclasses
import json
import shutil

import numpy as np
import packed_targets as tiny
import pytest
from damages import DAMAGES, DESCRIPTION, scaled

from eaglejax.checkpoint.hf import quantized_form
from eaglejax.checkpoint.quantized.read import load_quantized
from eaglejax.checkpoint.quantized.write import write_quantized
from eaglejax.errors import CheckpointError


def build(folder, form, scheme):
    basis = tiny.rotation()
    target = tiny.make_target("llama", tiny.SCHEMES[scheme], basis=basis.id, rotation=basis)
    if form != "compressed-tensors":
        scales = tiny.cache_scales(target.config)
        target = dataclasses.replace(target, cache_format="int8-static", cache_scales=scales)
    write_quantized(target, folder, form=form, config=tiny.raw_config("llama"))
    return folder


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Folders by (layout, scheme), written once."""
    made = {}

    def get(form, scheme):
        if (form, scheme) not in made:
            made[form, scheme] = build(tmp_path_factory.mktemp("made") / "out", form, scheme)
        return made[form, scheme]

    return get


@pytest.fixture
def folder(originals, tmp_path):
    """A copy of a folder of some layout and scheme, to be damaged."""
    return lambda form, scheme: shutil.copytree(originals(form, scheme), tmp_path / "copy")


def refuse(folder, match):
    with pytest.raises(CheckpointError, match=match):
        load_quantized(folder, np.dtype("float32"))


@pytest.mark.parametrize(("form", "case"), DAMAGES)
def test_a_damaged_folder_is_refused_by_name(form, case, folder):
    scheme, damage, match = DAMAGES[form, case]
    found = folder(form, scheme)
    damage(found)
    refuse(found, match)


def test_a_rotation_of_another_size(folder):
    from eaglejax.checkpoint.basis_file import write_basis

    found = folder("modelslim", "w8a8")
    write_basis(found, tiny.rotation(16))
    refuse(found, "rotation of 16 dimensions, the model has 32")


def test_experts_that_differ(tmp_path):
    target = tiny.make_target("qwen3_moe", tiny.SCHEMES["w8a8-static-offset"])
    for form in ("modelslim", "compressed-tensors"):
        found = tmp_path / form
        write_quantized(target, found, form=form, config=tiny.raw_config("qwen3_moe"))
        one = "model.layers.1.mlp.experts.2.down_proj."
        if form == "modelslim":
            loud = {one + "input_scale": np.float32(2), one + "weight_scale": np.float32(0.5)}
            tiny.edit_tensors(found, lambda t, by=loud: t.update({k: t[k] * v for k, v in by.items()}))
        else:
            scaled(one + "input_scale", 2)(found)
        refuse(found, r"layers\.1\.experts\.down: its experts differ")


def test_experts_quantised_in_part(tmp_path):
    target = tiny.make_target("qwen3_moe")
    write_quantized(target, tmp_path / "out", form="modelslim", config=tiny.raw_config("qwen3_moe"))
    one = "model.layers.1.mlp.experts.2.down_proj."

    def plain(t):
        t[one + "weight"] = t.pop(one + "weight").astype(np.float32) * t.pop(one + "weight_scale")
        del t[one + "weight_offset"]

    def label(d):
        d[one + "weight"] = "FLOAT"
        del d[one + "weight_scale"], d[one + "weight_offset"]

    tiny.edit_tensors(tmp_path / "out", plain)
    tiny.edit_json(tmp_path / "out" / DESCRIPTION, label)
    refuse(tmp_path / "out", r"experts\.down is quantised in part: .*experts\.0.*experts\.2")


def test_a_layout_that_is_not_read_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(CheckpointError, match=r"quantised by 'gptq'.*modelslim or compressed-tensors"):
        quantized_form(tmp_path)
