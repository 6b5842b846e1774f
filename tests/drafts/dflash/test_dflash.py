"""DFlash drafts: what a block guesses is what training scores, files in both published forms, refusals by
name, rotated targets, and a text that was learnt is accepted block by block."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from eagle_loop import make_target, target_config
from overfit import learnt

import eaglejax as ej
from eaglejax import pytree, sampling
from eaglejax.cli import methods
from eaglejax.cli.inspect import Inspect
from eaglejax.config import SpeculativeConfig
from eaglejax.drafts.base import Observation
from eaglejax.drafts.dflash.config import DFlashConfig
from eaglejax.drafts.dflash.files import join, write_weights
from eaglejax.drafts.dflash.model import param_table
from eaglejax.drafts.dflash.probe import guesses
from eaglejax.drafts.dflash.proposer import DFlash
from eaglejax.drafts.registry import load_draft, read_draft
from eaglejax.errors import CheckpointError, ConfigError, MismatchError
from eaglejax.measure.quality import Features, Texts
from eaglejax.models.config import LayerSpec
from eaglejax.rotation.rotate import Rotation, rotate_target
from eaglejax.sampling import Sampling
from eaglejax.train.objective import Objective
from eaglejax.train.settings import DraftSettings, RunSettings, TrainSettings

TARGET = make_target(target_config(layers=(LayerSpec(window=7), LayerSpec())), seed=6)
H, V = TARGET.config.hidden_size, TARGET.config.vocab_size
TEXTS = np.random.default_rng(0).integers(0, V, (2, 9)).astype(np.int32)


def draft(seed=0, **changes):
    """(configuration, parameters) of a random draft that borrows the target's embedding and head."""
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "num_layers": 2, "intermediate_size": 20}
    config = DFlashConfig(
        **{
            **shape,
            "vocab_size": V,
            "hidden_size": H,
            "target_hidden_size": H,
            "aux": (1, 2),
            "block": 5,
            "mask_id": 3,
            **changes,
        }
    )
    weights = pytree.initialize(param_table(config), jax.random.key(seed))
    weights = jax.tree.map(lambda w: w * 12 if w.ndim > 1 else w + jnp.arange(w.size) / w.size, weights)
    return config, join(config, weights, TARGET)


