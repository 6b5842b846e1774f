"""GGUF files that are damaged or cannot be run are refused by name."""

from __future__ import annotations

import gguf
import gguf_export
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from eaglejax.checkpoint.gguf.load import load_gguf
from eaglejax.checkpoint.gguf.metadata import config_from_metadata
from eaglejax.checkpoint.gguf.reader import GGUFFile
from eaglejax.checkpoint.tables import check_layers
from eaglejax.errors import CheckpointError, EaglejaxError
from eaglejax.models.families import from_hf


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

    @pytest.mark.parametrize("kind", ["mmproj", "adapter", "imatrix"])
    def test_what_is_no_model_says_what_it_is(self, tmp_path, kind):
        def edit(writer, tensors):
            writer.add_type(kind)

        self.refuse(tmp_path, f"of the type '{kind}'", edit)

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
