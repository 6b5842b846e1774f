"""Quantised folders are those that other tools write and read."""

import itertools
import json

import numpy as np
import packed_targets as tiny
import pytest
from folder_forms import FORMS, write
from safetensors.numpy import load_file

from eaglejax.checkpoint.quantized.compressed_tensors.patterns import compiled
from eaglejax.checkpoint.quantized.compressed_tensors.tensors import pack_words, unpack_words
from eaglejax.checkpoint.quantized.modelslim.layout import pack_channels, unpack_channels
from eaglejax.checkpoint.quantized.read import load_quantized


class TestPublishedLayouts:
    """Names, shapes and values as the tools that made these layouts write them, worked out by hand."""

    def tensors(self, folder):
        return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}

    def test_modelslim_dynamic_8_bits(self, tmp_path):
        target = tiny.make_target("qwen2", seed=1)
        folder = write(target, tmp_path / "out", "modelslim")
        names = sorted(p.name for p in folder.iterdir())
        assert names == [
            "config.json",
            "quant_model_description.json",
            "quant_model_weights-00001-of-00001.safetensors",
            "quant_model_weights.safetensors.index.json",
        ]
        description = json.loads((folder / "quant_model_description.json").read_text())
        tensors, at = self.tensors(folder), "model.layers.1.mlp.down_proj."
        assert description["model_quant_type"] == "W8A8_DYNAMIC"
        assert description["version"] == "1.0.0"
        for suffix in ("weight", "weight_scale", "weight_offset"):
            assert description[at + suffix] == "W8A8_DYNAMIC"
        assert description["model.layers.1.self_attn.q_proj.bias"] == "FLOAT"
        assert description["model.embed_tokens.weight"] == "FLOAT"
        array = target.params["layers"][1]["down"]
        np.testing.assert_array_equal(tensors[at + "weight"], np.asarray(array.values).T)
        np.testing.assert_array_equal(tensors[at + "weight_scale"], np.asarray(array.scale)[:, None])
        assert tensors[at + "weight_offset"].shape == (32, 1)
        assert "quantization_config" not in json.loads((folder / "config.json").read_text())

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_modelslim_static_8_bits(self, dtype, tmp_path):
        target = tiny.make_target("qwen2", tiny.SCHEMES["w8a8-static-offset"], dtype=dtype)
        folder = write(target, tmp_path / "out", "modelslim")
        layer = target.params["layers"][0]
        array, at = layer["q"], "model.layers.0.self_attn.q_proj."
        (shard,) = folder.glob("*.safetensors")
        from safetensors import safe_open

        with safe_open(shard, "np") as file:
            names = ("weight", "deq_scale", "quant_bias", "input_scale", "input_offset")
            weight, deq, bias, scale, offset = (file.get_tensor(at + name) for name in names)
        assert (scale.shape, offset.shape, bias.dtype) == ((1,), (1,), np.int32)
        if dtype == "bfloat16":
            assert deq.dtype == np.float32
        else:
            deq = deq.astype(np.uint32).view(np.float32)
        # What the layout's product means: (x_q . w_q + quant_bias) * deq_scale.
        x = np.random.default_rng(3).normal(0, 0.5, (5, 32)).astype(np.float32)
        x_q = np.clip(np.round(x / scale + offset), -128, 127)
        theirs = (x_q @ weight.T.astype(np.float64) + bias) * deq
        seen = (x_q - float(array.input_offset)) * float(array.input_scale)
        ours = seen @ np.asarray(array.dequantize()) + np.asarray(layer["q_bias"], np.float32)
        np.testing.assert_allclose(ours, theirs, atol=np.max(deq))

    @pytest.mark.parametrize("scheme", ["w4a8", "w4a8-g8"])
    def test_modelslim_4_bits(self, scheme, tmp_path):
        target = tiny.make_target("qwen2", tiny.SCHEMES[scheme])
        tensors = self.tensors(write(target, tmp_path / "out", "modelslim"))
        array, at = target.params["layers"][0]["down"], "model.layers.0.mlp.down_proj."
        matrix = np.asarray(array.dequantize()).T
        packed = tensors[at + "weight"]
        assert packed.shape == (16, 48)
        integers = np.asarray(array.integers()).T
        for byte, even, odd in zip(
            packed.ravel(), integers[0::2].ravel(), integers[1::2].ravel(), strict=True
        ):
            assert int(byte) & 15 == int(even) & 15
            assert (int(byte) >> 4) & 15 == int(odd) & 15
        # Sixteen devices may split the input of a down projection, 3 channels each.
        sums = 8 * matrix.reshape(32, 16, 3).sum(-1)
        np.testing.assert_allclose(tensors[at + "scale_bias"], sums, rtol=1e-4, atol=1e-5)
        gate = "model.layers.0.mlp.gate_proj.scale_bias"
        assert tensors[gate].shape == (48, 1)
        if scheme == "w4a8-g8":
            levels = [tensors[at + n] for n in ("weight_scale", "weight_scale_second")]
            assert [level.shape for level in levels] == [(32, 1), (32, 6)]
            np.testing.assert_array_equal(levels[0] * levels[1], np.asarray(array.scale).T)

    def test_modelslim_files_of_before_4_bits_were_packed(self, tmp_path):
        target = tiny.make_target("mistral", tiny.SCHEMES["w4a8-g8"])
        folder = write(target, tmp_path / "out", "modelslim")

        def unpack(tensors):
            for name in list(tensors):
                if name.endswith("scale_bias"):
                    del tensors[name]
                elif name.endswith("_proj.weight"):
                    tensors[name] = unpack_channels(tensors[name])

        tiny.edit_tensors(folder, unpack)

        def older(value):
            del value["version"]
            for key in [k for k in value if k.endswith("scale_bias")]:
                del value[key]

        tiny.edit_json(folder / "quant_model_description.json", older)
        tiny.assert_same(load_quantized(folder, target.dtype).params, target.params)

    def test_modelslim_static_files_need_no_weight_scale(self, tmp_path):
        target = tiny.make_target("mistral", tiny.SCHEMES["w8a8-static-offset"])
        folder = write(target, tmp_path / "out", "modelslim")
        gone = lambda name: name.endswith(("weight_scale", "weight_offset"))  # noqa: E731
        tiny.edit_tensors(folder, lambda t: [t.pop(k) for k in list(t) if gone(k)])
        tiny.edit_json(
            folder / "quant_model_description.json", lambda d: [d.pop(k) for k in list(d) if gone(k)]
        )
        found = load_quantized(folder, target.dtype).params["layers"][0]["up"]
        want = target.params["layers"][0]["up"]
        np.testing.assert_array_equal(found.values, want.values)
        np.testing.assert_allclose(found.scale, want.scale, rtol=1e-6)
        assert found.input_offset == want.input_offset

    def test_compressed_tensors_of_4_bits(self, tmp_path):
        target = tiny.make_target("qwen3", tiny.SCHEMES["w4a16-g16"])
        folder = write(target, tmp_path / "out", "compressed-tensors")
        tensors, at = self.tensors(folder), "model.layers.1.mlp.up_proj."
        array = target.params["layers"][1]["up"]
        integers, words = np.asarray(array.integers()).T, tensors[at + "weight_packed"]
        assert (words.dtype, words.shape) == (np.int32, (48, 4))
        for row, column in itertools.product(range(48), range(32)):
            word = int(np.uint32(words[row, column // 8]))
            assert (word >> (4 * (column % 8))) & 15 == integers[row, column] + 8
        np.testing.assert_array_equal(tensors[at + "weight_shape"], [48, 32])
        np.testing.assert_array_equal(tensors[at + "weight_scale"], np.asarray(array.scale).T)
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        weights = config["config_groups"]["group_0"]["weights"]
        assert (weights["num_bits"], weights["strategy"], weights["group_size"]) == (4, "group", 16)
        assert (config["format"], config["ignore"]) == ("pack-quantized", ["lm_head"])

    def test_compressed_tensors_groups_by_expression(self, tmp_path):
        target = tiny.make_target("mistral")
        folder = write(target, tmp_path / "out", "compressed-tensors")

        def change(config):
            section = config["quantization_config"]
            section["config_groups"]["group_0"]["targets"] = [r"re:.*self_attn.*", r"re:.*mlp\..*"]
            section["ignore"] = ["re:.*lm_head"]

        tiny.edit_json(folder / "config.json", change)
        tiny.assert_same(load_quantized(folder, target.dtype).params, target.params)

    def test_names_may_be_those_of_a_multimodal_model(self, tmp_path):
        target = tiny.make_target("gemma3_text")
        for form in FORMS[1:]:
            folder = write(target, tmp_path / form, form)
            rename = lambda name: name.replace("model.", "model.language_model.", 1)  # noqa: E731

            def change(tensors, rename=rename):
                renamed = {rename(k): v for k, v in tensors.items()}
                tensors.clear()
                tensors.update(renamed)

            tiny.edit_tensors(folder, change)
            if form == "modelslim":
                tiny.edit_json(folder / "quant_model_description.json", change)
            tiny.assert_same(load_quantized(folder, target.dtype).params, target.params)


@pytest.mark.parametrize(
    "pattern",
    [
        *(r".*self_attn.*", r".*mlp.gate$", r"^(?!.*mlp).*q_proj", r".*\.layers\.\d+\.(.*)_proj"),
        *(r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj", r"(model\.)?lm_head"),
    ],
)
def test_expressions_that_tools_write_are_compiled(pattern):
    assert compiled(pattern).pattern == pattern


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"(.*)*x", "repeats what can be matched in several ways"),
        (r"(a|a)*b", "repeats what"),
        (r"(\w+\.?)+!", "repeats what"),
        (r"(a{0,40}){0,40}b", "repeats what"),
        ("a?" * 40 + "b", "too many ways"),
        (".*" * 20 + "b", "too many ways"),
        (r"(a)\1", "refers to a group"),
        ("a" * 2000, "longer than 1000"),
    ],
)
def test_expressions_that_may_not_end_are_refused(pattern, why):
    with pytest.raises(ValueError, match=why):
        compiled(pattern)


class TestPacking:
    def test_channels(self):
        values = np.arange(-8, 8, dtype=np.int8).reshape(4, 4)
        np.testing.assert_array_equal(unpack_channels(pack_channels(values)), values)

    @pytest.mark.parametrize(("bits", "width"), [(4, 16), (4, 13), (8, 8), (8, 7)])
    def test_words(self, bits, width):
        half = 1 << (bits - 1)
        values = np.random.default_rng(0).integers(-half, half, (3, width)).astype(np.int8)
        packed = pack_words(values, bits)
        assert packed.shape == (3, -(-width * bits // 32))
        np.testing.assert_array_equal(unpack_words(packed, bits, width), values)
