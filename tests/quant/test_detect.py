"""A draft in another basis than its target is refused before a token is decoded, with the command."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from eagle_cases import make
from eagle_loop import draft_config, make_target, target_config

import eaglejax as ej
from eaglejax.drafts.base import Bound
from eaglejax.drafts.detect import check_basis
from eaglejax.drafts.eagle.files.load import bind
from eaglejax.drafts.eagle.files.write import tensors_of_weights, write_draft
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.registry import load_draft
from eaglejax.drafts.tree import chain
from eaglejax.errors import MismatchError
from eaglejax.rotation.rotate import Rotation, rotate_target
from eaglejax.rotation.tables import compare_tables

H, V = 16, 24
ORIGINAL = make_target(target_config(), seed=6)
ROTATED = rotate_target(ORIGINAL, Rotation("random", H, seed=3))
FOLDED = rotate_target(ORIGINAL, Rotation("identity", H))
SILENT = dataclasses.replace(ROTATED, basis=None, rotation=None)
"""Rotated by a tool that says nothing and exports nothing."""


def weights(config, target=ORIGINAL):
    own = make(config, seed=4).weights
    return own | {"embed": target.params["embed"]} if config.own_embedding else own


def test_tables_are_told_apart_by_rows_and_angles():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(500, 32)).astype(np.float32)
    q = Rotation("random", 32).matrix()
    noise = rng.normal(size=table.shape).astype(np.float32)
    cases = {
        "same": (table, table * 3, table.astype(jnp.bfloat16), table + 0.05 * noise),
        "rotated": ((table @ q).astype(np.float32), (table @ q).astype(jnp.bfloat16), table @ -np.eye(32)),
        "different": (noise, table + 0.6 * noise, np.roll(table, 1, axis=0), table @ q + 0.3 * noise),
    }
    for relation, others in cases.items():
        for other in others:
            found = compare_tables(jnp.asarray(table), jnp.asarray(other))
            assert found.relation == relation, (relation, found)
    assert compare_tables(jnp.asarray(table), jnp.asarray(table[:, :8])) is None
    assert compare_tables(jnp.asarray(table), jnp.zeros((500, 32))) is None


def test_ids_decide_where_there_are_any(tmp_path):
    config = draft_config(ORIGINAL.config, aux=(0, 1, 2))
    own = weights(config)
    check_basis(config, own, ORIGINAL)
    here = f"{tmp_path}/draft"
    with pytest.raises(MismatchError) as refusal:
        check_basis(config, own, ROTATED, draft=here)
    text = str(refusal.value)
    assert ROTATED.basis in text
    assert f"`eaglejax align --draft {here} --target 'random llama' --out {here}-aligned`" in text
    assert "align=True" in text
    aligned = dataclasses.replace(config, basis=ROTATED.basis)
    check_basis(aligned, own, ROTATED)
    other = rotate_target(ORIGINAL, Rotation("hadamard", H))
    with pytest.raises(
        MismatchError, match=f"aligned to basis {ROTATED.basis}, random llama is in basis {other.basis}"
    ):
        check_basis(aligned, own, other)
    with pytest.raises(MismatchError, match="does not say that it is rotated"):
        check_basis(aligned, own, ORIGINAL)
    with pytest.raises(MismatchError, match="--method procrustes --original-target T0"):
        check_basis(config, own, dataclasses.replace(ROTATED, rotation=None))


def test_folding_norms_alone_concerns_those_who_read_behind_a_norm_or_borrow_the_head():
    third = draft_config(ORIGINAL.config, aux=(0, 1, 2))
    check_basis(third, weights(third), FOLDED)
    borrows = draft_config(ORIGINAL.config, aux=(0, 1, 2), own_head=False)
    first = draft_config(ORIGINAL.config, 1)
    for config in (borrows, first):
        with pytest.raises(MismatchError, match="is rotated"):
            check_basis(config, weights(config), FOLDED)


def test_a_rotation_without_a_word_is_seen_in_the_drafts_own_embedding(tmp_path):
    config = draft_config(ORIGINAL.config, aux=(0, 1, 2), own_embedding=True)
    own = weights(config)
    with pytest.raises(MismatchError, match="seems to be rotated without saying so"):
        check_basis(config, own, SILENT)
    check_basis(config, own, SILENT, look=False)
    check_basis(config, weights(config, SILENT), SILENT)
    write_draft(tmp_path / "d", config, tensors_of_weights(config, own), None, to="eaglejax")
    load_draft(tmp_path / "d", ORIGINAL)
    with pytest.raises(MismatchError, match="rotated without saying so"):
        load_draft(tmp_path / "d", SILENT)
    # Once aligned (by a recovered matrix) it still ships the original embedding, which is how it is known.
    aligned = dataclasses.replace(config, basis=ROTATED.basis)
    check_basis(aligned, own, SILENT)
    with pytest.raises(MismatchError, match="is not that rotated model"):
        check_basis(aligned, own, ORIGINAL)


def test_generate_refuses_a_bound_draft_before_it_decodes():
    config = draft_config(ORIGINAL.config, aux=(0, 1, 2))
    params = bind(config, weights(config), ORIGINAL)
    bound = Bound(Eagle(config, chain(2)), params)
    with pytest.raises(MismatchError, match="made for the original model"):
        ej.generate(ROTATED, [1, 2, 3], proposer=bound, max_new_tokens=4)
