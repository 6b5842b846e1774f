"""The maps between bases: on load, in a file, for proposers to come, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_cases import make
from eagle_loop import draft_config, make_target, target_config

from eaglejax.checkpoint.basis_file import find_basis, write_basis
from eaglejax.drafts import align
from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.align_file import align_file, write_aligned
from eaglejax.drafts.eagle.files.load import bind
from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.drafts.eagle.files.write import tensors_of_file, tensors_of_weights, write_draft
from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.drafts.eagle.unroll import unroll
from eaglejax.drafts.registry import load_draft
from eaglejax.errors import CheckpointError, ConfigError, MismatchError
from eaglejax.models import decoder
from eaglejax.models.target import Target
from eaglejax.nn.visible import Causal
from eaglejax.rotation.basis import Basis
from eaglejax.rotation.recover import recover_basis, recover_rotation
from eaglejax.rotation.rotate import Rotation, rotate_target

H, V = 16, 24
TOKENS = np.random.default_rng(1).integers(0, V, (2, 9)).astype(np.int32)


@functools.cache
def original(tie: bool = False) -> Target:
    """Norms of every size, so that a forgotten gamma shows."""
    target = make_target(target_config(num_layers=3, tie_embeddings=tie), seed=6)
    rng = np.random.default_rng(2)
    params = jax.tree.map(
        lambda x: jnp.asarray(np.exp(rng.normal(0, 0.5, x.shape)), jnp.float32) if x.ndim == 1 else x,
        target.params,
    )
    return dataclasses.replace(target, params=params)


@functools.cache
def rotated(tie: bool = False, kind: str = "random") -> Target:
    return rotate_target(original(tie), Rotation(kind, H, seed=3))


def features(target: Target, aux: tuple[int, ...]) -> jax.Array:
    b, n = TOKENS.shape
    place = jnp.broadcast_to(jnp.arange(n), (b, n))
    cache = decoder.init_cache(target.config, b, n)
    out = decoder.forward(target.params, target.config, jnp.asarray(TOKENS), place, cache, Causal(), aux=aux)
    return out.aux if aux else out.hidden[:, :, None]


def drafted(config, params: EagleParams, target: Target) -> np.ndarray:
    """Logits of two passes: from the target's features, then from the draft's own state or its masks."""
    seen = features(target, config.aux)[:, :-1]
    states = unroll(params, config, seen, jnp.asarray(TOKENS[:, 1:]), 2)
    return np.stack([np.asarray(eagle_model.logits(params, config, s)) for s in states])


def distance(got, want) -> float:
    return float(np.max(np.abs(np.asarray(got) - want)) / np.max(np.abs(want)))


CASES = {
    "one": (3, {"num_aux": 1, "aux": (2,)}),
    "two-joined-masks": (3, {"num_aux": 2, "aux": (0, 3), "aux_norm": "joined", "mask_id": 5}),
    "four-each": (3, {"num_aux": 4, "aux": (0, 1, 2, 3), "aux_norm": "each", "own_head": False}),
    "rows": (3, {"num_aux": 1, "aux": (3,), "draft_vocab_size": 10, "own_head": False, "target_rows": True}),
    "narrow": (3, {"num_aux": 2, "aux": (1, 2), "hidden_size": 12, "own_embedding": True}),
    "eagle1": (1, {}),
    "eagle1-head": (1, {"own_head": True, "fc_bias": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_an_aligned_draft_drafts_as_before_on_load_and_from_a_file(name, tmp_path):
    version, changes = CASES[name]
    tie = name == "four-each"
    target, turned = original(tie), rotated(tie)
    config = draft_config(target.config, version, **changes)
    made = make(config, seed=4)
    ids = None if made.ids is None else np.asarray(made.ids)
    want = drafted(config, bind(config, made.weights, target, ids), target)
    unaligned = bind(config, made.weights, turned, ids)
    assert distance(drafted(config, unaligned, turned), want) > 0.1

    params = align.align_params(unaligned, config, turned.rotation)
    assert distance(drafted(config, params, turned), want) < 1e-4

    write_draft(tmp_path / "draft", config, tensors_of_weights(config, made.weights), ids, to="eaglejax")
    loaded = load_draft(tmp_path / "draft", turned, align=True)
    assert loaded.proposer.config.basis == turned.basis
    assert distance(drafted(loaded.proposer.config, loaded.params, turned), want) < 1e-4

    for source in (None, target):
        file = read_draft(tmp_path / "draft")
        done = align_file(file, turned, turned.rotation, original=source)
        out = tmp_path / f"aligned-{source is None}"
        write_aligned(out, done, file)
        again = load_draft(out, turned)  # by itself: no option, no borrowed part
        assert again.proposer.config.basis == turned.basis
        assert again.params.embed is None
        assert again.params.head is None
        assert distance(drafted(again.proposer.config, again.params, turned), want) < 1e-4
    with pytest.raises(ConfigError, match="aligned already, to that very basis"):
        align_file(read_draft(out), turned, turned.rotation)
    with pytest.raises(ConfigError, match="aligned already"):
        load_draft(out, turned, align=True)
    with pytest.raises(MismatchError, match="use the original draft, or align it"):
        load_draft(out, target)


def test_another_form_keeps_the_basis_and_refuses_a_second_alignment(tmp_path):
    config = draft_config(original().config, aux=(0, 1, 3), own_embedding=True)
    made = make(config, seed=5)
    write_draft(tmp_path / "draft", config, tensors_of_weights(config, made.weights), None, to="speculators")
    file = read_draft(tmp_path / "draft")
    write_aligned(tmp_path / "out", align_file(file, rotated(), rotated().rotation), file, to="speculators")
    back = read_draft(tmp_path / "out")
    assert back.layout == "speculators"
    assert back.config.basis == rotated().basis
    assert json.loads((tmp_path / "out/config.json").read_text())["eaglejax"] == {
        "basis": rotated().basis,
        "own_embedding": True,
    }
    with pytest.raises(ConfigError, match="aligned already"):
        align_file(back, rotated(), rotated().rotation)
    first = draft_config(original().config, 1)
    write_draft(tmp_path / "one", first, tensors_of_weights(first, make(first).weights), None, to="eaglejax")
    file = read_draft(tmp_path / "one")
    done = align_file(file, rotated(), rotated().rotation)
    with pytest.raises(ConfigError, match="no place for a map of the target's features"):
        write_draft(
            tmp_path / "x", done.config, tensors_of_weights(done.config, done.weights), None, to="sglang"
        )
    assert "feature_map.weight" in tensors_of_file(read_draft(_written(tmp_path / "y", done, file)))


def test_a_form_that_leaves_the_embedding_to_the_target_cannot_hold_an_aligned_draft(tmp_path):
    turned = rotate_target(make_target(target_config(num_layers=4), seed=6), Rotation("random", H))
    config = draft_config(turned.config, aux=(2, 3, 4))
    weights = tensors_of_weights(config, make(config, seed=5).weights)
    write_draft(tmp_path / "draft", config, weights, None, to="eaglejax")
    file = read_draft(tmp_path / "draft")
    done = align_file(file, turned, turned.rotation)
    with pytest.raises(ConfigError, match="embedding differs from the target's and the sglang form cannot"):
        write_aligned(tmp_path / "out", done, file, to="sglang", target=turned)
    assert not (tmp_path / "out").exists()


def _written(out, done, file):
    write_aligned(out, done, file)
    return out


def test_a_rotation_that_was_not_exported_is_recovered_with_its_error():
    found = recover_basis(original(), rotated())
    assert found.error < 1e-6
    assert np.max(np.abs(found.basis.matrix - rotated().rotation.matrix)) < 1e-5
    assert np.allclose(found.basis.gamma, rotated().rotation.gamma)
    rough = rotated().params | {"embed": rotated().params["embed"].astype(jnp.bfloat16)}
    found = recover_basis(original(), dataclasses.replace(rotated(), params=rough))
    assert 1e-4 < found.error < 5e-3
    assert np.max(np.abs(found.basis.matrix - rotated().rotation.matrix)) < 5e-3
    folded = recover_basis(original(), rotated(kind="identity"))
    assert folded.basis.identity


def test_what_no_rotation_explains_is_not_recovered():
    other = make_target(target_config(num_layers=3), seed=9)
    with pytest.raises(MismatchError, match="no rotation takes the embedding"):
        recover_basis(original(), other)
    with pytest.raises(MismatchError, match="do not span"):
        recover_rotation(np.eye(4)[:3], np.eye(4)[:3])
    wide = make_target(target_config(vocab_size=30), seed=9)
    with pytest.raises(MismatchError, match="not one model before"):
        recover_basis(original(), wide)


def test_what_cannot_be_turned_back_is_refused(tmp_path):
    gamma = rotated().rotation.gamma.copy()
    gamma[5] = 0
    basis = Basis(rotated().rotation.matrix, gamma)
    config = draft_config(original().config, 1)
    params = bind(config, make(config).weights, rotated())
    with pytest.raises(MismatchError, match="0 at 1 of 16 dimensions"):
        align.align_params(params, config, basis)
    with pytest.raises(ConfigError, match="without the weight of the final norm"):
        align.align_params(params, config, Basis(basis.matrix, None))
    with pytest.raises(MismatchError, match="turns 8 dimensions"):
        align.align_params(params, config, Basis(np.eye(8, dtype=np.float32), None))
    with pytest.raises(ConfigError, match="are not known; they are features"):
        align.align_params(params, config, rotated().rotation, parts=("fc",))
    write_draft(tmp_path / "d", config, tensors_of_weights(config, make(config).weights), None, to="eaglejax")
    with pytest.raises(ConfigError, match="is not rotated"):
        load_draft(tmp_path / "d", original(), align=True)
    bare = dataclasses.replace(rotated(), rotation=None)
    with pytest.raises(ConfigError, match="without the matrix of its rotation"):
        load_draft(tmp_path / "d", bare, align=True)
    with pytest.raises(ConfigError, match="is rotated itself"):
        align_file(read_draft(tmp_path / "d"), rotated(), rotated().rotation, original=rotated())


@functools.cache
def wrongly_exported() -> Target:
    """Rotated, with the transpose of its matrix beside it."""
    right = rotated().rotation
    basis = Basis(right.matrix.T.copy(), right.gamma)
    return dataclasses.replace(rotated(), basis=basis.id, rotation=basis)


def test_a_matrix_that_is_not_the_targets_rotation_is_refused(tmp_path):
    """As far as an embedding shows it: the draft's own, or the original model's."""
    own = draft_config(original().config, aux=(0, 1, 3), own_embedding=True)
    borrows = draft_config(original().config, aux=(0, 1, 3))
    for name, config in {"own": own, "borrows": borrows}.items():
        weights = make(config, seed=4).weights
        weights |= {"embed": original().params["embed"]} if config.own_embedding else {}
        write_draft(tmp_path / name, config, tensors_of_weights(config, weights), None, to="eaglejax")
    target, file = wrongly_exported(), read_draft(tmp_path / "own")
    refused = pytest.raises(MismatchError, match="another rotation, or its transpose")
    with refused:
        load_draft(tmp_path / "own", target, align=True)
    with refused:
        align_file(file, target, target.rotation)
    borrower = read_draft(tmp_path / "borrows")
    with refused:
        align_file(borrower, target, target.rotation, original=original())
    align_file(file, rotated(), rotated().rotation)
    other = make_target(target_config(num_layers=3), seed=9)
    with pytest.raises(MismatchError, match="is not what random llama was rotated from"):
        align_file(borrower, rotated(), rotated().rotation, original=other)
    folded = Basis(rotated().rotation.matrix, np.ones(H, np.float32))
    with pytest.raises(MismatchError, match=r"weight of the final norm .* is not that of random llama"):
        align_file(borrower, rotated(), folded, original=original())
    # Trained away from the target's, an embedding says nothing either way.
    align_file(read_draft(_with_other_embedding(tmp_path / "trained", own)), target, target.rotation)


def _with_other_embedding(at, config):
    weights = make(config, seed=4).weights
    write_draft(at, config, tensors_of_weights(config, weights), None, to="eaglejax")
    return at


def test_a_description_names_the_exported_rotation(tmp_path):
    assert find_basis(tmp_path) is None
    path = write_basis(tmp_path, rotated().rotation)
    assert find_basis(tmp_path) == path
    named = {"optional": {"quarot": {"rotation_map": {"global_rotation": "elsewhere.safetensors"}}}}
    (tmp_path / "quant_model_description.json").write_text(json.dumps(named))
    with pytest.raises(CheckpointError, match="names the rotation 'elsewhere"):
        find_basis(tmp_path)
    path.rename(tmp_path / "elsewhere.safetensors")
    assert find_basis(tmp_path) == tmp_path / "elsewhere.safetensors"
    named["optional"]["quarot"]["rotation_map"]["global_rotation"] = 5
    (tmp_path / "quant_model_description.json").write_text(json.dumps(named))
    with pytest.raises(CheckpointError, match="names the rotation 5"):
        find_basis(tmp_path)


# Proposers to come, on the algebra alone: f64, random norms, no model.
RNG = np.random.default_rng(8)
Q = Rotation("random", H, seed=11).matrix()
GAMMA = np.exp(RNG.normal(0, 0.5, H)).astype(np.float32).astype(np.float64)
BASIS = Basis(Q.astype(np.float32), GAMMA.astype(np.float32))
X, E = RNG.normal(size=(2, 7, H))


def n(x):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True))


def test_medusa_reads_the_state_that_its_heads_were_trained_on():
    w, b = RNG.normal(size=(H, H)), RNG.normal(size=H)

    def head(state):
        y = state @ w + b
        return state + y / (1 + np.exp(-y))

    want = head(n(X) * GAMMA)
    assert distance(head((n(X @ Q)) @ align.final_map(BASIS)), want) < 1e-6
    assert distance(head((n(X @ Q)) @ Q.T), want) > 0.05, "gamma matters"


def test_dflash_folds_any_number_of_blocks_and_borrows_what_was():
    for blocks in (1, 2, 3, 5):
        fc, norms = RNG.normal(size=(blocks * H, 12)), np.exp(RNG.normal(0, 0.5, (blocks, H)))
        stream = RNG.normal(size=(blocks, 7, H))
        want = sum(
            (n(s) * g) @ fc[i * H : (i + 1) * H] for i, (s, g) in enumerate(zip(stream, norms, strict=True))
        )
        folded = align.fold_fc(fc, BASIS, norms)
        got = sum(n(s @ Q) @ folded[i * H : (i + 1) * H] for i, s in enumerate(stream))
        assert distance(got, want) < 1e-6
        wrong = align.fold_fc(fc, Basis(BASIS.matrix.T.copy(), BASIS.gamma), norms)
        assert distance(sum(n(s @ Q) @ wrong[i * H : (i + 1) * H] for i, s in enumerate(stream)), want) > 0.5
    table, head = RNG.normal(size=(V, H)), RNG.normal(size=(H, V))
    assert distance(align.original_embedding(table @ Q, BASIS, np.float32), table) < 1e-6
    assert distance(align.original_head(Q.T @ (GAMMA[:, None] * head), BASIS, np.float32), head) < 1e-6
