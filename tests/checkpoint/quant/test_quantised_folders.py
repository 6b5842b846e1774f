"""Every layout gives back what was written, bit for bit: schemes, families, rotation, cache scales."""

import dataclasses
import itertools
import json
import warnings

import jax.numpy as jnp
import numpy as np
import packed_targets as tiny
import pytest
from safetensors.numpy import load_file

from eaglejax.checkpoint.hf import load_folder, quantized_form
from eaglejax.checkpoint.quantized.compressed_tensors.tensors import pack_words, unpack_words
from eaglejax.checkpoint.quantized.modelslim.layout import pack_channels, unpack_channels
from eaglejax.checkpoint.quantized.read import load_quantized
from eaglejax.checkpoint.quantized.summary import summary
from eaglejax.checkpoint.quantized.write import write_quantized
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.kv_format import KVFormat, kv_format
from eaglejax.nn.linear import embedding
from eaglejax.rotation.basis import UNKNOWN_ROTATION

FORMS = ("eaglejax", "modelslim", "compressed-tensors")


def write(target, folder, form, **options):
    write_quantized(target, folder, form=form, config=tiny.raw_config(target.config.family), **options)
    return folder


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scheme", tiny.SCHEMES)
def test_every_scheme_comes_back(form, scheme, tmp_path):
    # Experts in half of the cases, a tied head and biases in the other.
    family = "qwen3_moe" if scheme in ("w8a8", "w4a8-g8", "w4a16-g16", "w8a8-static") else "qwen2"
    target = tiny.make_target(family, tiny.SCHEMES[scheme])
    folder = write(target, tmp_path / "out", form)
    assert quantized_form(folder) == form
    found = load_quantized(folder, target.dtype)
    tiny.assert_same(found.params, target.params)
    assert found.config == target.config
    assert (found.basis, found.rotation, found.cache_format, found.cache_scales) == (None,) * 4
    label = scheme.removesuffix("-offset")
    assert found.quantization == ("w8a8" if form == "eaglejax" else label)
    assert list(summary(folder)["schemes"]) == [label]


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("form", FORMS)
def test_every_family_comes_back(family, form, tmp_path):
    target = tiny.make_target(family, tiny.SCHEMES["w4a8"], dtype="bfloat16")
    folder = write(target, tmp_path / "out", form)
    found = load_quantized(folder, target.dtype)
    tiny.assert_same(found.params, target.params)
    assert found.config == target.config
    with pytest.raises(CheckpointError, match=f"quantised weights \\({form}\\)"):
        load_folder(folder, target.dtype)


def mixed(path):
    """8 bits for attention, 4 in groups for experts and other layers, floats for one layer's o."""
    name = path.rpartition(".")[2]
    if name in ("q", "k", "v"):
        return tiny.SCHEMES["w8a8"]
    return tiny.SCHEMES["w4a8-g8"] if name in tiny.MATRICES and path != "layers.1.o" else None


@pytest.mark.parametrize("form", FORMS)
def test_schemes_may_differ_between_weights_and_files_be_many(form, tmp_path):
    target = tiny.make_target("qwen3_moe", scheme_of=mixed)
    folder = write(target, tmp_path / "out", form, shard_bytes=4000)
    assert len(list(folder.glob("*.safetensors"))) > 4
    found = load_quantized(folder, target.dtype)
    tiny.assert_same(found.params, target.params)
    told = summary(folder)
    # 3 attention matrices in 2 layers; one o, one dense MLP of 3, 4 experts of 3.
    assert told["schemes"] == {"w8a8": 6, "w4a8-g8": 1 + 3 + 12}
    assert told["plain"] == {"embed": 1, "head": 1, "layers.*.o": 1, "layers.*.router": 1}
    assert told["kinds"]["layers.*.experts.down"] == {"w4a8-g8": 4}


