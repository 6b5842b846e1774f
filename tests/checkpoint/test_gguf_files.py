"""GGUF: the reader, every block format, every architecture, the converted copy, refusals."""

from __future__ import annotations

import dataclasses
import itertools

import gguf
import gguf_export
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf_export import assert_trees

from eaglejax.checkpoint.gguf import load as gguf_models
from eaglejax.checkpoint.gguf.load import load_gguf
from eaglejax.checkpoint.gguf.reader import GGUFFile
from eaglejax.errors import CheckpointError
from eaglejax.nn import rope

MATRIX_KINDS = (Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_1, Kind.Q5_0, Kind.Q4_1, Kind.Q4_0)


def decodable():
    for kind in Kind:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        yield kind


@pytest.mark.parametrize("kind", decodable(), ids=lambda kind: kind.name)
def test_every_block_format_is_read_in_any_cut_of_rows(kind, tmp_path):
    """Random bytes are valid blocks of every format."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 256, (2, 5, 512 // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("before", np.ones(3, np.float32))
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "x.gguf")
    assert file.shape("t") == (2, 5, 512)
    with np.errstate(all="ignore"):
        want = gguf.dequantize(raw, kind).reshape(10, 512)
        got = np.concatenate([file.rows("t", *cut) for cut in itertools.pairwise((0, 1, 4, 9, 10))])
    np.testing.assert_array_equal(got, want)


def test_metadata_equal_the_gguf_package_s_own_reader(tmp_path):
    path = tmp_path / "m.gguf"
    gguf_export.write(path, "gemma3")
    reader, file = gguf.GGUFReader(path), GGUFFile(path)
    want = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert file.metadata == want
    assert {t.name: tuple(map(int, t.shape[::-1])) for t in reader.tensors} == {
        n: file.shape(n) for n in file.names()
    }


@pytest.mark.parametrize("name", gguf_export.MODELS)
def test_every_architecture_is_read_back(name, tmp_path):
    path = tmp_path / "m.gguf"
    _, want_config, want = gguf_export.write(path, name)
    config, params, _ = load_gguf(path, jnp.float32)
    # w + 1 was rounded in the file; everything else is exact.
    tolerance = 2e-7 if name == "gemma3" else 0
    assert_trees(params, want, lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance))
    for layer in range(config.num_layers):
        got_rope, want_rope = (c.layer(layer).rope for c in (config, want_config))
        got_inv, got_scale = rope.frequencies(got_rope, config.head_dim)
        want_inv, want_scale = rope.frequencies(want_rope, config.head_dim)
        np.testing.assert_allclose(got_inv, want_inv, rtol=3e-7)
        assert got_scale == want_scale
        assert config.layer(layer).window == want_config.layer(layer).window
    rest = {"rope": None, "layers": ()}
    approximately = {"norm_eps": pytest.approx(want_config.norm_eps, rel=1e-6)}
    assert dataclasses.asdict(config) | rest == dataclasses.asdict(want_config) | rest | approximately


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_transformers_reads_the_same_weights_from_the_file(name, tmp_path):
    """An independent reading of names, permutations and norm offsets, quantised."""
    path = tmp_path / "m.gguf"
    model, config, _ = gguf_export.write(path, name, Kind.Q8_0)
    # Its own reading of the metadata leaves head dimension and biases out.
    theirs = type(model).from_pretrained(tmp_path, gguf_file="m.gguf", config=model.config, dtype="float32")
    _, params, _ = load_gguf(path, jnp.float32)
    assert_trees(params, gguf_export.hf_export.export(theirs, config), np.testing.assert_array_equal)


@pytest.mark.parametrize("kind", MATRIX_KINDS, ids=lambda kind: kind.name)
def test_quantised_weights_are_near_the_originals(kind, tmp_path):
    """Within half a step of the block's grid, whose width is the block's span over the number of levels."""
    path = tmp_path / "m.gguf"
    *_, want = gguf_export.write(path, "qwen2", kind)
    _, params, _ = load_gguf(path, jnp.float32)
    bits = {Kind.F16: 11, Kind.BF16: 8, Kind.Q8_0: 7, Kind.Q5_1: 5, Kind.Q5_0: 4, Kind.Q4_1: 4, Kind.Q4_0: 3}[
        kind
    ]

    def near(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=1.1 * np.abs(b).max() / 2**bits)

    assert_trees(params, want, near)
    if kind is Kind.Q4_0:
        assert np.abs(np.asarray(params["embed"]) - np.asarray(want["embed"])).max() > 0.01


def test_older_files_keep_one_tensor_an_expert(tmp_path):
    def split(writer, tensors):
        for name in [n for n in tensors if n.endswith("_exps.weight")]:
            stack, kind = tensors.pop(name)
            for e, matrix in enumerate(stack):
                tensors[name.replace("_exps.weight", f".{e}.weight")] = (matrix, kind)

    path = tmp_path / "m.gguf"
    *_, want = gguf_export.write(path, "mixtral", edit=split)
    _, params, _ = load_gguf(path, jnp.float32)
    assert_trees(params, want, np.testing.assert_array_equal)


@pytest.mark.parametrize("strength", [1.0, 0.878])
def test_yarn_scaling_equals_the_folders(tmp_path, strength):
    """The same model as a folder and as a file turns alike; without ``attn_factor`` as in transformers."""

    def yarn(writer, tensors):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)
        if strength != 1:
            writer.add_rope_scaling_attn_factors(strength)

    path = tmp_path / "m.gguf"
    model, *_ = gguf_export.write(path, "qwen2", edit=yarn)
    config, *_ = load_gguf(path, jnp.float32)
    hf, theta = model.config, model.config.rope_parameters["rope_theta"]
    settings = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    folder = rope.from_hf(
        {
            "rope_theta": theta,
            "max_position_embeddings": hf.max_position_embeddings,
            "rope_scaling": {**settings, "attn_factor": strength},
        }
    )
    got, got_scale = rope.frequencies(config.rope, config.head_dim)
    np.testing.assert_allclose(got, rope.frequencies(folder, config.head_dim)[0], rtol=1e-6)
    assert got_scale == pytest.approx(rope.frequencies(folder, config.head_dim)[1])
    hf.rope_parameters = {"rope_theta": theta, **settings}
    want, scale = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](hf, "cpu")
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-6)
    assert got_scale == pytest.approx(scale * strength)


def split(path, parts: int):
    """The file as ``gguf-split`` leaves it; the names of its parts."""
    reader = gguf.GGUFReader(path)
    names = [path.with_name(f"{path.stem}-{i + 1:05d}-of-{parts:05d}.gguf") for i in range(parts)]
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(name, "qwen2")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                sub = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub)
        for tensor in reader.tensors[number::parts]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    path.unlink()
    return names


class TestSplitFiles:
    def test_all_parts_are_read_whichever_is_named(self, tmp_path):
        gguf_export.write(tmp_path / "m.gguf", "qwen2")
        _, want, tokenizer = load_gguf(tmp_path / "m.gguf", jnp.float32)
        parts = split(tmp_path / "m.gguf", 3)
        for named in (parts[0], parts[2]):
            _, params, again = load_gguf(named, jnp.float32)
            assert_trees(params, want, np.testing.assert_array_equal)
            assert again.hash == tokenizer.hash
        assert gguf_models.fingerprint(parts[0]) == gguf_models.fingerprint(parts[2])

    def test_a_missing_part_is_named(self, tmp_path):
        gguf_export.write(tmp_path / "m.gguf", "qwen2")
        parts = split(tmp_path / "m.gguf", 2)
        parts[1].unlink()
        with pytest.raises(
            CheckpointError, match=r"one of 2 parts of a model; m-00002-of-00002\.gguf must lie"
        ):
            load_gguf(parts[0], jnp.float32)

    def test_a_part_under_another_name_or_in_another_place(self, tmp_path):
        gguf_export.write(tmp_path / "m.gguf", "qwen2")
        parts = split(tmp_path / "m.gguf", 2)
        parts[0].rename(tmp_path / "part.gguf")
        with pytest.raises(CheckpointError, match="one of 2 parts of a model, which its name does not say"):
            GGUFFile(tmp_path / "part.gguf")
        parts[1].rename(parts[0])
        (tmp_path / "part.gguf").rename(parts[1])
        with pytest.raises(CheckpointError, match="says that it is part 1 of the model"):
            GGUFFile(parts[0])
