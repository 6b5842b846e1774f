"""The bundle a user holds: from a folder, a GGUF file or a configuration; dtypes, context, mismatches."""

from __future__ import annotations

import json
import warnings

import gguf_export
import hf_export
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from eaglejax.checkpoint.sources import resolve
from eaglejax.checkpoint.target import load_target
from eaglejax.devices.adapter import MeshDefaults
from eaglejax.errors import ConfigError, MismatchError, RequestError
from eaglejax.models import decoder
from eaglejax.models.target import random_target
from eaglejax.nn.visible import Causal
from eaglejax.pytree import ArrayInfo, shardings


@pytest.fixture
def gguf_path(tmp_path):
    path = tmp_path / "m.gguf"
    gguf_export.write(path, "qwen2")
    return path


@pytest.fixture
def folder(tmp_path, gguf_path):
    """The same model and tokenizer as a Hugging Face folder."""
    _, model, *_ = gguf_export.build("qwen2")
    model.save_pretrained(tmp_path / "hf")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=load_target(gguf_path).tokenizer.backend,
        eos_token="<|im_end|>",
        bos_token="<|endoftext|>",
        chat_template=gguf_export.TEMPLATE,
    ).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_a_folder_and_a_gguf_file_give_the_same_target(folder, gguf_path):
    a, b = load_target(folder, dtype="float32"), load_target(gguf_path, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, a.params, b.params)
    assert a.tokenizer.hash == b.tokenizer.hash
    messages = [{"role": "user", "content": "hello"}]
    assert a.tokenizer.apply_chat_template(messages) == b.tokenizer.apply_chat_template(messages)
    assert b.eos_ids == b.tokenizer.eos_ids
    assert set(a.eos_ids) <= set(b.eos_ids)
    assert a.context == b.context == 64