KINDS = {
    "full": {},
    "sliding": {"windows": (4, None), "causal": (True, False), "mask_vector": True},
    "from_anchor": {"from_anchor": True, "qk_norm": False, "attention_bias": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_guesses_what_training_scores(kind):
    """Whatever the chunks that the text came in, every row at its own length."""
    config, params = draft(**KINDS[kind])
    proposer = DFlash(config, ej.chain(4))
    seen = Features.of(TARGET, Texts(TEXTS, np.asarray([9, 9]), np.asarray([1, 1]))).read(config.taps)
    lengths, width = np.asarray([8, 6]), 4
    rows = sampling.rows([Sampling()] * 2, V, [[1]] * 2)
    keys = jax.vmap(jax.random.key)(jnp.arange(2))

    @jax.jit
    def drafted(seen):
        state = proposer.init(params, batch=2, capacity=16)
        for at in range(0, 8, width):
            part = slice(at, at + width)
            state = proposer.observe(
                params,
                state,
                Observation(
                    tokens=jnp.asarray(TEXTS[:, part]),
                    following=jnp.asarray(TEXTS[:, at + 1 : at + width + 1]),
                    start=jnp.full(2, at, jnp.int32),
                    count=jnp.asarray(np.clip(lengths - at, 0, width), jnp.int32),
                    features=seen[:, part],
                ),
            )
        root = jnp.asarray(TEXTS[np.arange(2), lengths])
        found, after = proposer.propose(params, state, root, jnp.asarray(lengths), rows, keys)
        return found.tokens, after.cache.lengths

    tokens, held = map(np.asarray, drafted(seen))
    np.testing.assert_array_equal(held, lengths)
    unrolled = guesses(config, params, seen, jnp.asarray(TEXTS), 4)
    for row, size in enumerate(lengths):
        np.testing.assert_array_equal(tokens[row, 1:], unrolled[:, row, size - 1])
    assert len(set(tokens[:, 1:].ravel().tolist())) > 2, "a constant draft would prove little"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["dflash", "speculators"])
def test_both_forms_are_read_and_written(kind, form, tmp_path):
    config, params = draft(**KINDS[kind], own_embedding=kind == "sliding", basis=None)
    write_weights(tmp_path / "it", config, params.weights, to=form)
    family, file = read_draft(tmp_path / "it")
    assert (family.name, file.form, file.config) == ("DFlash", form, config)
    bound = family.load(file, TARGET)
    jax.tree.map(np.testing.assert_array_equal, bound.params.weights, params.weights)
    assert (bound.params.embed is TARGET.params["embed"]) == (kind != "sliding")
    assert bound.proposer.nodes == 5
    other = "speculators" if form == "dflash" else "dflash"
    family.write(file, tmp_path / "other", to=other, target=None, verifier="a/b")
    assert read_draft(tmp_path / "other")[1].config == config


def published(tmp_path, change=lambda tensors: tensors, **said):
    """A folder as its authors publish them, by their original names."""
    rng = np.random.default_rng(1)
    heads = {"q_proj": (24, H), "k_proj": (12, H), "v_proj": (12, H), "o_proj": (H, 24)}
    shapes = {"fc.weight": (H, 2 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(2):
        at = f"layers.{i}."
        shapes |= {f"{at}self_attn.{name}.weight": shape for name, shape in heads.items()}
        shapes |= {f"{at}self_attn.{x}_norm.weight": (6,) for x in "qk"}
        shapes |= {f"{at}mlp.{x}_proj.weight": (20, H) for x in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (H, 20)}
        shapes |= {f"{at}{x}_layernorm.weight": (H,) for x in ("input", "post_attention")}
    tensors = {n: rng.normal(0, 0.3, s).astype(np.float32) for n, s in shapes.items()}
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 1]},
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rope_theta": 1000000,
        "max_position_embeddings": 64,
        "layer_types": ["full_attention"] * 2,
    }
    config = {k: v for k, v in {**config, **said}.items() if v is not None}
    tmp_path.mkdir(exist_ok=True)
    safetensors.numpy.save_file(change(tensors), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_published_draft_is_understood(tmp_path, capsys):
    folder = published(tmp_path / "it")
    config = read_draft(folder)[1].config
    assert (config.aux, config.block, config.mask_id) == ((1, 2), 4, 7)
    assert config.rope.theta == 1e6
    assert methods.method_for(str(folder)) == "dflash"
    proposer = methods.proposer_from(TARGET, SpeculativeConfig("dflash", model=str(folder))).proposer
    assert proposer.nodes == 4
    assert Inspect(str(folder)).run() == 0
    assert "4 tokens, 3 of them guessed" in capsys.readouterr().err


BROKEN = {
    "no block size": ({"block_size": None}, CheckpointError, "says no block_size"),
    "a block of one": ({"block_size": 1}, ConfigError, "is 1; it must be an integer from 2"),
    "layers without end": (
        {"num_hidden_layers": 10**9, "layer_types": None},
        CheckpointError,
        "lacks layers",
    ),
    "no mask": (
        {"dflash_config": {"target_layer_ids": [0, 1]}},
        CheckpointError,
        "neither mask_token",
    ),
    "a mask that is no token": (
        {"dflash_config": {"mask_token_id": 99, "target_layer_ids": [0, 1]}},
        ConfigError,
        "mask_token_id 99 is no row",
    ),
    "no layers": ({"dflash_config": {"mask_token_id": 7}}, CheckpointError, "target_layer_ids is None"),
    "a layer too many": (
        {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 1, 2]}},
        CheckpointError,
        "fc reads 32 numbers, and the 3 target layers",
    ),
    "a layer that is not there": (
        {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 9]}},
        MismatchError,
        "boundary 10",
    ),
    "another vocabulary": ({"vocab_size": 99}, MismatchError, "vocabulary of 99 tokens"),
    "another width": ({"target_hidden_size": 8, "hidden_size": 16}, ConfigError, "cannot borrow"),
    "a layer less": ({"num_hidden_layers": 1, "layer_types": None}, CheckpointError, "has no use for"),
    "a window without a size": (
        {"layer_types": ["sliding_attention", "full_attention"]},
        CheckpointError,
        "need a sliding_window",
    ),
    "another projector": (
        {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 1], "projector_type": "domino"}},
        CheckpointError,
        "projector_type is 'domino'",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_drafts_are_refused_by_name(fault, tmp_path):
    said, kind, message = BROKEN[fault]
    with pytest.raises(kind, match=message):
        load_draft(published(tmp_path / "it", **said), TARGET)


