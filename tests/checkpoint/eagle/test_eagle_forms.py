"""Every draft either comes back from a form as it was or is refused when it is written; eaglejax's own form
holds them all."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_files import FLAT, VD, H, V, convert, make, maps, save, small_target
from hypothesis import strategies as st

from eaglejax.checkpoint.safetensors_io import Pending
from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.load import bind, read_weights
from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.drafts.eagle.files.report import report as describe
from eaglejax.drafts.eagle.files.write import FORMS, tensors_of_weights, write_draft
from eaglejax.drafts.eagle.model import init_eagle
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.nn.rope import RopeConfig

MADE = make()


@functools.cache
def plain_draft(num_aux: int) -> EagleConfig:
    return EagleConfig(
        version=3,
        vocab_size=V,
        draft_vocab_size=V,
        hidden_size=H,
        target_hidden_size=H,
        intermediate_size=4,
        num_heads=4,
        num_kv_heads=1,
        head_dim=4,
        num_aux=num_aux,
        head_norm=True,
        own_head=True,
    )


@functools.cache
def plain_tensors(num_aux: int):
    return tensors_of_weights(plain_draft(num_aux), init_eagle(plain_draft(num_aux), jax.random.key(0)))


def written(config, tensors, ids, to, **options):
    """The draft as read back, or None where the writer refuses."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "draft"
        try:
            write_draft(out, config, tensors, ids, to=to, **options)
        except ConfigError:
            assert not out.exists()
            return None
        return read_draft(out)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    aux=st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
    ascending=st.booleans(),
)
@hypothesis.example(aux=[1, 2, 4], ascending=True)
@hypothesis.example(aux=[0, 1, 2], ascending=True)
@hypothesis.example(aux=[4, 2, 3], ascending=False)
@hypothesis.example(aux=[2, 3, 4], ascending=True)
def test_boundaries_are_written_as_they_are_or_refused(aux, ascending):
    """Whatever the list and the form: the reader finds the very boundaries, or nothing was written (A64)."""
    aux = sorted(aux) if ascending else aux
    config = dataclasses.replace(plain_draft(len(aux)), aux=tuple(aux))
    for to in FORMS:
        target = small_target() if to == "safeailab" else None
        file = written(config, plain_tensors(len(aux)), None, to, target=target)
        if file is None:
            assert to != "eaglejax" or aux != sorted(aux), "the form without limits must hold it"
            assert to != "speculators" or aux != sorted(aux)
            continue
        got = file.config if target is None else file.config.fit(target.config)
        assert got.aux == config.aux


def test_boundaries_that_would_be_misread_are_refused_by_name(tmp_path):
    """1, 2, 4 written for readers that take a list from 1 on for block numbers would come back as 2, 3, 5."""
    for aux, text in (((1, 2, 4), "start at 1"), ((0, 1, 2), "boundary 0"), ((4, 2, 3), "do not ascend")):
        config = dataclasses.replace(plain_draft(3), aux=aux)
        for to in ("sglang", "modelopt"):
            with pytest.raises(ConfigError, match=text):
                write_draft(tmp_path / "x", config, plain_tensors(3), None, to=to)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(ids=st.lists(st.integers(0, V - 1), min_size=1, max_size=12, unique=True))
@hypothesis.example(ids=[1, 3, 5])
@hypothesis.example(ids=[0])
def test_vocabulary_maps_are_written_as_they_are_or_refused(ids):
    """A map without neighbours looks like target ids where no t2d stands beside it (A50)."""
    ids = np.sort(np.asarray(ids))
    config = dataclasses.replace(plain_draft(3), draft_vocab_size=len(ids))
    head = np.ones((len(ids), H), np.float32)
    tensors = plain_tensors(3) | {"lm_head.weight": Pending(head.shape, head.dtype, lambda: head)}
    for to in ("sglang", "speculators", "modelopt", "eaglejax"):
        file = written(config, tensors, ids, to)
        if file is None:
            assert to == "modelopt"
            assert np.all(np.diff(ids) > 1)
        else:
            np.testing.assert_array_equal(file.ids, ids)


HELD = [
    {"aux": (1, 2, 4), "norm_before_residual": True, "feed_normed": True, "softcap": 7.5},
    {"head_norm": False, "embed_scale": 4.0, "windows": (3, None, 5), "num_layers": 3, "o_bias": True},
    {"aux": (0, 3), "num_aux": 2, "own_embedding": True, "target_hidden_size": 6, "aux_norm": "each"},
    {"qk_norm": True, "qkv_bias": True, "fc_bias": True, "rope": RopeConfig("linear", factor=2.0)},
    {"draft_vocab_size": 24, "own_head": False, "target_rows": True, "aux": (2, 3, 4)},
    {"own_head": False, "mask_id": 0},
    {"version": 1, "num_aux": 0, "head_norm": False, "embed_scale": 2.0, "fc_bias": True, "own_head": False},
]


