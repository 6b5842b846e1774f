"""Hugging Face folders: every family read back bit for bit, name schemes, tying, and what is refused."""

from __future__ import annotations

import json
import shutil

import hf_export
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eaglejax.checkpoint.hf import load_folder
from eaglejax.checkpoint.safetensors_io import SafetensorsFile
from eaglejax.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def save(name: str, folder, **options):
    model, config, params = hf_export.build(name)
    model.save_pretrained(folder, **options)
    return config, params


def edit(folder, change, file=WEIGHTS):
    """Rewrite a weights file after ``change`` of its dict of tensors."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, folder / file)


def set_config(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, want)


@pytest.mark.parametrize("name", hf_export.FAMILIES)
def test_every_family_is_read_back_bit_for_bit(name, tmp_path):
    want_config, want = save(name, tmp_path)
    config, params = load_folder(tmp_path, jnp.float32)
    assert config == want_config
    assert_same(params, want)


def test_weights_are_rounded_to_the_dtype_asked_for(tmp_path):
    _, want = save("qwen2", tmp_path)
    _, params = load_folder(tmp_path, jnp.bfloat16)
    assert_same(params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), want))


def test_a_bfloat16_file_widens_exactly(tmp_path):
    _, want = save("llama2", tmp_path)
    edit(tmp_path, lambda t: t.update({k: v.to(torch.bfloat16) for k, v in t.items()}))
    _, params = load_folder(tmp_path, jnp.float32)
    assert_same(params, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), want))


@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_shards_are_joined(name, tmp_path):
    _, want = save(name, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(load_folder(tmp_path, jnp.float32)[1], want)


@pytest.mark.parametrize(
    "rename",
    [
        lambda k: k.removeprefix("model."),
        lambda k: "language_model." + k,
        lambda k: k.replace("model.", "model.language_model.", 1),
    ],
    ids=["bare", "inside a multimodal model", "inside, newer"],
)
def test_wrappers_change_names_only(rename, tmp_path):
    _, want = save("gemma3", tmp_path)

    def change(tensors):
        renamed = {rename(k): v for k, v in tensors.items()}
        tensors.clear()
        tensors.update(renamed)
        tensors["vision_tower.embed.weight"] = torch.zeros(2)
        tensors["multi_modal_projector.norm"] = torch.zeros(2)

    edit(tmp_path, change)
    assert_same(load_folder(tmp_path, jnp.float32)[1], want)


def test_a_multimodal_config_gives_its_text_model(tmp_path):
    want_config, want = save("gemma3", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    config, params = load_folder(tmp_path, jnp.float32)
    assert config == want_config
    assert_same(params, want)


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path):
    _, want = save("llama2", tmp_path)
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    edit(tmp_path, lambda t: t.update({name: torch.ones(4)}))
    assert_same(load_folder(tmp_path, jnp.float32)[1], want)


class TestTying:
    def test_tied_with_a_copy_of_the_embedding_as_head(self, tmp_path):
        config, want = save("qwen3", tmp_path)
        edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
        got_config, params = load_folder(tmp_path, jnp.float32)
        assert got_config == config
        assert config.tie_embeddings
        assert_same(params, want)

    def test_a_config_that_claims_tying_falsely_is_overruled_aloud(self, tmp_path):
        config, want = save("qwen2", tmp_path)
        set_config(tmp_path, tie_word_embeddings=True)
        with pytest.warns(UserWarning, match=r"lm_head\.weight differs"):
            got_config, params = load_folder(tmp_path, jnp.float32)
        assert got_config == config
        assert not config.tie_embeddings
        assert_same(params, want)

    def test_untied_without_a_head_is_refused(self, tmp_path):
        save("qwen2", tmp_path)
        edit(tmp_path, lambda t: t.pop("lm_head.weight"))
        with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight.*tie_word_embeddings"):
            load_folder(tmp_path, jnp.float32)


class TestRefusals:
    def refuse(self, folder, match):
        with pytest.raises(CheckpointError, match=match):
            load_folder(folder, jnp.float32)

    def test_a_missing_tensor(self, tmp_path):
        save("llama2", tmp_path)
        edit(tmp_path, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
        self.refuse(tmp_path, r"lacks 1 tensors.*model\.layers\.1\.mlp\.up_proj\.weight")

    def test_a_missing_expert(self, tmp_path):
        save("qwen3_moe", tmp_path)
        edit(tmp_path, lambda t: t.pop("model.layers.2.mlp.experts.3.down_proj.weight"))
        self.refuse(tmp_path, r"lacks 1 tensors.*layers\.2\.mlp\.experts\.3\.down_proj")

    def test_a_tensor_without_use(self, tmp_path):
        save("llama2", tmp_path)
        edit(tmp_path, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}))
        self.refuse(tmp_path, r"no use for: model\.layers\.0\.self_attn\.q_proj\.bias")

    def test_layers_beyond_the_config(self, tmp_path):
        save("llama2", tmp_path)
        set_config(tmp_path, num_hidden_layers=2)
        self.refuse(tmp_path, r"9 tensors.*no use for: model\.layers\.2\..*and 3 more")

    def test_a_tensor_under_two_names(self, tmp_path):
        save("llama2", tmp_path)
        edit(tmp_path, lambda t: t.update({"norm.weight": t["model.norm.weight"].clone()}))
        self.refuse(tmp_path, r"model\.norm\.weight twice")

    def test_a_wrong_shape(self, tmp_path):
        save("llama2", tmp_path)
        name = "model.layers.0.mlp.down_proj.weight"
        edit(tmp_path, lambda t: t.update({name: t[name].T}))
        self.refuse(tmp_path, rf"{name}.*\(40, 32\).*asks for \(32, 40\)")

    def test_integer_weights(self, tmp_path):
        save("llama2", tmp_path)
        edit(tmp_path, lambda t: t.update({k: v.to(torch.int8) for k, v in t.items()}))
        self.refuse(tmp_path, "is int8; weights are read as")

    def test_quantised_weights(self, tmp_path):
        save("llama2", tmp_path)
        set_config(tmp_path, quantization_config={"quant_method": "gptq"})
        self.refuse(tmp_path, "quantised by 'gptq'")

    def test_a_missing_shard(self, tmp_path):
        save("qwen2", tmp_path, max_shard_size="20KB")
        gone = sorted(tmp_path.glob("*.safetensors"))[1]
        gone.unlink()
        self.refuse(tmp_path, rf"lacks {gone.name}")

    def test_an_index_that_names_an_absent_tensor(self, tmp_path):
        save("qwen2", tmp_path, max_shard_size="20KB")
        index = json.loads((tmp_path / INDEX).read_text())
        index["weight_map"]["model.layers.9.extra"] = sorted(index["weight_map"].values())[0]
        (tmp_path / INDEX).write_text(json.dumps(index))
        self.refuse(tmp_path, r"lacks tensor 'model\.layers\.9\.extra'")

    def test_a_shard_without_its_tensor(self, tmp_path):
        save("qwen2", tmp_path, max_shard_size="20KB")
        index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
        edit(tmp_path, lambda t: t.pop("model.norm.weight"), index["model.norm.weight"])
        self.refuse(tmp_path, r"lacks tensor 'model\.norm\.weight'")

    def test_a_tensor_in_two_shards(self, tmp_path):
        save("qwen2", tmp_path, max_shard_size="20KB")
        first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
        name = next(iter(load_file(first)))
        edit(tmp_path, lambda t: t.update({name: load_file(first)[name]}), second.name)
        self.refuse(tmp_path, rf"'{name}' is in both")

    def test_several_files_without_an_index(self, tmp_path):
        save("qwen2", tmp_path, max_shard_size="20KB")
        (tmp_path / INDEX).unlink()
        self.refuse(tmp_path, "but no model.safetensors.index.json")

    @pytest.mark.parametrize("keep", [0, 5, 40, -1])
    def test_a_truncated_file(self, keep, tmp_path):
        save("llama2", tmp_path)
        data = (tmp_path / WEIGHTS).read_bytes()
        (tmp_path / WEIGHTS).write_bytes(data[:keep])
        self.refuse(tmp_path, r"model\.safetensors is truncated")

    def test_a_file_of_another_kind(self, tmp_path):
        save("llama2", tmp_path)
        (tmp_path / WEIGHTS).write_bytes(b"<!DOCTYPE html><html>404</html>")
        self.refuse(tmp_path, "is not a safetensors file")

    @pytest.mark.parametrize(
        "header",
        [
            {"__metadata__": 5},
            {"__metadata__": [1]},
            {"a": 5},
            {"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}},
            {"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}},
            {"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
            {"a": {"dtype": "F32", "shape": [10**30, 0], "data_offsets": [0, 0]}},
            {"a": {"dtype": "F32", "shape": [1], "data_offsets": [10**18, 10**18 + 4]}},
        ],
        ids=str,
    )
    def test_a_header_of_other_types(self, header, tmp_path):
        save("llama2", tmp_path)
        text = json.dumps(header).encode()
        (tmp_path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
        self.refuse(tmp_path, "is damaged|has dtype|is truncated|too many digits")

    @pytest.mark.parametrize(
        ("spans", "text"),
        [
            ({"a": [0, 8], "b": [8, 16]}, None),
            ({"a": [8, 16], "b": [0, 8]}, None),
            ({"a": [4, 12], "b": [12, 20]}, r"'a' begins at byte 4 .* leaves bytes"),
            ({"a": [0, 8], "b": [4, 12]}, r"'b' begins at byte 4 .* overlaps"),
            ({"a": [0, 8], "b": [0, 8]}, r"'b' begins at byte 0 .* overlaps"),
            ({"a": [0, 8], "b": [12, 20]}, r"'b' begins at byte 12 .* leaves bytes"),
            ({"a": [0, 8]}, "end at byte 8 of the data, which has 16"),
        ],
    )
    def test_tensors_follow_one_another(self, spans, text, tmp_path):
        """As the format's own library has it: whatever else would read other bytes as the weights."""
        header = {n: {"dtype": "F32", "shape": [2], "data_offsets": span} for n, span in spans.items()}
        spelt = json.dumps(header).encode()
        path = tmp_path / WEIGHTS
        path.write_bytes(
            len(spelt).to_bytes(8, "little")
            + spelt
            + bytes(range(max(16, *(stop for _, stop in spans.values()))))
        )
        if text is None:
            want = load_file(path)
            assert all(np.array_equal(SafetensorsFile([path]).array(n), want[n]) for n in spans)
            return
        with pytest.raises(CheckpointError, match=text):
            SafetensorsFile([path])
        with pytest.raises(SafetensorError):
            load_file(path)

    @pytest.mark.parametrize("place", [5, "..", "../model.safetensors", ["a"]])
    def test_an_index_names_files_beside_it(self, place, tmp_path):
        save("qwen2", tmp_path, max_shard_size="20KB")
        index = json.loads((tmp_path / INDEX).read_text())
        index["weight_map"][next(iter(index["weight_map"]))] = place
        (tmp_path / INDEX).write_text(json.dumps(index))
        self.refuse(tmp_path, "names what is no file beside it")

    @pytest.mark.parametrize(
        "text",
        [
            b'{"a": ' * 100_000,
            b'{"a":' + b"[" * 65 + b"]" * 65 + b"}",
            b'{"num_hidden_layers": ' + b"9" * 400 + b"}",
            b'{"model_type": "\xff"}',
            b'{"model_type": "llama",}',
            b"[]",
            b"",
        ],
        ids=range(7),
    )
    def test_a_config_is_json_within_bounds(self, text, tmp_path):
        (tmp_path / "config.json").write_bytes(text)
        with pytest.raises(
            CheckpointError, match=r"config\.json (is not (valid|usable) JSON|must hold)"
        ) as caught:
            load_folder(tmp_path, jnp.float32)
        assert len(str(caught.value)) < 500

    def test_no_weights(self, tmp_path):
        save("llama2", tmp_path)
        shutil.move(tmp_path / WEIGHTS, tmp_path / "pytorch_model.bin")
        self.refuse(tmp_path, r"holds no safetensors weights.*pytorch_model\.bin")

    def test_no_config(self, tmp_path):
        self.refuse(tmp_path, r"config\.json is missing")

    def test_a_damaged_config(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "lla')
        self.refuse(tmp_path, r"config\.json is not valid JSON")
