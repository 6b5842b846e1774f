"""A family that is defined in this file alone is recognised, listed, loaded, aligned, inspected and decoded
with, as EAGLE is: no other place knows of it."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from eagle_loop import make_target, target_config

import eaglejax as ej
from eaglejax import pytree
from eaglejax.cli import methods
from eaglejax.cli.inspect import Inspect
from eaglejax.config import SpeculativeConfig
from eaglejax.drafts.align import Reads
from eaglejax.drafts.base import Needs, Proposal
from eaglejax.drafts.family import DraftFamily
from eaglejax.drafts.features import FeatureAdapter
from eaglejax.drafts.files import opened
from eaglejax.drafts.method import DraftMethod
from eaglejax.drafts.registry import load_draft, read_draft, recognise, registered
from eaglejax.drafts.static import OnChain, chain_draft
from eaglejax.errors import CheckpointError, ConfigError, MismatchError
from eaglejax.models.config import FINAL
from eaglejax.rotation.rotate import Rotation, rotate_target
from eaglejax.train import prepare
from eaglejax.train.objective import Objective

TARGET = make_target(target_config(), seed=6)
H, V = TARGET.config.hidden_size, TARGET.config.vocab_size


@dataclasses.dataclass(frozen=True)
class LinearConfig:
    """One matrix on the target's last state, read by the target's head: the token after the next."""

    target_hidden_size: int
    basis: str | None = None
    reads: ClassVar[Reads] = Reads(("final",), embedding=False, head=True)


@pytree.dataclass
class LinearParams:
    mix: jax.Array
    embed: Any = None
    head: Any = None
    adapter: FeatureAdapter = FeatureAdapter()
    tied: bool = pytree.static(default=False)


@dataclasses.dataclass(frozen=True)
class Linear(OnChain):
    config: LinearConfig
    length: int = 1

    @property
    def needs(self) -> Needs:
        return Needs((FINAL,))

    def init(self, params, *, batch, capacity, inputs=()):
        return jnp.zeros((batch, V))

    def observe(self, params, state, seen):
        feature = params.adapter.from_target(seen.features)[:, :, 0]
        logits = feature @ params.mix @ params.head
        last = jnp.maximum(seen.count - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(logits, last, axis=1)[:, 0]
        return jnp.where(seen.count[:, None] > 0, newest, state)

    def propose(self, params, state, root, lengths, rows, keys):
        tokens = jnp.argmax(state, -1)[:, None].astype(jnp.int32)
        return chain_draft(root, tokens, jnp.ones(root.shape, jnp.int32), Proposal()), state


@dataclasses.dataclass(frozen=True)
class LinearFile:
    path: Any
    config: LinearConfig
    mix: np.ndarray
    notes: tuple[str, ...] = ("a matrix",)


class LinearFamily(DraftFamily):
    name: ClassVar[str] = "linear"
    proposer: ClassVar[type] = Linear
    file: ClassVar[type] = LinearFile
    methods: ClassVar[dict[str, DraftMethod]] = {"linear": DraftMethod((), lambda config: {})}
    default: ClassVar[str] = "linear"

    def declared(self, raw):
        return "model_type" if raw.get("model_type") == "toy_linear" else None

    def shown(self, files):
        return "mix" in files.names

    def read(self, files, *, method="auto", **reading):
        mix = np.asarray(files.tensors.array("mix"))
        return LinearFile(files.path, LinearConfig(mix.shape[0]), mix)

    def bind(self, file, target, dtype):
        if file.config.target_hidden_size != target.config.hidden_size:
            raise MismatchError("another width")
        return file.config, LinearParams(jnp.asarray(file.mix, dtype), head=target.params["head"])


@pytest.fixture
def folder(tmp_path):
    mix = np.random.default_rng(0).normal(size=(H, H)).astype(np.float32)
    safetensors.numpy.save_file({"mix": mix}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "toy_linear"}))
    return tmp_path


def test_it_is_unknown_until_it_is_registered(folder):
    with pytest.raises(CheckpointError, match="no draft of a kind that is known"):
        recognise(opened(folder))
    assert "linear" not in methods.METHODS


def test_it_is_recognised_listed_and_inspected(folder, capsys):
    with registered(LinearFamily()):
        assert recognise(opened(folder)).name == "linear"
        assert methods.method_for(str(folder)) == "linear"
        assert "linear" in methods.METHODS
        methods.check_config(SpeculativeConfig("linear", model=str(folder)))
        with pytest.raises(ConfigError, match="'linear' has no setting 'tree_depth'"):
            methods.check_config(SpeculativeConfig("linear", model=str(folder), tree_depth=2))
        assert Inspect(str(folder), json=True).run() == 0
        assert json.loads(capsys.readouterr().out)["method"] == "linear"
        with pytest.raises(ConfigError, match="cannot run as eagle3, but as linear"):
            load_draft(folder, TARGET, method="eagle3")
        with pytest.raises(ConfigError, match="aux is no option of linear drafts"):
            read_draft(folder, aux=(1,))


def test_it_is_loaded_aligned_and_decoded_with(folder):
    """Beside the rotated target an aligned draft guesses as beside the original; unaligned it is refused."""
    rotated = rotate_target(TARGET, Rotation("random", H, seed=3))
    prompt = [3, 1, 4, 1, 5]
    plain = ej.generate(TARGET, prompt, max_new_tokens=12, ignore_eos=True).token_ids
    with registered(LinearFamily()):
        bound = load_draft(folder, TARGET)
        config = SpeculativeConfig("linear", model=str(folder))
        assert isinstance(methods.proposer_from(TARGET, config).proposer, Linear)
        with pytest.raises(MismatchError, match="is rotated"):
            load_draft(folder, rotated)
        aligned = load_draft(folder, rotated, align=True)
        assert aligned.proposer.config.basis == rotated.basis
        with pytest.raises(MismatchError, match="aligned"):
            ej.generate(TARGET, prompt, proposer=aligned, max_new_tokens=2)
        for target, proposer in ((TARGET, bound), (rotated, aligned)):
            got = ej.generate(target, prompt, proposer=proposer, max_new_tokens=12, ignore_eos=True)
            assert got.token_ids == plain
            assert got.stats.num_draft_tokens > 0
    state = jax.random.normal(jax.random.key(0), (1, 1, 1, H))
    norm = state / jnp.sqrt(jnp.mean(state**2, -1, keepdims=True))
    gamma = jnp.asarray(rotated.rotation.gamma)
    first = bound.params.adapter.from_target(norm * gamma) @ bound.params.mix @ bound.params.head
    turned = aligned.params.adapter.from_target(norm @ jnp.asarray(rotated.rotation.matrix))
    np.testing.assert_allclose(turned @ aligned.params.mix @ aligned.params.head, first, rtol=1e-3, atol=1e-3)


def test_training_goes_on_from_families_that_have_an_objective_alone(folder):
    settings = SimpleNamespace(draft=SimpleNamespace(start=str(folder), aux=()), objective=Objective())
    with registered(LinearFamily()), pytest.raises(ConfigError, match="holds a linear, which there is no"):
        prepare._read_existing(settings)
