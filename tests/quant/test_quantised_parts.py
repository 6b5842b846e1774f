"""What training and checkpoints take of a target is what it stands for when everything of it is quantised."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_start import SAMPLES, settings_with
from tiny_model import write_model

import eaglejax as ej
from eaglejax.drafts.borrow import head_matrix
from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.drafts.eagle.files.write import tensors_of_weights, write_draft
from eaglejax.drafts.registry import load_draft
from eaglejax.models.target import Target
from eaglejax.nn.linear import embedding, linear
from eaglejax.quant.array import QuantArray
from eaglejax.quant.online import HadamardInput, plain
from eaglejax.quant.quantize import quantize_array, quantize_target
from eaglejax.quant.schemes import Plan, get_scheme
from eaglejax.rotation.rotate import rotate_target
from eaglejax.train.chain import trained_rows
from eaglejax.train.eagle import warm
from eaglejax.train.eagle.objective import objective_loss
from eaglejax.train.features import with_features
from eaglejax.train.objective import Objective
from eaglejax.train.packing import assemble
from eaglejax.train.prepare import Data, prepare_draft
from eaglejax.train.samples import Report
from eaglejax.train.trainer import export

DATA = Data(SAMPLES[:12], [], Report())
AUX = (1, 2)


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> dict[str, Target]:
    """A float target; all of it in int8, the input of down turned; the same with a tied head."""
    folder = write_model(tmp_path_factory.mktemp("whole") / "model", layers=2)
    source = ej.load_target(folder, dtype="float32")
    params = {name: value for name, value in source.params.items() if name != "head"}
    tied = dataclasses.replace(
        source, params=params, config=dataclasses.replace(source.config, tie_embeddings=True)
    )
    plan = Plan(get_scheme("w8a8"), exclude=())
    return {
        "float": source,
        "untied": quantize_target(rotate_target(source, None, r2=False, r4=True), plan),
        "tied": quantize_target(tied, plan),
    }


def test_the_array_of_a_turned_and_quantised_weight_multiplies_as_it_does(targets):
    wide = targets["float"].params["layers"][0]["down"]
    turned = rotate_target(targets["float"], None, r2=False, r4=True).params["layers"][0]["down"]
    assert isinstance(turned, HadamardInput)
    np.testing.assert_allclose(plain(turned), wide, atol=1e-6)
    packed = HadamardInput(quantize_array(turned.inner, get_scheme("w4a16-g8")))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, wide.shape[0])), jnp.float32)
    np.testing.assert_allclose(x @ plain(packed), packed.matmul(x, transposed=False), atol=1e-5)
    assert plain(packed, "bfloat16").dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_a_head_as_an_array_is_the_quantised_one(targets, name):
    target = targets[name]
    head = target.params["embed" if name == "tied" else "head"]
    assert isinstance(head, QuantArray)
    ids = np.asarray([3, 4, 99])
    found = head_matrix(target, ids)
    whole = np.asarray(head.dequantize().T if name == "tied" else head.dequantize())
    np.testing.assert_array_equal(found, whole[:, ids])
    rows = embedding(target.params["embed"], jnp.asarray(ids))
    np.testing.assert_array_equal(plain(target.params["embed"])[ids], rows)


def test_the_starts_of_a_draft_read_quantised_layers(targets):
    """Within the rounding of int8 they are the starts that the float target gives."""
    wide, target = targets["float"], targets["untied"]
    config = prepare_draft(settings_with(start="layer", aux=AUX), wide, DATA).config
    theirs, ours = (warm.layer_weights(config, t, 0) for t in (wide, target))
    for a, b in zip(jax.tree.leaves(theirs), jax.tree.leaves(ours), strict=True):
        np.testing.assert_allclose(a, b, atol=0.02 * max(1e-3, np.abs(a).max()))
    fitted = prepare_draft(settings_with(aux=AUX), target, DATA)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(fitted.weights))


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_a_draft_for_a_quantised_target_is_taught_by_its_integers_and_goes_to_a_file(targets, tmp_path, name):
    target = targets[name]
    settings = settings_with(start="layer", aux=AUX)
    draft = prepare_draft(settings, target, DATA)
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(7, target.config.hidden_size)), jnp.float32)
    head = target.params["embed" if name == "tied" else "head"]
    asked = linear(hidden, head, transposed=name == "tied", dtype=jnp.float32)
    np.testing.assert_allclose(draft.head.logits(hidden), asked[:, draft.ids], rtol=1e-6, atol=1e-6)
    folder = export(tmp_path / "draft", draft, draft.weights, settings, dtype=np.float32)
    written = load_draft(folder, target)
    np.testing.assert_array_equal(written.params.weights["head"], head_matrix(target, draft.ids))
    np.testing.assert_array_equal(
        embedding(written.params.embed, jnp.arange(5)), plain(target.params["embed"])[:5]
    )


def test_a_borrowed_quantised_head_passes_its_slope_on(targets):
    """EAGLE-1 with its token term alone: nothing but the head stands between the loss and the weights."""
    target = targets["tied"]
    objective = Objective(algorithm="eagle1", steps=1, feature_weight=0.0, token_weight=1.0)
    settings = dataclasses.replace(settings_with(start="random", aux=(), vocab=None), objective=objective)
    draft = prepare_draft(settings, target, DATA)
    assert draft.frozen.head is not None
    batch = with_features(target, jax.tree.map(jnp.asarray, assemble(SAMPLES[:1], 64)), ())

    def loss(weights):
        params = draft.frozen.replace(weights=weights)
        rows = trained_rows(objective, draft.head, batch)
        return objective_loss(params, draft.config, objective, draft.head, batch, rows)[0]

    slope = jax.jit(jax.grad(loss))(draft.weights)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(slope["layers"]))


def test_forms_that_ship_what_a_draft_borrows_get_it_in_full(targets, tmp_path):
    target = targets["untied"]
    settings = settings_with(start="layer", aux=AUX, target_rows=True)
    draft = prepare_draft(settings, target, DATA)
    tensors = tensors_of_weights(draft.config, draft.complete(draft.weights))
    assert "lm_head.weight" not in tensors
    write_draft(tmp_path / "out", draft.config, tensors, draft.ids, to="speculators", target=target)
    written = read_draft(tmp_path / "out").store.array("lm_head.weight")
    np.testing.assert_array_equal(written, np.asarray(head_matrix(target, draft.ids)).T)


def test_a_head_that_is_not_trained_stays_the_one_that_it_was(targets, tmp_path):
    """Going on from a draft whose head is its own does not put the target's in its place."""
    target = targets["float"]
    settings = settings_with(start="layer", aux=AUX)
    draft = prepare_draft(settings, target, DATA)
    own = draft.complete(draft.weights) | {"head": draft.frozen.head + 1}
    write_draft(
        tmp_path / "own", draft.config, tensors_of_weights(draft.config, own), draft.ids, to="eaglejax"
    )
    again = prepare_draft(settings_with(aux=AUX, start=str(tmp_path / "own")), target, DATA)
    np.testing.assert_array_equal(again.complete(again.weights)["head"], own["head"])
