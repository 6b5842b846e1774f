"""Where weights start: what the closed-form start promises, warm starts from files, and their refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import HEAD_DIM, HEADS, HIDDEN
from train_tools import draft_config

from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle.files.write import tensors_of_weights, write_draft
from eaglejax.drafts.eagle.model import EagleParams, init_eagle
from eaglejax.drafts.eagle.unroll import unroll
from eaglejax.drafts.registry import load_draft
from eaglejax.errors import ConfigError, EaglejaxError, MismatchError
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import random_target
from eaglejax.nn.cache import Placement
from eaglejax.nn.mlp import gated_mlp
from eaglejax.nn.norm import rms_norm
from eaglejax.nn.rope import RopeConfig
from eaglejax.nn.visible import Causal
from eaglejax.train.eagle import warm
from eaglejax.train.eagle.start import draft_config as new_config
from eaglejax.train.eagle.start import fit_data
from eaglejax.train.features import boundaries, target_features
from eaglejax.train.packing import assemble
from eaglejax.train.plan import make_plan
from eaglejax.train.prepare import Data, planned_config, prepare_draft
from eaglejax.train.samples import Report, Sample
from eaglejax.train.settings import DataSettings, DraftSettings, RunSettings, TrainSettings
from eaglejax.train.trainer import export


def text(length, seed):
    rng = np.random.default_rng(seed)
    start = int(rng.integers(20, 200))
    ids = np.asarray([start + (3 * i + int(rng.integers(2))) % 40 for i in range(length)], np.int32)
    return Sample(ids, np.arange(length) > 4, f"s{seed}")


SAMPLES = [text(48, seed) for seed in range(60)]


@pytest.fixture(scope="module")
def rows(target):
    return fit_data(target, (2, 3, 4), SAMPLES, 64, 4096)


def settings_with(**changes):
    draft = DraftSettings(**({"aux": (2, 3, 4), "vocab": 64, "intermediate_size": 40} | changes))
    data = DataSettings(row_tokens=64, overlap=8)
    return TrainSettings(out="x", data=data, draft=draft, run=RunSettings(compute_dtype="float32"))


def test_the_middle_state_is_what_the_last_mlp_turns_into_the_last_boundary(target, rows):
    """last(t) = middle(t) + mlp(middle(t)); a row pairs t with t + 1, so neighbours are compared."""
    layer = target.params["layers"][-1]
    here = np.arange(20)  # rows of one text follow each other
    middle = rows.middle[here]
    x = middle / np.sqrt(np.mean(middle**2, -1, keepdims=True) + target.config.norm_eps)
    gate = x @ np.asarray(layer["gate"])
    out = middle + (gate / (1 + np.exp(-gate)) * (x @ np.asarray(layer["up"]))) @ np.asarray(layer["down"])
    np.testing.assert_allclose(out, rows.last[here + 1], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(rows.aux[:, -1], rows.last, rtol=1e-6)


def test_a_target_with_its_last_block_in_two_is_the_same_function(target):
    batch = assemble(SAMPLES[:1], 64)
    params, config = warm.split_last_block(target)
    n = target.config.num_layers
    whole = target_features(target.params, target.config, batch, (1, n - 1, n)).aux
    split = boundaries(params, config, batch, (1, n - 1, n + 1))
    np.testing.assert_allclose(split, whole, rtol=1e-6, atol=1e-6)


def test_a_norm_behind_the_targets_mlp_becomes_a_scale_of_what_the_draft_writes():
    """Gemma's: the block adds norm(mlp(middle)), the draft's adds mlp(middle)."""
    model = ModelConfig(
        family="gemma3",
        vocab_size=264,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_layers=3,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position=128,
        rope=RopeConfig(),
        query_scale=HEAD_DIM**-0.5,
        activation="gelu_tanh",
        norm_offset=True,
        sandwich_norms=True,
        embed_scale=HIDDEN**0.5,
    )
    target = random_target(model)
    config = new_config(settings_with(aux=(1, 2, 3), intermediate_size=48, vocab=None).draft, target, 3)
    found = fit_data(target, config.aux, SAMPLES[:20], 64, 4096)
    weights = warm.fitted_weights(config, target, found, 0)
    layer, here = weights["layers"][0], np.arange(40)
    middle = jnp.asarray(found.middle[here])
    written = gated_mlp(rms_norm(middle, layer["mlp_norm"], config.norm_eps), layer, config.activation)
    wanted = found.last[here + 1] - found.middle[here]
    error = np.linalg.norm(written - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert np.median(error) < 0.2
    # As the MLP writes it, without that scale, it is an order of magnitude away.
    ratio = np.linalg.norm(target.params["layers"][-1]["down"]) / np.linalg.norm(layer["down"])
    assert not 0.2 < ratio < 5
    with pytest.raises(ConfigError, match="use start 'fit' or 'random'"):
        warm.layer_weights(config, target, 0)


def test_the_fitted_start_writes_the_linear_guess_of_the_next_state_at_every_step(target, rows):
    """Before any training, what the attention adds is the ridge guess, for true features and for fed-back
    ones."""
    config = dataclasses.replace(draft_config(intermediate_size=48), num_kv_heads=HEADS)
    weights = warm.fitted_weights(config, target, rows, 0, heads=HEADS)
    layer = weights["layers"][0]
    last, e = rows.last, rows.embedding

    def normed(x):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config.norm_eps)

    z = np.concatenate([normed(e), normed(last)], 1)
    maps = warm.ridge(z, rows.middle - last)
    wanted = last + z @ maps
    # All heads together span every dimension, so nothing of the guess is lost on the way through v and o.
    guess = last + (z @ np.asarray(layer["v"])) @ np.asarray(layer["o"])
    np.testing.assert_allclose(guess, wanted, rtol=1e-2, atol=1e-2)
    error = np.linalg.norm(guess - rows.middle) / np.linalg.norm(rows.middle)
    nothing = np.linalg.norm(last - rows.middle) / np.linalg.norm(rows.middle)
    assert error < 0.8 * nothing
    np.testing.assert_array_equal(np.asarray(weights["fc"])[-HIDDEN:], np.eye(HIDDEN))


class Memory:
    """A layer's memory that attends as a function says."""

    def __init__(self, attention):
        self.attention = attention

    def attend(self, q, k, v, at, **options):
        return self.attention(q, k, v), self


