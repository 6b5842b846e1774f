"""One update: the same whatever the accumulation, recomputation or number of devices; Muon; W&B."""

import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_model import VOCAB
from train_tools import draft_config, packed

from eaglejax.drafts.eagle_model import EagleParams, init_eagle
from eaglejax.errors import ConfigError
from eaglejax.train import trainer
from eaglejax.train.logs import WandbLog
from eaglejax.train.objectives import Head, Objective
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


def gradient_step(batches, *, remat=False, transform=None):
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
        remat=remat,
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


@pytest.mark.slow
def test_recomputation_changes_nothing(whole):
    assert_same(gradient_step([joined()], remat=True), whole)


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


TWO_DEVICES = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
import test_update as t
from eaglejax.train.objectives import Objective
from eaglejax.train.state import data_mesh, init_state, make_update, micro_batches, replicate, shard_batch

mesh = data_mesh()
assert mesh.size == 2
transform = optax.sgd(1.0)
state = replicate(init_state(t.WEIGHTS, transform), mesh)
batch = shard_batch(micro_batches([t.joined()]), mesh, leading=1)
assert len({s.device for s in batch.tokens.addressable_shards}) == 2
assert batch.tokens.addressable_shards[0].data.shape == (1, 1, 24)
objective = Objective(steps=2)
frozen, head = replicate(t.FROZEN, mesh), replicate(t.HEAD, mesh)
update = make_update(t.CONFIG, objective, transform, frozen, head, compute_dtype=jnp.float32, seed=0)
state, report = update(state, batch)
leaves, _ = jax.tree_util.tree_flatten_with_path(state.weights)
flat = {jax.tree_util.keystr(path): np.asarray(weight) for path, weight in leaves}
np.savez("found.npz", loss=np.asarray(report.loss), **flat)
"""


def test_rows_that_devices_cannot_share_are_refused(monkeypatch):
    monkeypatch.setattr(trainer, "data_mesh", lambda: types.SimpleNamespace(size=2))
    settings = TrainSettings(
        out="x", data=DataSettings(train=(SourceFile("a.jsonl"),)), run=RunSettings(rows=3)
    )
    with pytest.raises(ConfigError, match=r"run\.rows 3 must be a multiple of the 2 devices"):
        trainer.Trainer(settings, None, None, None)


def test_two_devices_do_what_one_does(tmp_path, whole):
    """In a process of its own: how many devices a CPU has is settled when jax starts."""
    script = tmp_path / "two.py"
    script.write_text(TWO_DEVICES)
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), str(here.parent.parent)]
    env = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2",
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = np.load(tmp_path / "found.npz")
    weights, report = whole
    np.testing.assert_allclose(found["loss"], report.loss, rtol=1e-5)
    for path, weight in jax.tree_util.tree_flatten_with_path(weights)[0]:
        np.testing.assert_allclose(found[jax.tree_util.keystr(path)], weight, rtol=1e-5, atol=1e-6)


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
    options, *rest = calls
    assert options["config"] == {"run": {"updates": 3}}
    assert options["dir"] == str(tmp_path)
    assert rest == [(2, {"train/objective": 1.5, "train/accuracy": [0.1, 0.2]}), "finish"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb is not installed"):
        WandbLog(tmp_path, {})