@pytest.mark.parametrize("form", FORMS[:2])
def test_embeddings_and_heads_may_be_quantised_too(form, tmp_path):
    target = tiny.make_target("qwen2", scheme_of=lambda path: tiny.SCHEMES["w8a8"])
    found = load_quantized(write(target, tmp_path / "out", form), target.dtype)
    tiny.assert_same(found.params, target.params)
    with pytest.raises(ConfigError, match="no quantised embedding"):
        write(target, tmp_path / "no", "compressed-tensors")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("form", FORMS[:2])
def test_a_quantised_embedding_gives_rows_of_the_dtype_asked_for(form, tmp_path):
    target = tiny.make_target("qwen2", scheme_of=lambda path: tiny.SCHEMES["w8a8"], dtype="bfloat16")
    found = load_quantized(write(target, tmp_path / "out", form), np.dtype("float32"))
    assert embedding(found.params["embed"], jnp.arange(3)).dtype == jnp.float32
    assert found.params["layers"][0]["q"].dtype == np.dtype("float32")


def test_a_plain_weight_behind_an_online_turn_takes_the_dtype_asked_for(tmp_path):
    plain = tiny.make_target(
        "llama",
        scheme_of=lambda path: None if path.endswith(".down") else tiny.SCHEMES["w8a8"],
        dtype="bfloat16",
    )
    target = tiny.wrap_down(plain)
    found = load_quantized(write(target, tmp_path / "out", "eaglejax"), np.dtype("float32"))
    down = found.params["layers"][0]["down"]
    assert down.dtype == jnp.float32
    np.testing.assert_array_equal(down.inner, plain.params["layers"][0]["down"].astype(jnp.float32))


def test_a_bias_may_be_given_the_type_of_its_matrix(tmp_path):
    """Versions of the tool differ in that."""
    target = tiny.make_target("llama", tiny.SCHEMES["w8a8-static-offset"])
    folder = write(target, tmp_path / "out", "modelslim")
    bias = "model.layers.0.self_attn.q_proj.bias"
    for name in ("W8A8", "FLOAT"):
        tiny.edit_json(folder / "quant_model_description.json", lambda d, name=name: d.update({bias: name}))
        tiny.assert_same(load_quantized(folder, target.dtype).params, target.params)


def test_towers_that_are_not_read_may_be_ignored_by_name(tmp_path):
    """As recipes spell it out for multimodal models, whose vision stays as it was."""
    target = tiny.make_target("gemma3_text")
    raw = {"model_type": "gemma3", "text_config": tiny.raw_config("gemma3_text")}
    folder = tmp_path / "out"
    write_quantized(target, folder, form="compressed-tensors", config=raw)
    tower = "vision_tower.vision_model.encoder.layers.0.mlp.fc1"
    tiny.edit_tensors(folder, lambda t: t.update({f"{tower}.weight": np.ones((2, 2), np.float32)}))
    tiny.edit_json(folder / "config.json", lambda c: c["quantization_config"]["ignore"].append(tower))
    tiny.assert_same(load_quantized(folder, target.dtype).params, target.params)
    assert summary(folder)["schemes"] == {"w8a8": 14}


@pytest.mark.parametrize("form", FORMS)
def test_a_rotation_travels_with_the_weights(form, tmp_path):
    basis = tiny.rotation()
    target = tiny.make_target("llama", basis=basis.id, rotation=basis)
    folder = write(target, tmp_path / "out", form)
    found = load_quantized(folder, target.dtype)
    assert found.basis == basis.id
    np.testing.assert_array_equal(found.rotation.matrix, basis.matrix)
    np.testing.assert_array_equal(found.rotation.gamma, basis.gamma)
    told = summary(folder)
    assert (told["basis"], told["rotation"]) == (basis.id, "optional/quarot.safetensors")


@pytest.mark.parametrize("form", FORMS[:2])
def test_a_rotation_that_was_not_exported_is_still_known_of(form, tmp_path):
    target = tiny.make_target("llama", basis=UNKNOWN_ROTATION)
    folder = write(target, tmp_path / "out", form)
    found = load_quantized(folder, target.dtype)
    assert (found.basis, found.rotation) == (UNKNOWN_ROTATION, None)
    assert (summary(folder)["basis"], summary(folder)["rotation"]) == (UNKNOWN_ROTATION, None)
    with pytest.raises(ConfigError, match="rotation whose matrix is not known"):
        write(target, tmp_path / "no", "compressed-tensors")
    for form in FORMS:
        lost = dataclasses.replace(target, basis="0" * 32)
        with pytest.raises(ConfigError, match=r"is in basis 000.*matrix would have to lie beside it"):
            write(lost, tmp_path / "no", form)


