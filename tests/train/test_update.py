"""One update: the same whatever the accumulation and recomputation; Muon; W&B."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_model import VOCAB
from train_tools import draft_config, packed

from eaglejax.drafts.eagle.model import EagleParams, init_eagle
from eaglejax.drafts.passes import step_attention
from eaglejax.errors import ConfigError
from eaglejax.train import trainer
from eaglejax.train.attention import training_attention
from eaglejax.train.chain import trained_rows
from eaglejax.train.eagle import family as module
from eaglejax.train.eagle.objective import objective_loss
from eaglejax.train.logs import WandbLog
from eaglejax.train.objective import Objective
from eaglejax.train.objectives import Head
from eaglejax.train.optimizers import optimizer
from eaglejax.train.settings import DataSettings, OptimizerSettings, RunSettings, SourceFile, TrainSettings
from eaglejax.train.state import init_state, make_update, micro_batches

CONFIG = draft_config()
WEIGHTS = init_eagle(CONFIG, jax.random.key(0))
RNG = np.random.default_rng(0)
FROZEN = EagleParams({}, embed=jnp.asarray(RNG.normal(size=(VOCAB, 32)), jnp.float32))
HEAD = Head(jnp.asarray(RNG.normal(size=(32, 64)), jnp.float32), jnp.arange(64) * 3)
# Uneven on purpose: means of means over micro-batches would come out otherwise.
ROWS = [packed(15, 8, capacity=24, seed=1), packed(5, capacity=24, seed=2)]


def gradient_step(batches, *, transform=None):
    """(weights after one update, report); plain descent at rate 1 changes them by the gradient."""
    transform = optax.sgd(1.0) if transform is None else transform
    update = make_update(
        CONFIG,
        Objective(steps=2),
        transform,
        FROZEN,
        HEAD,
        compute_dtype=jnp.float32,
        seed=0,
    )
    state, report = update(init_state(WEIGHTS, transform), micro_batches(batches))
    return state.weights, report


def joined():
    """The rows as one batch of two."""
    return jax.tree.map(lambda *x: jnp.concatenate(x), *ROWS)


@pytest.fixture(scope="module")
def whole():
    return gradient_step([joined()])


def assert_same(found, wanted):
    (weights, report), (others, other) = found, wanted
    np.testing.assert_allclose(report.loss, other.loss, rtol=1e-5)
    np.testing.assert_allclose(report.gradient_norm, other.gradient_norm, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), weights, others)


def test_accumulated_micro_batches_are_one_larger_batch(whole):
    found = gradient_step(ROWS)
    assert_same(found, whole)
    np.testing.assert_allclose(found[1].metrics.rows, whole[1].metrics.rows)
    assert float(whole[1].gradient_norm) > 0.01


def test_the_program_does_not_grow_with_the_micro_batches(monkeypatch):
    traced, real = [], module.objective_loss

    def counted(*args, **options):
        traced.append(1)
        return real(*args, **options)

    monkeypatch.setattr(module, "objective_loss", counted)
    transform = optax.sgd(1.0)
    update = make_update(
        CONFIG, Objective(steps=1), transform, FROZEN, HEAD, compute_dtype=jnp.float32, seed=0
    )
    jax.eval_shape(update, init_state(WEIGHTS, transform), micro_batches(ROWS * 4))
    assert len(traced) <= 2


def gradient_of(remat, batch):
    """The compiled gradient of the weights."""
    objective = Objective(steps=3)

    def loss(weights):
        attend = training_attention(batch.documents, windows=False, remat=remat)
        rows, params = trained_rows(objective, HEAD, batch), FROZEN.replace(weights=weights)
        return objective_loss(params, CONFIG, objective, HEAD, batch, rows, attention=attend)[0]

    return jax.jit(jax.grad(loss)).lower(WEIGHTS).compile()


def test_attention_that_is_recomputed_gives_the_same_gradient_in_less_memory():
    batch = packed(150, 70, 20, capacity=256, seed=3)
    kept, again = (gradient_of(remat, batch) for remat in (False, True))
    sizes = [form.memory_analysis().temp_size_in_bytes for form in (again, kept)]
    assert sizes[0] < 0.5 * sizes[1]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), again(WEIGHTS), kept(WEIGHTS)
    )


def test_the_attention_of_a_draft_with_windows_is_never_recomputed():
    documents = jnp.ones((1, 4), jnp.int32)
    for windows in (False, True):
        assert training_attention(documents, windows=windows, remat=False) is step_attention
    with pytest.raises(ConfigError, match="with windows"):
        training_attention(documents, windows=True, remat=True)


FIRST = 1 + 0.9 / 1.9
"""First step of Adam with Nesterov momentum and beta1 = 0.9, in learning rates."""


def muon(rate):
    return optimizer(
        OptimizerSettings(name="muon", learning_rate=rate, warmup=0, schedule="constant", clip=0.0), 5
    )


def test_muon_steps_have_one_size_in_all_directions_and_adamws_root_mean_square():
    rate, rng = 1e-2, np.random.default_rng(0)
    tall = rng.normal(size=(64, 16)) * np.geomspace(1, 30, 16)  # directions of very unequal gradients
    gradients = {
        "tall": jnp.asarray(tall, jnp.float32),
        "norm": jnp.asarray(rng.normal(size=16), jnp.float32),
    }
    weights = jax.tree.map(jnp.zeros_like, gradients)
    transform = muon(rate)
    steps, _ = transform.update(gradients, transform.init(weights), weights)
    sizes = np.linalg.svd(np.asarray(steps["tall"]), compute_uv=False)
    assert sizes[-1] > 0.5 * sizes[0]
    assert np.linalg.svd(tall, compute_uv=False)[-1] < 0.05 * np.linalg.svd(tall, compute_uv=False)[0]
    assert np.sqrt(np.mean(np.square(steps["tall"]))) == pytest.approx(0.2 * rate, rel=0.25)
    np.testing.assert_allclose(np.abs(steps["norm"]), rate * FIRST, rtol=1e-3)


def test_an_update_with_muon_treats_matrices_and_vectors_each_its_way():
    rate = 1e-2
    weights, report = gradient_step([joined()], transform=muon(rate))
    assert bool(report.applied)
    layer = {n: np.abs(np.asarray(weights["layers"][0][n] - w)) for n, w in WEIGHTS["layers"][0].items()}
    # Adam's first step moves every number alike; Muon's moves those of a matrix unequally.
    np.testing.assert_allclose(layer["mlp_norm"], rate * FIRST, rtol=0.05)
    for name in ("q", "o", "gate"):
        assert layer[name].max() > 3 * np.median(layer[name]) > 0


def test_rows_that_devices_cannot_share_are_refused(monkeypatch):
    monkeypatch.setattr(trainer, "data_mesh", lambda: types.SimpleNamespace(size=2))
    settings = TrainSettings(
        out="x", data=DataSettings(train=(SourceFile("a.jsonl"),)), run=RunSettings(rows=3)
    )
    with pytest.raises(ConfigError, match=r"run\.rows 3 must be a multiple of the 2 devices"):
        trainer.Trainer(settings, None, None, None)


def test_weights_and_biases_gets_settings_and_every_value_and_its_absence_is_told(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish")
    )
    fake = types.SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = WandbLog(tmp_path, {"run": {"updates": 3}})
    log.write(2, {"train/objective": 1.5, "train/accuracy": [0.1, 0.2]})
    log.close()
    WandbLog(tmp_path, {})
    WandbLog(tmp_path / "other", {})
    same, other = (calls.pop(-2), calls.pop())
    options, *rest = calls
    assert options["id"] == same["id"] != other["id"]
    assert options["config"] == {"run": {"updates": 3}}
    assert options["dir"] == str(tmp_path)
    assert rest == [(2, {"train/objective": 1.5, "train/accuracy": [0.1, 0.2]}), "finish"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb is not installed"):
        WandbLog(tmp_path, {})