def test_a_mesh_divides_weights_as_they_are_read(folder, gguf_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    whole = load_target(gguf_path, dtype="float32")
    for source in (folder, gguf_path):
        parts = load_target(source, dtype="float32", mesh=mesh)
        jax.tree.map(np.testing.assert_array_equal, parts.params, whole.params)
        layer = parts.params["layers"][0]
        specs = {name: tuple(layer[name].sharding.spec) for name in ("q", "o", "down", "attn_norm")}
        assert specs == {
            "q": (None, "model"),
            "o": ("model", None),
            "down": ("model", None),
            "attn_norm": (None,),
        }
        assert tuple(parts.params["embed"].sharding.spec) == ("model", None)
        assert parts.params["embed"].sharding.mesh == mesh
    with pytest.raises(ConfigError, match="leave it out for quantised ones"):
        load_target(gguf_path, quant="w8a8", mesh=mesh)
    with pytest.raises(ConfigError, match="known are data, model"):
        load_target(folder, mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",)))


def test_what_the_devices_do_not_divide_stays_whole():
    experts = ArrayInfo((4, 8, 6), np.float32, ("experts", "embed", "mlp"))
    infos = {
        "a": ArrayInfo((6, 4), np.float32, ("vocab", "embed")),
        "c": experts,
        "b": ArrayInfo((7,), np.float32, ("vocab",)),
    }
    places = shardings(infos, jax.sharding.AbstractMesh((2,), ("model",)), dict(MeshDefaults().rules))
    assert tuple(places["c"].spec) == ("model", None, None)
    assert (tuple(places["a"].spec), tuple(places["b"].spec)) == (("model", None), (None,))


def test_logits_equal_transformers(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    target = load_target(folder, dtype="float32")
    tokens = np.random.default_rng(0).integers(0, 260, (12,))
    want, _ = hf_export.run(model, tokens)
    cache = decoder.init_cache(target.config, 1, 16)
    with jax.default_matmul_precision("highest"):
        out = decoder.forward(
            target.params, target.config, jnp.asarray(tokens[None]), jnp.arange(12)[None], cache, Causal()
        )
        got = decoder.unembed(target.params, target.config, out.hidden)[0]
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_the_default_is_bfloat16(gguf_path):
    target = load_target(gguf_path)
    assert target.dtype == jnp.bfloat16
    assert {leaf.dtype.name for leaf in jax.tree.leaves(target.params)} == {"bfloat16"}
    assert target.nbytes == 2 * sum(leaf.size for leaf in jax.tree.leaves(target.params))
    assert target.name == str(gguf_path)


def test_a_model_without_an_end_is_told_and_can_be_given_one(folder):
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text())
        values |= {"eos_token_id": None, "eos_token": "</unknown>"}
        (folder / name).write_text(json.dumps(values))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.warns(UserWarning, match=r"does not know, '</unknown>': nothing ends turns"):
        assert load_target(folder).eos_ids == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target = load_target(folder, eos="<|im_end|>")
        assert load_target(folder, eos=[target.eos_ids[0]]).eos_ids == target.eos_ids
    assert target.tokenizer.decode(target.eos_ids) == "<|im_end|>"
    assert target.tokenizer.eos_ids == target.eos_ids
    with pytest.raises(ConfigError, match="eos names '</s>'"):
        load_target(folder, eos=["</s>"])


@pytest.mark.parametrize("beside", [False, True])
def test_an_end_that_is_an_id_of_the_model_alone_is_told(folder, beside):
    """An embedding table is often larger than the tokenizer: an id up there is never text."""
    config = json.loads((folder / "config.json").read_text())
    backend = load_target(folder).tokenizer.backend
    unknown = next(i for i in range(config["vocab_size"]) if backend.id_to_token(i) is None)
    known = backend.token_to_id("<|im_end|>")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text()) | {"eos_token_id": None, "eos_token": None}
        (folder / name).write_text(json.dumps(values))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    ends = [unknown, known] if beside else unknown
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    said = f"id {unknown}: " + (f"only id {known} ends" if beside else "nothing ends")
    with pytest.warns(UserWarning, match=said):
        assert load_target(folder).eos_ids == tuple(sorted([known, unknown] if beside else [unknown]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert known in load_target(folder, eos="<|im_end|>").eos_ids
    with pytest.raises(ConfigError, match=f"eos names {unknown}"):
        load_target(folder, eos=unknown)


def test_a_resolved_source_is_taken_as_it_is(gguf_path):
    source = resolve(gguf_path)
    assert load_target(source).source == source


@pytest.mark.parametrize("dtype", ["int8", "float64", "fancy", "float8_e4m3fn"])
def test_dtypes_that_weights_are_not_held_in(dtype, gguf_path):
    with pytest.raises(ConfigError, match="use one of bfloat16, float32, float16"):
        load_target(gguf_path, dtype=dtype)


def test_the_context_stays_within_the_positions(gguf_path):
    assert load_target(gguf_path, context=20).context == 20
    for context in (0, 65):
        with pytest.raises(ConfigError, match=f"context {context} must be between 1 and 64"):
            load_target(gguf_path, context=context)


def test_dynamic_rope_stretches_the_context(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    path.write_text(json.dumps(config))
    target = load_target(folder, context=128)
    assert target.context == target.config.rope.context == 128
    with pytest.raises(ConfigError, match="between 1 and 128"):
        load_target(folder, context=129)


def test_a_tokenizer_of_another_model_is_refused(folder):
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 500}))
    with pytest.raises(MismatchError, match="has id 500, the model only 288 ids"):
        load_target(folder)


def test_random_weights_come_without_a_tokenizer():
    _, config, _ = hf_export.build("qwen3")
    target = random_target(config, seed=3, eos_ids=(5,))
    assert jax.tree.structure(target.params) == jax.tree.structure(random_target(config).params)
    assert not np.array_equal(target.params["embed"], random_target(config, seed=4).params["embed"])
    np.testing.assert_array_equal(target.params["embed"], random_target(config, seed=3).params["embed"])
    assert (target.eos_ids, target.tokenizer, target.source) == ((5,), None, None)
    with pytest.raises(RequestError, match="random qwen3 has no tokenizer; give token ids"):
        target.need_tokenizer()
