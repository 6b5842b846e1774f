"""What configs and tensors of EAGLE drafts say reaches the model, and nothing else does."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from eagle_files import (
    FLAT,
    FLAT1,
    HD,
    MADE,
    VD,
    H,
    V,
    convert,
    draft,
    drop,
    make,
    maps,
    put,
    save,
    speculators_config,
)
from eagle_logits import SGLANG, TARGET_CONFIG, logits, target

from eaglejax.api import generate
from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.files.load import bind, draft_plan, read_weights
from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.drafts.registry import load_draft
from eaglejax.drafts.tree import chain
from eaglejax.errors import CheckpointError, ConfigError, MismatchError
from eaglejax.models.target import random_target


def test_layer_ids_follow_the_convention(tmp_path):
    """A64, A66: block numbers get one added, boundaries do not; the guess is noted and can be overridden."""
    for ids, convention, want in (
        ([1, 2, 3], "auto", (2, 3, 4)),
        ([2, 3, 4], "auto", (2, 3, 4)),
        ([1, 2, 3], "boundary", (1, 2, 3)),
        ([2, 3, 6], "block", (3, 4, 7)),
    ):
        folder = draft(tmp_path, config=FLAT | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}})
        file = read_draft(folder, aux_convention=convention)
        assert file.config.aux == want
        assert any(str(list(want)) in note for note in file.notes)
    spec = save(
        tmp_path / "s",
        MADE.tensors | maps(MADE),
        speculators_config(eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
    )
    assert read_draft(spec).config.aux == (1, 2, 3)
    silent = read_draft(draft(tmp_path))
    assert silent.config.aux == ()
    assert silent.config.fit(TARGET_CONFIG).aux == (2, 3, 4)


def test_other_counts_of_features(tmp_path):
    """A65: two features, one joined norm; five features with a norm each; other widths than the target's
    (A60)."""
    two = make(aux=2)
    joined = put(input_norm__weight=np.ones(2 * H, np.float32) * 2)
    folder = draft(tmp_path, joined, FLAT | {"eagle_aux_hidden_state_layer_ids": [2, 7]}, two)
    config = read_draft(folder).config.fit(TARGET_CONFIG)
    assert (config.num_aux, config.aux, config.aux_norm, config.target_hidden_size) == (
        2,
        (2, 7),
        "joined",
        H,
    )
    five = make(aux=5)
    norms = put(**{f"fc_norm__{i}__weight": np.ones(H, np.float32) for i in range(5)})
    config = read_draft(draft(tmp_path, norms, None, five)).config
    assert (config.num_aux, config.aux_norm) == (5, "each")
    with pytest.raises(MismatchError, match="fuses 5 features"):
        config.fit(TARGET_CONFIG)
    wide = make(ht=32, head_dim=6)
    own = put(embed_tokens__weight=np.ones((V, H), np.float32))
    config = read_draft(draft(tmp_path, own, FLAT | {"target_hidden_size": 32}, wide)).config
    assert (config.target_hidden_size, config.hidden_size, config.head_dim) == (32, H, 6)
    with pytest.raises(ConfigError, match="cannot borrow"):
        read_draft(draft(tmp_path, None, FLAT | {"target_hidden_size": 32}, wide))


def test_norm_output_feeds_the_normalised_state_back(tmp_path):
    """EAGLE-3.1's flag means the same in every form, under either of its names; the head is normed all the
    while."""
    plain, _, _ = logits(draft(tmp_path))
    modelopt = {"eagle_config": {"return_hidden_post_norm": True}}
    for document, doubted in (
        (FLAT | {"norm_output": True}, True),
        (SGLANG | {"norm_output": True}, True),
        (SGLANG | modelopt, False),
        (SGLANG | modelopt | {"norm_output": True}, False),
        (speculators_config(norm_output=True), False),
    ):
        fed, config, file = logits(save(tmp_path / "it", MADE.tensors | maps(MADE), document))
        assert (config.head_norm, config.feed_normed, file.unused) == (True, True, ())
        np.testing.assert_array_equal(fed[0], plain[0])
        assert not np.allclose(fed[1], plain[1])
        assert any("SpecForge" in note for note in file.notes) == doubted
    for off in ({"norm_output": False}, {"eagle_config": {"return_hidden_post_norm": False}}):
        got, config, file = logits(draft(tmp_path, config=SGLANG | off))
        assert (config.head_norm, config.feed_normed, file.unused) == (True, False, ())
        np.testing.assert_array_equal(got, plain)
    with pytest.raises(CheckpointError, match="norm_output and return_hidden_post_norm and not the same"):
        read_draft(draft(tmp_path, config=SGLANG | modelopt | {"norm_output": False}))


def test_a_head_without_a_norm_shows_in_the_weights(tmp_path):
    """Some months of SpecForge: norm_output false switched the head's norm off, so that it was never trained.
    modelopt says it by name; eaglejax's own block settles it."""
    plain, _, _ = logits(draft(tmp_path))
    untouched = put(norm__weight=np.ones(H, np.float32))
    bare, config, file = logits(draft(tmp_path, untouched, SGLANG | {"norm_output": False}))
    assert (config.head_norm, config.feed_normed, file.unused) == (False, False, ("norm.weight",))
    assert any("never trained" in note for note in file.notes)
    assert not np.allclose(bare[0], plain[0])
    _, config, _ = logits(draft(tmp_path, untouched))
    assert config.head_norm, "without the flag it is normed"
    _, config, _ = logits(
        draft(tmp_path, drop("norm.weight"), SGLANG | {"eagle_config": {"use_last_layernorm": False}})
    )
    assert not config.head_norm
    with pytest.raises(CheckpointError, match="use_last_layernorm: false, but the file holds"):
        read_draft(draft(tmp_path, None, SGLANG | {"eagle_config": {"use_last_layernorm": False}}))
    for config in (SGLANG, SGLANG | {"norm_output": False}):
        with pytest.raises(CheckpointError, match=r"lacks 1 tensors.*norm\.weight"):
            draft_plan(read_draft(draft(tmp_path, drop("norm.weight"), config)), jnp.float32)
    settled = SGLANG | {"norm_output": True, "eaglejax": {"feed_normed": False}}
    got, _, _ = logits(draft(tmp_path, None, settled))
    np.testing.assert_array_equal(got, plain)
    for to in ("safeailab", "sglang", "speculators", "modelopt"):
        with pytest.raises(ConfigError, match="no norm before the head"):
            convert(draft(tmp_path, untouched, SGLANG | {"norm_output": False}), tmp_path / "x", to)


