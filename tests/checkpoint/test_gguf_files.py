"""GGUF: the reader, every block format, every architecture, the converted copy, refusals."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from pathlib import Path

import gguf
import gguf_export
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from gguf import GGMLQuantizationType as Kind

from eaglejax.checkpoint.files import cache_dir
from eaglejax.checkpoint.gguf import load as gguf_models
from eaglejax.checkpoint.gguf.load import load_gguf
from eaglejax.checkpoint.gguf.metadata import config_from_metadata
from eaglejax.checkpoint.gguf.reader import GGUFFile
from eaglejax.checkpoint.tables import check_layers
from eaglejax.errors import CheckpointError, EaglejaxError
from eaglejax.models.families import from_hf
from eaglejax.nn import rope

MATRIX_KINDS = (Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_1, Kind.Q5_0, Kind.Q4_1, Kind.Q4_0)


def assert_trees(got, want, check):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: check(np.asarray(a), np.asarray(b)), got, want)


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


def test_two_that_convert_one_file_at_once_both_load(tmp_path):
    path = tmp_path / "m.gguf"
    *_, want = gguf_export.write(path, "qwen2")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: load_gguf(path, jnp.float32)[1], range(4)))
    for params in loaded:
        assert_trees(params, want, np.testing.assert_array_equal)


class TestConvertedCopy:
    def test_a_second_load_reads_the_copy_and_not_the_file(self, tmp_path, monkeypatch):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen3")
        first = load_gguf(path, jnp.bfloat16)
        monkeypatch.setattr(gguf_models, "GGUFFile", None)
        config, params, tokenizer = load_gguf(path, jnp.bfloat16)
        assert config == first[0]
        assert_trees(params, first[1], np.testing.assert_array_equal)
        assert tokenizer.hash == first[2].hash
        assert tokenizer.eos_ids == first[2].eos_ids
        assert tokenizer.chat_template == first[2].chat_template

    def test_weights_are_used_where_they_lie(self, tmp_path):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        for _ in range(2):
            _, params, _ = load_gguf(path, jnp.float32)
        assert params["embed"].unsafe_buffer_pointer() % 64 == 0
        maps = Path("/proc/self/maps")
        if not maps.exists():
            pytest.skip("no /proc to look the mapping up in")
        lines = maps.read_text().splitlines()
        spans = [line.split()[0].split("-") for line in lines if "float32.safetensors" in line]
        address = params["embed"].unsafe_buffer_pointer()
        assert any(int(a, 16) <= address < int(b, 16) for a, b in spans)

    def test_another_dtype_is_another_copy_of_one_description(self, tmp_path):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        for dtype in (jnp.float32, jnp.bfloat16):
            _, params, _ = load_gguf(path, dtype)
            assert params["embed"].dtype == dtype
        (folder,) = (cache_dir() / "converted").iterdir()
        assert {p.name for p in folder.glob("*.safetensors")} == {
            "float32.safetensors",
            "bfloat16.safetensors",
        }

    def test_an_edited_file_is_converted_anew(self, tmp_path):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        before = load_gguf(path, jnp.float32)[1]["norm"]

        def change(writer, tensors):
            tensors["output_norm.weight"] = (tensors["output_norm.weight"][0] * 2, Kind.F32)

        gguf_export.write(path, "qwen2", edit=change)
        np.testing.assert_array_equal(load_gguf(path, jnp.float32)[1]["norm"], before * 2)

    def test_an_interrupted_conversion_leaves_nothing_behind(self, tmp_path, monkeypatch):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        calls = []

        def breaks(assignment, store):
            calls.append(assignment)
            if len(calls) == 5:
                raise KeyboardInterrupt
            return real(assignment, store)

        real = gguf_models.materialize
        monkeypatch.setattr(gguf_models, "materialize", breaks)
        with pytest.raises(KeyboardInterrupt):
            load_gguf(path, jnp.float32)
        (folder,) = (cache_dir() / "converted").iterdir()
        assert sorted(p.name for p in folder.iterdir()) == [
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
        monkeypatch.setattr(gguf_models, "materialize", real)
        load_gguf(path, jnp.float32)

    def test_a_cache_that_cannot_be_written_is_named(self, tmp_path, monkeypatch):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        (tmp_path / "blocked").write_text("")
        monkeypatch.setenv("EAGLEJAX_CACHE", str(tmp_path / "blocked"))
        with pytest.raises(CheckpointError, match="set EAGLEJAX_CACHE"):
            load_gguf(path, jnp.float32)

    def test_a_damaged_copy_says_what_to_delete(self, tmp_path):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        load_gguf(path, jnp.float32)
        (weights,) = cache_dir().glob("converted/*/float32.safetensors")
        weights.write_bytes(weights.read_bytes()[:-100])
        with pytest.raises(CheckpointError, match=r"float32\.safetensors is truncated"):
            load_gguf(path, jnp.float32)


class TestRefusals:
    def refuse(self, tmp_path, match, edit=None, name="qwen2"):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, name, edit=edit)
        with pytest.raises(EaglejaxError, match=match):
            load_gguf(path, jnp.float32)

    def test_any_truncation(self, tmp_path):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        data = path.read_bytes()
        # Cuts in the magic, the counts, the metadata, the directory, the data and one byte before the end.
        for keep in (0, 3, 20, 100, 3000, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:keep])
            with pytest.raises(CheckpointError, match=r"truncated|not a GGUF file"):
                GGUFFile(path)

    def test_flipped_header_bytes_never_escape_as_another_error(self, tmp_path):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen3")
        data = bytearray(path.read_bytes())
        rng = np.random.default_rng(1)
        refused = 0
        for at in [*range(0, 64), *rng.integers(64, 2000, 60)]:
            damaged = bytearray(data)
            damaged[at] ^= 0xFF
            path.write_bytes(damaged)
            try:
                file = GGUFFile(path)
                config_from_metadata(file)
            except CheckpointError:
                refused += 1
        assert refused > 60

    def test_other_files(self, tmp_path):
        path = tmp_path / "m.gguf"
        path.write_bytes(b"PK\x03\x04" + bytes(100))
        with pytest.raises(CheckpointError, match="not a GGUF file"):
            GGUFFile(path)
        path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
        with pytest.raises(CheckpointError, match="version 1; versions 2 and 3"):
            GGUFFile(path)
        path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(100))
        with pytest.raises(CheckpointError, match="big-endian"):
            GGUFFile(path)

    def test_an_unknown_architecture(self, tmp_path):
        path = tmp_path / "m.gguf"
        writer = gguf.GGUFWriter(path, "mamba")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(
            CheckpointError, match="architecture 'mamba' is not supported; supported are llama"
        ):
            load_gguf(path, jnp.float32)

    def test_a_missing_tensor(self, tmp_path):
        name = "blk.1.ffn_up.weight"
        self.refuse(tmp_path, f"lacks 1 tensors.*{name}", lambda w, t: t.pop(name))

    def test_an_unknown_tensor(self, tmp_path):
        extra = (np.ones((2, 32), np.float32), Kind.F32)
        self.refuse(
            tmp_path, r"no use for: blk\.0\.attn_gate", lambda w, t: t.update({"blk.0.attn_gate": extra})
        )

    def test_experts_stored_twice(self, tmp_path):
        def double(writer, tensors):
            stack, kind = tensors["blk.0.ffn_up_exps.weight"]
            tensors.update({f"blk.0.ffn_up.{e}.weight": (matrix, kind) for e, matrix in enumerate(stack)})

        self.refuse(tmp_path, r"holds layers\.0\.experts\.up twice", double, "mixtral")

    def test_a_missing_key(self, tmp_path):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        file = GGUFFile(path)
        del file.metadata["qwen2.block_count"]
        with pytest.raises(CheckpointError, match=r"has no qwen2\.block_count"):
            config_from_metadata(file)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("logit_scale", 2.0),
            ("attention.scale", 0.5),
            ("attention.temperature_scale", 0.1),
            ("rope.scaling.yarn_log_multiplier", 0.1),
            ("rope.scaling.yarn_ext_factor", 0.5),
            ("rope.scaling.atn_factor", 0.9),
            ("expert_gating_func", 2),
            ("final_logit_softcapping", 30.0),
            ("attention.sliding_window", 16),
        ],
    )
    def test_settings_that_the_decoder_does_not_know(self, tmp_path, key, value):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        file = GGUFFile(path)
        file.metadata[f"qwen2.{key}"] = value
        with pytest.raises(CheckpointError, match=f"qwen2.{key} = {value} is not supported"):
            config_from_metadata(file)

    @pytest.mark.parametrize(
        ("key", "value"),
        [("attention.causal", True), ("rope.scaling.yarn_ext_factor", 1.0), ("final_logit_softcapping", 0.0)],
    )
    def test_settings_that_change_nothing_are_let_be(self, tmp_path, key, value):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        file = GGUFFile(path)
        before = config_from_metadata(file)
        file.metadata[f"qwen2.{key}"] = value
        assert config_from_metadata(file) == before

    @pytest.mark.parametrize("moved", [1, 32, -32])
    def test_tensors_at_another_place(self, tmp_path, moved):
        """Shifted, overlapping or out of order: read there they would be other values."""
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        second = gguf.GGUFReader(path).tensors[1]
        at, data = second.field.offset + second.field.parts[0].nbytes, bytearray(path.read_bytes())
        at += sum(part.nbytes for part in second.field.parts[1:5])
        data[at : at + 8] = (int.from_bytes(data[at : at + 8], "little") + moved).to_bytes(8, "little")
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=f"{second.name}.* is said to begin at byte"):
            GGUFFile(path)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("block_count", 2**31),
            ("block_count", True),
            ("attention.head_count", [2, 1]),
            ("attention.head_count", []),
            ("attention.sliding_window", "5"),
        ],
    )
    def test_counts_that_are_none(self, tmp_path, key, value):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        file = GGUFFile(path)
        file.metadata[f"qwen2.{key}"] = value

        def read():
            check_layers(file.names(), from_hf(config_from_metadata(file)).num_layers, str(path))

        with pytest.raises(EaglejaxError):
            read()

    def test_partial_rotary_embeddings(self, tmp_path):
        self.refuse(
            tmp_path,
            r"rope\.dimension_count = 4 differs",
            lambda w, t: w.add_rope_dimension_count(4),
            "llama",
        )

    def test_layers_of_different_width(self, tmp_path):
        path = tmp_path / "m.gguf"
        gguf_export.write(path, "qwen2")
        file = GGUFFile(path)
        file.metadata["qwen2.feed_forward_length"] = [64, 32, 64]
        with pytest.raises(CheckpointError, match="feed_forward_length differs between layers"):
            config_from_metadata(file)

    def test_an_unknown_rope_scaling(self, tmp_path):
        def scaled(writer, tensors):
            writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
            writer.add_rope_scaling_factor(4.0)

        self.refuse(tmp_path, "rope scaling type 'longrope'", scaled)

    def test_a_tokenizer_larger_than_the_embedding(self, tmp_path):
        def shrink(writer, tensors):
            embed, kind = tensors["token_embd.weight"]
            tensors["token_embd.weight"] = (embed[:200], kind)

        self.refuse(tmp_path, "ids up to 265, its embedding only 200 rows", shrink)
