"""Every layout gives back what was written, bit for bit: schemes, families, rotation, cache scales."""

import dataclasses
import warnings

import jax.numpy as jnp
import numpy as np
import packed_targets as tiny
import pytest
from folder_forms import FORMS, write

from eaglejax.checkpoint.hf import load_folder, quantized_form
from eaglejax.checkpoint.quantized.read import load_quantized
from eaglejax.checkpoint.quantized.summary import summary
from eaglejax.checkpoint.quantized.write import write_quantized
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.kv_format import KVFormat, kv_format
from eaglejax.nn.linear import embedding
from eaglejax.rotation.basis import UNKNOWN_ROTATION


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