def test_a_silent_speculators_config_normalises_the_residual(tmp_path):
    """Readers of the form take a missing norm_before_residual for true, those of flat ones for false."""
    config = speculators_config()
    del config["norm_before_residual"]
    file = read_draft(save(tmp_path / "s", MADE.tensors | maps(MADE), config))
    assert file.config.norm_before_residual
    assert any("norm_before_residual" in note for note in file.notes)
    assert not read_draft(draft(tmp_path)).config.norm_before_residual


def test_the_fed_state_is_written_as_its_readers_mean_it(tmp_path):
    """sglang and speculators by norm_output, modelopt by both names; SafeAILab's code cannot."""
    source = draft(tmp_path, config=SGLANG | {"norm_output": True})
    for to in ("sglang", "modelopt", "speculators", "eaglejax"):
        assert convert(source, tmp_path / to, to).config.feed_normed
    for to in ("sglang", "modelopt", "speculators"):
        assert json.loads((tmp_path / to / "config.json").read_text())["norm_output"] is True
    with pytest.raises(ConfigError, match="feeding the normalised state back"):
        convert(source, tmp_path / "x", "safeailab", target=target())
    plain = convert(draft(tmp_path), tmp_path / "plain", "sglang")
    assert not plain.config.feed_normed
    assert plain.raw["norm_output"] is False


def test_a_draft_without_fc_reads_the_targets_last_state(tmp_path):
    """use_aux_hidden_state false: one feature, nothing fused; with fc in the file one of them is wrong."""
    alone = SGLANG | {"eagle_config": {"use_aux_hidden_state": False}}
    folder = draft(tmp_path, drop("fc.weight"), alone)
    got, config, file = logits(folder)
    assert (config.num_aux, config.reads_final, config.version) == (0, True, 3)
    assert any("final norm" in note for note in file.notes)
    bound = load_draft(folder, target(), tree=chain(2))
    prompt = [3, 1, 4, 1, 5, 9]
    want = generate(target(), prompt, max_new_tokens=12, ignore_eos=True).token_ids
    assert generate(target(), prompt, proposer=bound, max_new_tokens=12, ignore_eos=True).token_ids == want
    for to in ("sglang", "modelopt", "eaglejax"):
        again, there, _ = logits(convert(folder, tmp_path / to, to).path)
        assert there.reads_final
        np.testing.assert_array_equal(again, got)
    for to in ("safeailab", "speculators"):
        with pytest.raises(ConfigError, match="last state alone"):
            convert(folder, tmp_path / "x", to, target=target())
    named = alone | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    notes = read_draft(draft(tmp_path / "named", drop("fc.weight"), named)).notes
    assert any("names [1, 2, 3], which a draft without fc does not read" in note for note in notes)
    with pytest.raises(ConfigError, match="--aux are for drafts that fuse"):
        read_draft(folder, aux=(3,))
    with pytest.raises(CheckpointError, match="use_aux_hidden_state: false, but the file holds fc"):
        read_draft(draft(tmp_path, None, alone))
    with pytest.raises(CheckpointError, match=r"lacks fc\.weight.*use_aux_hidden_state"):
        read_draft(draft(tmp_path, drop("fc.weight"), SGLANG))
    norms = put(layers__0__input_layernorm__weight=np.ones(H, np.float32))
    with pytest.raises(CheckpointError, match="use_aux_hidden_state is false and the first layer"):
        read_draft(
            draft(
                tmp_path,
                norms,
                FLAT1 | {"eagle_config": {"use_aux_hidden_state": False}},
                make(1),
                with_maps=False,
            )
        )