@pytest.mark.parametrize("changes", HELD, ids=lambda c: ",".join(c))
def test_the_own_form_holds_every_draft(changes):
    """O7 for settings that the published forms have no place for: configuration, map and weights come
    back."""
    config = dataclasses.replace(plain_draft(3), **changes)
    weights = init_eagle(config, jax.random.key(1))
    ids = MADE.ids if config.reduced else None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "draft"
        write_draft(out, config, tensors_of_weights(config, weights), ids, to="eaglejax")
        file = read_draft(out)
        assert file.config == config
        assert file.layout == "eaglejax"
        np.testing.assert_array_equal(file.ids, ids)
        again = read_weights(file, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, again, weights)


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_rows_of_the_targets_head(tie, tmp_path):
    """A reduced draft that says so reads the target's head at its tokens: the same logits as with a copy of
    those rows in the file, softcap included; other forms get the copy."""
    target = small_target(tie, final_softcap=3.0 if tie else None)
    tensors = {k: v for k, v in MADE.tensors.items() if k != "lm_head.weight"} | maps(MADE)
    config = FLAT | {"eaglejax": {"head": "target_rows", "boundaries": [1, 2, 4]}}
    folder = save(tmp_path / "rows", tensors, config)
    theirs = np.asarray(target.params["embed"] if tie else target.params["head"].T)
    copied = {"head": "own", "boundaries": [1, 2, 4]} | ({"softcap": 3.0} if tie else {})
    other = save(
        tmp_path / "copy", tensors | {"lm_head.weight": theirs[MADE.ids]}, FLAT | {"eaglejax": copied}
    )
    state = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, H)) * 9, jnp.float32)
    logits = []
    for path in (folder, other):
        file = read_draft(path)
        fitted = file.config.fit(target.config)
        params = bind(fitted, read_weights(file, jnp.float32), target, file.ids)
        logits.append(np.asarray(eagle_model.logits(params, fitted, state)))
        assert logits[-1].shape == (2, 3, VD)
    np.testing.assert_allclose(*logits, rtol=1e-6, atol=1e-6)
    file = read_draft(folder)
    assert (file.config.target_rows, file.config.own_head, file.config.aux) == (True, False, (1, 2, 4))
    assert describe(file, target.config)["borrows"] == ["embedding", "rows of the head"]
    again = convert(folder, tmp_path / "again", "eaglejax")
    assert again.config == file.config
    assert set(again.store.names()) == set(tensors)
    usual = save(tmp_path / "usual", tensors, FLAT | {"eaglejax": {"head": "target_rows"}})
    with pytest.raises(ConfigError, match="holds the head"):
        convert(usual, tmp_path / "x", "sglang")
    if tie:
        with pytest.raises(ConfigError, match="softcap"):
            convert(usual, tmp_path / "x", "sglang", target=target)
    else:
        full = convert(usual, tmp_path / "x", "sglang", target=target)
        np.testing.assert_array_equal(full.store.array("lm_head.weight"), theirs[MADE.ids])
        assert full.config.own_head


@pytest.mark.parametrize(
    ("block", "drop", "text"),
    [
        (None, True, "cannot borrow the target's head"),
        ({}, True, "cannot borrow the target's head"),
        ({"boundaries": [2, 3, 4]}, True, "cannot borrow the target's head"),
        ({"head": "target"}, True, "cannot borrow the target's head"),
        ({"head": "own"}, True, "lacks lm_head"),
        ({"head": "target_rows"}, False, "holds lm_head"),
        ({"head": "rows"}, True, "'rows'; it must be one of"),
        ({"heads": "own"}, False, "heads is not known"),
        ({"boundaries": [4, 2, 3]}, False, "must be increasing"),
        ({"softcap": 0}, False, "softcap is 0"),
        ({"windows": [3, 0]}, False, "windows is"),
        ("own", False, "must be an object"),
    ],
)
def test_what_the_own_block_says_must_hold(block, drop, text, tmp_path):
    """A57: a head that is merely missing stays refused; the block and the tensors may not contradict."""
    tensors = {k: v for k, v in MADE.tensors.items() if not (drop and k == "lm_head.weight")} | maps(MADE)
    folder = save(tmp_path / "it", tensors, FLAT | {"eaglejax": block})
    with pytest.raises((CheckpointError, ConfigError), match=text):
        read_draft(folder)