def test_lost_tensors_and_reduced_vocabularies_are_refused(tmp_path):
    lost = published(tmp_path / "a", lambda t: {n: x for n, x in t.items() if n != "hidden_norm.weight"})
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors.*hidden_norm"):
        load_draft(lost, TARGET)
    reduced = published(tmp_path / "b", lambda t: t | {"d2t": np.zeros(8, np.int64)})
    with pytest.raises(CheckpointError, match="reduced vocabulary"):
        load_draft(reduced, TARGET)
    with pytest.raises(ConfigError, match="4 drafts in a row; a block of 4 tokens guesses 3"):
        load_draft(published(tmp_path / "c"), TARGET, tree=ej.chain(4))


@pytest.mark.slow
def test_drafts_for_a_rotated_target(tmp_path):
    """Unaligned they are refused; aligned, in memory and on disk, they guess as beside the original."""
    config, params = draft(qk_norm=True)
    write_weights(tmp_path / "it", config, params.weights)
    rotated = rotate_target(TARGET, Rotation("random", H, seed=3))
    with pytest.raises(MismatchError, match="is rotated"):
        load_draft(tmp_path / "it", rotated)
    family, file = read_draft(tmp_path / "it")
    family.write_aligned(file, tmp_path / "aligned", rotated, rotated.rotation, original=TARGET, to="dflash")
    again = read_draft(tmp_path / "aligned")[1]
    with pytest.raises(ConfigError, match="aligned already"):
        family.write_aligned(again, tmp_path / "x", rotated, rotated.rotation, original=None, to="dflash")
    runs = [
        (TARGET, load_draft(tmp_path / "it", TARGET)),
        (rotated, load_draft(tmp_path / "it", rotated, align=True)),
        (rotated, load_draft(tmp_path / "aligned", rotated)),
    ]
    found = [
        ej.generate(target, [3, 1, 4], proposer=bound, max_new_tokens=24, ignore_eos=True)
        for target, bound in runs
    ]
    assert len({tuple(out.token_ids) for out in found}) == 1
    assert len({out.stats.num_accepted_tokens for out in found}) == 1


def test_a_draft_that_learnt_a_text_is_accepted_whole_on_it(tmp_path):
    """From the trainer's loss, weighed by D-PACE, to decoding, through a file: every block of the text it saw
    (A73)."""
    objective = Objective(algorithm="dflash", steps=3, loss="hard_ce", position_weights="dpace")
    settings = TrainSettings(
        out="x",
        objective=objective,
        draft=DraftSettings(start="random", aux=(0, 2), num_layers=1),
        run=RunSettings(compute_dtype="float32"),
    )
    bound, prompt, text = learnt(TARGET, settings, tmp_path / "it")
    assert (bound.proposer.config.block, bound.proposer.config.mask_vector) == (4, True)
    out = ej.generate(TARGET, prompt, proposer=bound, max_new_tokens=len(text), ignore_eos=True)
    assert out.token_ids == text
    # The prompt's forward gave the first token; every round the whole block and one more.
    assert out.stats.num_drafts == -(-(len(text) - 1) // 4)