@pytest.mark.parametrize("form", FORMS[:2])
def test_cache_scales_travel_with_the_weights(form, tmp_path):
    target = tiny.make_target("qwen2")
    scales = tiny.cache_scales(target.config)
    target = dataclasses.replace(target, cache_format="int8-static", cache_scales=scales)
    folder = write(target, tmp_path / "out", form)
    found = load_quantized(folder, target.dtype)
    assert found.cache_format == summary(folder)["cache"] == "int8-static"
    tiny.assert_same(found.cache_scales, scales)
    with pytest.raises(ConfigError, match="a cache format"):
        write(target, tmp_path / "no", "compressed-tensors")


def test_our_own_form_holds_whatever_a_target_does(tmp_path):
    target = tiny.wrap_down(tiny.make_target("qwen3", tiny.SCHEMES["w4a8"], dtype="bfloat16"))
    layers = [dict(layer) for layer in target.params["layers"]]
    layers[0]["o"] = layers[0]["o"].replace(smooth=jnp.linspace(0.5, 2, 32, dtype=jnp.float32))
    config = dataclasses.replace(target.config, qk_rotation=True)
    target = dataclasses.replace(
        target, config=config, params=target.params | {"layers": layers}, cache_format="fp8"
    )
    folder = write(target, tmp_path / "out", "eaglejax")
    found = load_quantized(folder, target.dtype)
    tiny.assert_same(found.params, target.params)
    assert (found.config, found.cache_format) == (config, "fp8")
    assert summary(folder)["schemes"] == {"w4a8": 14}
    for form in FORMS[1:]:
        with pytest.raises(ConfigError, match=r"R4.*R3.*smooth.*cache format.*--format eaglejax"):
            write(target, tmp_path / form, form)


def test_a_cache_format_keeps_its_seed(tmp_path):
    for n, asked in enumerate((KVFormat("turbo4", seed=3), KVFormat("turbo4"), "rotor3")):
        target = dataclasses.replace(tiny.make_target("qwen2"), cache_format=asked)
        folder = write(target, tmp_path / str(n), "eaglejax")
        found = load_quantized(folder, target.dtype).cache_format
        assert kv_format(found) == kv_format(asked)
        assert summary(folder)["cache"] == ("turbo4, seed 3" if n == 0 else kv_format(asked).name)


@pytest.mark.parametrize("form", FORMS)
def test_cache_scales_and_the_format_that_asks_for_them_go_together(form, tmp_path):
    target = tiny.make_target("qwen2")
    scales = tiny.cache_scales(target.config)
    for asked in (None, "int8"):
        with pytest.raises(ConfigError, match="has scales of an int8-static cache, but asks for"):
            write(dataclasses.replace(target, cache_format=asked, cache_scales=scales), tmp_path / "no", form)
    with pytest.raises(ConfigError, match="asks for an int8-static cache without scales"):
        write(dataclasses.replace(target, cache_format="int8-static"), tmp_path / "no", form)
    if form == "modelslim":
        both = dataclasses.replace(target, cache_format=KVFormat("int8-static"), cache_scales=scales)
        assert load_quantized(write(both, tmp_path / "out", form), target.dtype).cache_format == "int8-static"


def test_one_group_size_is_all_that_a_description_tells(tmp_path):
    """Of 32 input rows one group has the tensors of none, and two sizes have one entry."""
    cases = {
        "groups of several sizes": {"q": tiny.How(group=32), "down": tiny.How(group=16)},
        "as wide as a group of others": {"q": tiny.How(), "gate": tiny.How(group=32)},
    }
    for message, schemes in cases.items():
        choose = {f"layers.{i}.{name}": how for i in range(2) for name, how in schemes.items()}.get
        target = tiny.make_target("llama", scheme_of=choose)
        with pytest.raises(ConfigError, match=message):
            write(target, tmp_path / "no", "modelslim")
        for form in ("eaglejax", "compressed-tensors"):
            found = load_quantized(write(target, tmp_path / f"{form}{message}", form), target.dtype)
            tiny.assert_same(found.params, target.params)