def test_flags_of_speculators_reach_the_model(tmp_path):
    """norm_before_residual, norm_before_fc, q/k norms, windows: each changes the logits (A63, A65, A82)."""
    base, _, _ = logits(save(tmp_path / "0", MADE.tensors | maps(MADE), speculators_config()))
    residual, config, _ = logits(
        save(tmp_path / "1", MADE.tensors | maps(MADE), speculators_config(norm_before_residual=True))
    )
    assert config.norm_before_residual
    assert not np.allclose(residual, base)
    normed = MADE.tensors | maps(MADE) | {"input_norm.weight": np.linspace(0.5, 2, 3 * H).astype(np.float32)}
    joined, _, _ = logits(save(tmp_path / "2", normed, speculators_config(norm_before_fc=True)))
    assert not np.allclose(joined, base)
    qk = {f"layers.0.self_attn.{x}_norm.weight": np.full(HD, 2.0, np.float32) for x in "qk"}
    qwen = speculators_config()
    qwen["transformer_layer_config"] |= {
        "model_type": "qwen3",
        "layer_types": ["sliding_attention"],
        "sliding_window": 2,
    }
    got, config, _ = logits(save(tmp_path / "3", MADE.tensors | maps(MADE) | qk, qwen))
    assert (config.qk_norm, config.windows) == (True, (2,))
    assert not np.allclose(got, base)
    # What a saved transformers config leaves out is its class's default (32 heads), not a guess of ours.
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
    layer = {k: v for k, v in qwen["transformer_layer_config"].items() if k not in heads}
    with pytest.raises(CheckpointError, match="32 heads"):
        read_draft(
            save(tmp_path / "4", MADE.tensors | maps(MADE) | qk, qwen | {"transformer_layer_config": layer})
        )


def test_own_parts_are_used_and_missing_ones_borrowed(tmp_path):
    """A57, A58: a shipped embedding and head win over the target's; without a head a full vocabulary
    borrows."""
    full = make(vd=V)
    assert full.tensors["lm_head.weight"].shape == (V, H)
    own, config, file = logits(draft(tmp_path, None, FLAT | {"draft_vocab_size": V}, full, with_maps=False))
    assert (config.own_head, file.ids, config.reduced) == (True, None, False)
    zeros = put(d2t=np.zeros(V, np.int64), t2d=np.ones(V, bool))
    same, _, file = logits(draft(tmp_path, zeros, FLAT | {"draft_vocab_size": V}, full, with_maps=False))
    assert file.ids is None
    np.testing.assert_array_equal(own, same)
    borrowed, config, file = logits(
        draft(tmp_path, drop("lm_head.weight"), FLAT | {"draft_vocab_size": None}, full, with_maps=False)
    )
    assert not config.own_head
    assert any("head" in note for note in file.notes)
    assert not np.allclose(own, borrowed)
    params = load_draft(tmp_path / "draft", target(), tree=chain(1)).params
    assert params.head is target().params["head"]
    assert params.embed is target().params["embed"]
    embedded = put(embed_tokens__weight=np.ones((V, H), np.float32))
    other, config, _ = logits(
        draft(tmp_path, embedded, FLAT | {"draft_vocab_size": V}, full, with_maps=False)
    )
    assert config.own_embedding
    assert not np.allclose(own, other)


def test_a_tied_target_lends_its_embedding_as_head(tmp_path):
    """The head of a tied target is its embedding, transposed on the fly, with the target's softcap (A70)."""
    tied = random_target(dataclasses.replace(TARGET_CONFIG, tie_embeddings=True, final_softcap=3.0), seed=3)
    folder = save(tmp_path / "1", make(1).tensors, FLAT1)
    file = read_draft(folder)
    config = file.config.fit(tied.config)
    params = bind(config, read_weights(file, jnp.float32), tied)
    state = jnp.asarray(np.random.default_rng(0).normal(size=(2, H)) * 9, jnp.float32)
    got = eagle_model.logits(params, config, state)
    want = 3.0 * np.tanh(np.asarray(state) @ np.asarray(tied.params["embed"]).T / 3.0)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_configs_that_lie_about_shapes_are_noted(tmp_path):
    """Layer count, vocabulary and draft vocabulary come from the tensors (40 layers in a one-layer draft's
    config)."""
    lies = FLAT | {"num_hidden_layers": 40, "vocab_size": 50, "draft_vocab_size": 30}
    file = read_draft(draft(tmp_path, config=lies))
    assert (file.config.num_layers, file.config.vocab_size, file.config.draft_vocab_size) == (1, V, VD)
    assert sum("config.json says" in note for note in file.notes) == 3
    text = json.dumps(file.notes)
    assert "10000" in text