def run_backbone(params, config, feature, tokens, attention):
    at = Placement(jnp.zeros(1, jnp.int32), jnp.arange(tokens.shape[1])[None], Causal())
    memories = [Memory(attention)] * config.num_layers
    return eagle_model.backbone(params, config, feature, tokens, memories, at)[0]


def test_heads_of_the_fitted_start_attend_to_their_own_position(target, rows):
    config = dataclasses.replace(draft_config(), num_kv_heads=HEADS)
    # Real models have directions that hardly vary; random ones have none, so one is put in.
    last = rows.last.copy()
    last[:, 0] = 4 * np.linalg.norm(last, axis=1)
    aux = rows.aux.copy()
    aux[:, -1] = last
    rows = dataclasses.replace(rows, last=last, aux=aux)
    weights = warm.fitted_weights(config, target, rows, 0, heads=2)
    captured = []

    def attention(q, k, v):
        captured.append((q, k))
        return jnp.zeros_like(v)

    tokens = jnp.asarray([SAMPLES[0].ids[1:33]])
    params = EagleParams(weights, embed=target.params["embed"])
    feature = jnp.asarray(rows.last[None, :32])
    run_backbone(params, config, feature, tokens, attention)
    q, k = (np.asarray(x[0, :, :2]) for x in captured[0])
    scores = np.einsum("thd,shd->hts", q, k) * HEAD_DIM**-0.5
    scores = np.where(np.tril(np.ones((32, 32), bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    own = np.einsum("htt->ht", shares) / shares.sum(-1)
    assert np.median(own) > 0.8


def test_the_layer_start_is_the_targets_last_layer_on_the_features_half(target):
    config = draft_config(intermediate_size=48)
    weights = warm.layer_weights(config, target, 0)
    last, layer = target.params["layers"][-1], weights["layers"][0]
    for name in "qkv":
        np.testing.assert_array_equal(np.asarray(layer[name])[HIDDEN:], last[name])
        assert np.abs(np.asarray(layer[name])[:HIDDEN]).max() < 0.2
    for name in ("o", "gate", "up", "down"):
        np.testing.assert_array_equal(layer[name], last[name])
    # With twice the heads each of the target's is there twice, and the two together write what it writes.
    wide = warm.layer_weights(dataclasses.replace(config, num_heads=2 * HEADS), target, 0)["layers"][0]
    q = np.asarray(wide["q"])[HIDDEN:].reshape(HIDDEN, HEADS, 2, HEAD_DIM)
    np.testing.assert_array_equal(q[:, :, 0], q[:, :, 1])
    np.testing.assert_array_equal(q[:, :, 0].reshape(HIDDEN, -1), last["q"])
    both = np.asarray(wide["o"]).reshape(HEADS, 2, HEAD_DIM, HIDDEN)
    np.testing.assert_allclose(both.sum(1).reshape(-1, HIDDEN), last["o"], rtol=1e-6)
    narrow = warm.layer_weights(dataclasses.replace(config, num_heads=HEADS // 2), target, 0)["layers"][0]
    theirs = np.asarray(last["o"]).reshape(HEADS, HEAD_DIM, HIDDEN)[::2]
    np.testing.assert_array_equal(narrow["o"], theirs.reshape(-1, HIDDEN))
    feature = np.random.default_rng(0).normal(size=(1, 3, 3, HIDDEN)).astype(np.float32)
    fused = eagle_model.fuse(EagleParams(weights), config, jnp.asarray(feature))
    np.testing.assert_allclose(fused, feature[:, :, 2], rtol=1e-6)


@pytest.mark.parametrize("experts", [0, 4])
def test_a_deeper_draft_starts_as_the_draft_of_one_layer_and_every_branch_can_learn(target, rows, experts):
    shallow, deep = (
        new_config(settings_with(experts=experts, num_layers=n).draft, target, 3).fit(target.config)
        for n in (1, 3)
    )
    tokens = jnp.asarray([SAMPLES[0].ids[1:17]])
    feature = jnp.asarray(rows.last[None, :16])

    def states(weights, config):
        params = EagleParams(weights, embed=target.params["embed"])
        return run_backbone(params, config, feature, tokens, lambda q, k, v: v)

    one, three = (warm.fitted_weights(config, target, rows, 0) for config in (shallow, deep))
    np.testing.assert_array_equal(states(one, shallow), states(three, deep))
    gradient = jax.grad(lambda w: jnp.sum(states(w, deep) ** 2))(three)
    for layer in gradient["layers"][1:]:
        assert jnp.abs(layer["o"]).max() > 0
        assert jnp.abs(layer.get("experts", layer)["down"]).max() > 0


def test_a_new_draft_has_the_targets_rows_as_its_head_and_goes_on_from_its_export(target, tmp_path):
    settings = settings_with()
    data = Data(SAMPLES[:20], [], Report())
    draft = prepare_draft(settings, target, data)
    head = np.asarray(draft.complete(draft.weights)["head"])
    np.testing.assert_array_equal(head, np.asarray(target.params["head"])[:, draft.ids])
    assert "head" not in draft.weights
    folder = export(tmp_path / "draft", draft, draft.weights, settings, dtype=np.float32)
    again = prepare_draft(settings_with(start=str(folder)), target, data)
    assert again.config.aux == (2, 3, 4)
    assert np.array_equal(again.ids, draft.ids)
    for name in ("q", "gate"):
        np.testing.assert_array_equal(again.weights["layers"][0][name], draft.weights["layers"][0][name])
    bound = load_draft(folder, target)
    np.testing.assert_array_equal(bound.params.ids, draft.ids)
    tokens = jnp.asarray([SAMPLES[0].ids[:16]])
    features = jnp.asarray(np.random.default_rng(0).normal(size=(1, 16, 3, HIDDEN)), jnp.float32)
    ours = draft.frozen.replace(weights=draft.weights)
    a, b = (unroll(p, draft.config, features, tokens, 2)[1] for p in (ours, bound.params))
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    trained = prepare_draft(settings_with(start=str(folder), train_head=True), target, data)
    np.testing.assert_array_equal(trained.weights["head"], head)


def published(folder, **changes):
    """A draft as another project ships it: random weights, parts of its own."""
    config = draft_config(**({"own_embedding": True, "aux": (1, 2, 3)} | changes))
    weights = init_eagle(config, jax.random.key(5))
    ids = np.arange(64, dtype=np.int32) * 4 if config.reduced else None
    write_draft(folder, config, tensors_of_weights(config, weights), ids, to="eaglejax")
    return str(folder), weights


@pytest.mark.parametrize("train_head", [False, True])
def test_a_published_draft_with_an_embedding_of_its_own_is_gone_on_from(target, tmp_path, train_head):
    start, weights = published(tmp_path / "theirs")
    settings = settings_with(start=start, aux=(), vocab=None, intermediate_size=None, train_head=train_head)
    settings = dataclasses.replace(settings, run=RunSettings())  # computes in bfloat16
    data = Data(SAMPLES[:20], [], Report())
    draft = prepare_draft(settings, target, data)
    assert draft.config.aux == planned_config(settings, target).aux == (1, 2, 3)
    assert ("head" in draft.weights) == train_head
    assert "embed" not in draft.weights
    plan = make_plan(settings, target, data)
    assert plan.trained_parameters == sum(w.size for w in jax.tree.leaves(draft.weights))
    # What is not trained comes out as it went in, whatever the forward computes in.
    folder = export(tmp_path / "ours", draft, draft.weights, settings, dtype=np.float32)
    for name, wanted in (("embed", weights["embed"]), ("head", weights["head"])):
        np.testing.assert_array_equal(load_draft(folder, target).params.weights[name], wanted)
    # The forward reads that embedding, not the target's.
    batch = assemble(SAMPLES[:1], 64)
    features = jnp.asarray(np.random.default_rng(0).normal(size=(1, 64, 3, HIDDEN)), jnp.bfloat16)
    cast = draft.frozen.replace(weights=eagle_model.cast(draft.weights, draft.config, jnp.bfloat16))
    whole = EagleParams(eagle_model.cast(weights, draft.config, jnp.bfloat16))
    a, b = (unroll(p, draft.config, features, jnp.asarray(batch.tokens), 1)[0] for p in (cast, whole))
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_boundaries_of_an_existing_draft_can_be_named_and_its_shape_cannot_be_changed(target, tmp_path):
    start, _ = published(tmp_path / "theirs")
    data = Data(SAMPLES[:4], [], Report())

    def settings(**changes):
        shape = {"start": start, "aux": (), "vocab": None, "intermediate_size": None}
        return settings_with(**(shape | changes))

    assert planned_config(settings(aux=(2, 3, 4)), target).aux == (2, 3, 4)
    for changes, words in (
        ({"vocab": 32}, "draft.vocab is 32 and the draft's 64"),
        ({"num_layers": 2}, "draft.num_layers is 2 and the draft's 1"),
        ({"intermediate_size": 16, "experts": 4}, "draft.experts is 4 and the draft's 0"),
        ({"target_rows": True, "vocab": 64}, "draft.target_rows is True"),
    ):
        with pytest.raises(ConfigError, match=words):
            prepare_draft(settings(**changes), target, data)
    borrowing, theirs = published(tmp_path / "rows", own_head=False, target_rows=True)
    # Rows of the target's head were not trained: another number of them can be read.
    wider = settings(start=borrowing, vocab=80)
    assert planned_config(wider, target).draft_vocab_size == 80
    draft = prepare_draft(wider, target, data)
    np.testing.assert_array_equal(draft.weights["fc"], theirs["fc"])
    bound = load_draft(export(tmp_path / "wider", draft, draft.weights, wider, dtype=np.float32), target)
    np.testing.assert_array_equal(bound.params.ids, draft.ids)
    np.testing.assert_array_equal(bound.params.head, np.asarray(target.params["head"])[:, draft.ids])
    assert set(SAMPLES[0].ids[5:].tolist()) <= set(draft.ids.tolist())
    same = prepare_draft(settings(start=borrowing, vocab=64), target, data)
    assert same.ids.tolist() == [4 * n for n in range(64)]
    with pytest.raises(ConfigError, match=r"train_head needs a head of the draft's own"):
        prepare_draft(settings(start=borrowing, train_head=True), target, data)
    with pytest.raises(MismatchError, match="is rotated"):
        prepare_draft(settings(), dataclasses.replace(target, basis="0123abcd"), data)


def test_starts_that_cannot_be_are_refused(target):
    data = Data(SAMPLES[:2], [], Report())
    short = Data([Sample(text(5, n).ids, np.ones(5, bool), "short") for n in (0, 1)], [], Report())
    for changes, words in (
        ({"intermediate_size": 400}, "not 400"),
        ({"num_kv_heads": 2}, "key/value heads"),
        ({}, "needs texts of more than 5 tokens, and the first 2 samples are shorter"),
        ({"start": "layer", "head_dim": 16}, "head_dim 8"),
        ({"start": "no/such/draft-folder-here"}, "names no model"),
    ):
        with pytest.raises(EaglejaxError, match=words):
            prepare_draft(settings_with(**changes), target, data if changes else short)


def test_eagle1_drafts_start_at_random_with_the_targets_own_head(target):
    config = new_config(DraftSettings(start="random"), target, 1)
    assert (config.own_head, config.draft_vocab_size, config.aux) == (False, target.config.vocab_size, ())
    weights = warm.random_weights(config, target, 0)
    assert "head" not in weights