@pytest.mark.parametrize("form", FORMS)
def test_a_head_untied_inside_a_multimodal_config_stays_untied(form, tmp_path):
    """Rotation unties; the language model's own entry must not tie it again."""
    tied = tiny.make_target("gemma3_text")
    head = jnp.asarray(np.random.default_rng(0).normal(size=(32, 40)), jnp.float32)
    target = dataclasses.replace(
        tied,
        config=dataclasses.replace(tied.config, tie_embeddings=False),
        params=tied.params | {"head": head},
    )
    raw = {"model_type": "gemma3", "text_config": tiny.raw_config("gemma3_text")}
    assert raw["text_config"]["tie_word_embeddings"]
    write_quantized(target, tmp_path / "out", form=form, config=raw)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load_quantized(tmp_path / "out", target.dtype)
    tiny.assert_same(found.params, target.params)


def test_plain_weights_take_the_dtype_asked_for(tmp_path):
    target = tiny.make_target("qwen2", dtype="bfloat16")
    found = load_quantized(write(target, tmp_path / "out", "eaglejax"), np.dtype("float32"))
    np.testing.assert_array_equal(found.params["norm"], np.asarray(target.params["norm"], np.float32))
    assert found.params["embed"].dtype == jnp.float32


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


class TestWriting:
    def test_a_folder_that_holds_something_is_left_alone(self, tmp_path):
        target = tiny.make_target("mistral")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes.txt").write_text("mine")
        with pytest.raises(ConfigError, match=r"not empty.*--overwrite"):
            write(target, tmp_path / "out", "eaglejax")
        assert [p.name for p in tmp_path.iterdir()] == ["out"]
        write(target, tmp_path / "out", "eaglejax", overwrite=True)
        assert not (tmp_path / "out" / "notes.txt").exists()
        assert [p.name for p in tmp_path.iterdir()] == ["out"]

    def test_a_failure_leaves_nothing_behind(self, tmp_path, monkeypatch):
        target = tiny.make_target("mistral")

        def full(*args):
            raise OSError("no space left")

        monkeypatch.setattr("eaglejax.checkpoint.quantized.write.write_shards", full)
        with pytest.raises(OSError, match="no space"):
            write(target, tmp_path / "out", "eaglejax")
        assert not list(tmp_path.iterdir())

    def test_what_the_published_layouts_cannot_hold(self, tmp_path):
        plain = tiny.make_target("mistral", scheme_of=lambda path: None)
        for form in FORMS[1:]:
            with pytest.raises(ConfigError, match="without quantised weights"):
                write(plain, tmp_path / "out", form)
        two = {"q": tiny.SCHEMES["w8a8-g16"], "k": tiny.SCHEMES["w4a8-g8"]}
        target = tiny.make_target("mistral", scheme_of=lambda path: two.get(path.rpartition(".")[2]))
        with pytest.raises(ConfigError, match="groups of several sizes"):
            write(target, tmp_path / "out", "modelslim")
        half = tiny.How(activation="static", offset=True)
        target = tiny.make_target("mistral", half)
        layers = [dict(layer) for layer in target.params["layers"]]
        layers[0]["q"] = layers[0]["q"].replace(input_offset=jnp.float32(0.5))
        target = dataclasses.replace(target, params=target.params | {"layers": layers})
        with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.q_proj.*0\.5.*whole"):
            write(target, tmp_path / "out", "compressed-tensors")

    def test_a_target_of_no_file_needs_a_config(self, tmp_path):
        with pytest.raises(ConfigError, match="comes from no file"):
            write_quantized(tiny.make_target("mistral"), tmp_path / "out")
