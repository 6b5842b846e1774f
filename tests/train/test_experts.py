"""Drafts with a mixture of experts: shape, start, balance, and files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_tools import EXPERTS, draft_config, leaves_equal, packed

from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.files.load import read_weights
from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.drafts.eagle.files.write import FORMS, tensors_of_weights, write_draft
from eaglejax.drafts.eagle.model import EagleParams, init_eagle
from eaglejax.drafts.registry import load_draft
from eaglejax.errors import CheckpointError, ConfigError
from eaglejax.nn.cache import Placement
from eaglejax.nn.visible import Causal
from eaglejax.train.chain import trained_rows
from eaglejax.train.eagle import warm
from eaglejax.train.eagle.objective import objective_loss
from eaglejax.train.eagle.start import draft_config as new_config
from eaglejax.train.losses import balance
from eaglejax.train.objective import Objective
from eaglejax.train.objectives import Head
from eaglejax.train.settings import DraftSettings

CONFIG = draft_config(**EXPERTS, own_embedding=True)
IDS = np.arange(64) * 3


@pytest.fixture(scope="module")
def weights():
    return init_eagle(CONFIG, jax.random.key(0))


@pytest.fixture
def written(weights, tmp_path):
    write_draft(tmp_path / "draft", CONFIG, tensors_of_weights(CONFIG, weights), IDS, to="eaglejax")
    return tmp_path / "draft"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 4}, "all positive"),
        (EXPERTS | {"moe_intermediate_size": 11}, "make 22"),
        (EXPERTS | {"num_experts": 2}, "nothing to choose"),
        (EXPERTS | {"experts_per_token": -1}, "all positive"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        draft_config(**changes)


def test_balance_is_one_a_row_when_even_and_more_the_less_even():
    mask = np.zeros((2, 8), bool)
    mask[0, 1:7], mask[1, :3] = True, True
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 8, 4)).astype(np.float32)
    total = 0.0
    for row, here in zip(logits, mask, strict=True):
        p = np.exp(row[here]) / np.exp(row[here]).sum(-1, keepdims=True)
        load = np.zeros(4)
        for x in row[here]:
            load[np.argsort(-x)[:2]] += 1 / (2 * here.sum())
        total += here.sum() * 4 * (load * p.mean(0)).sum()
    np.testing.assert_allclose(balance(jnp.asarray(logits), jnp.asarray(mask), 2), total, rtol=1e-5)
    parts = [balance(jnp.asarray(logits[n : n + 1]), jnp.asarray(mask[n : n + 1]), 2) for n in (0, 1)]
    np.testing.assert_allclose(sum(parts), total, rtol=1e-5)  # however rows are batched
    one_expert = np.zeros((2, 8, 4), np.float32)
    one_expert[..., :2] = 50.0
    np.testing.assert_allclose(balance(jnp.asarray(one_expert), jnp.asarray(mask), 2), 9 * 4 / 2, rtol=1e-5)
    # Rows turn by turn to each pair of experts, all equally likely on the mean: even.
    even = np.zeros((1, 8, 4), np.float32)
    even[0, ::2, :2] = even[0, 1::2, 2:] = 50.0
    np.testing.assert_allclose(balance(jnp.asarray(even), jnp.ones((1, 8), bool), 2), 8.0, rtol=1e-5)


def test_the_balance_term_reaches_the_router_alone_and_padding_does_not_count(weights):
    """Its share of the gradient comes out as the difference of two runs."""
    batch = packed(9, 7, capacity=24)
    head = Head(jnp.asarray(np.random.default_rng(0).normal(size=(32, 64)), jnp.float32), jnp.asarray(IDS))

    def loss(weights, batch, weight):
        objective = Objective(steps=2, balance_weight=weight)
        rows = trained_rows(objective, head, batch)
        return objective_loss(EagleParams(weights), CONFIG, objective, head, batch, rows)[0]

    gradient = jax.jit(jax.grad(loss), static_argnums=2)
    with_term, without = gradient(weights, batch, 3.0), gradient(weights, batch, 0.0)
    layer, plain = with_term["layers"][0], without["layers"][0]
    assert np.abs(np.asarray(layer["router"] - plain["router"])).max() > 1e-3
    np.testing.assert_array_equal(with_term["head"], without["head"])
    # What stands in the padding changes neither loss nor gradient.
    scrambled = batch.replace(tokens=jnp.where(batch.documents > 0, batch.tokens, 7))
    assert leaves_equal(gradient(weights, scrambled, 3.0), with_term)


class OwnValues:
    """A layer's memory in which each token sees itself alone."""

    def attend(self, q, k, v, at, **options):
        return jnp.repeat(v, q.shape[2] // v.shape[2], axis=2), self


def test_a_start_from_the_targets_layer_is_that_of_a_dense_draft_as_wide_as_one_expert(target):
    settings = DraftSettings(start="layer", aux=(2, 3, 4), vocab=64, experts=3, expert_size=40)
    mixed = new_config(settings, target, 3)
    assert (mixed.num_experts, mixed.intermediate_size) == (3, 80)
    dense = new_config(
        dataclasses.replace(settings, experts=0, intermediate_size=40, expert_size=None), target, 3
    )
    features = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 32)), jnp.float32)
    tokens = jnp.asarray([[3, 4, 5, 6, 7]])

    def state(config):
        params = EagleParams(warm.layer_weights(config, target, 0), embed=target.params["embed"])
        at = Placement(jnp.zeros(1, jnp.int32), jnp.arange(5)[None], Causal())
        return eagle_model.backbone(params, config, features, tokens, [OwnValues()], at)[0]

    np.testing.assert_allclose(state(mixed), state(dense), rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="not 400"):
        warm.layer_weights(new_config(dataclasses.replace(settings, expert_size=400), target, 3), target, 0)


def test_the_own_form_holds_experts_exactly_and_decodes(written, weights, target):
    file = read_draft(written)
    assert file.config == CONFIG
    assert leaves_equal(read_weights(file, jnp.float32), weights)
    names = set(file.store.names())
    assert "layers.0.mlp.experts.3.down_proj.weight" in names
    assert "layers.0.mlp.gate.weight" in names
    assert load_draft(written, target).params.weights["layers"][0]["experts"]["up"].shape == (4, 32, 12)


@pytest.mark.parametrize("form", sorted(set(FORMS) - {"eaglejax"}))
def test_other_forms_refuse_experts_by_name(form, weights, tmp_path):
    with pytest.raises(ConfigError, match="mixture of experts"):
        write_draft(tmp_path / "x", CONFIG, tensors_of_weights(CONFIG, weights), IDS, to=form)


def test_files_that_do_not_say_how_many_experts_a_token_passes_are_refused(written, weights, tmp_path):
    config = json.loads((written / "config.json").read_text())
    del config["eaglejax"]["experts_per_token"]
    (written / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="experts_per_token"):
        read_draft(written)
    tensors = tensors_of_weights(CONFIG, weights)
    del tensors["layers.0.mlp.experts.1.up_proj.weight"]
    write_draft(tmp_path / "gap", CONFIG, tensors, IDS, to="eaglejax")
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj"):
        read_weights(read_draft(tmp_path / "gap"), jnp.float32)
    dense = draft_config(own_embedding=True)
    plain = tensors_of_weights(dense, init_eagle(dense, jax.random.key(0)))
    write_draft(tmp_path / "dense", dense, plain, IDS, to="eaglejax")
    said = json.loads((tmp_path / "dense" / "config.json").read_text())
    said["eaglejax"]["experts_per_token"] = 2
    (tmp_path / "dense" / "config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="holds no experts"):
        read_draft(tmp_path / "dense")
