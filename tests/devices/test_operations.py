"""The implementation of operations besides attention, chosen by a user for a whole run."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eaglejax import devices
from eaglejax.devices import choice
from eaglejax.errors import ConfigError, EaglejaxError
from eaglejax.quant.array import QuantArray
from eaglejax.quant.online import HadamardInput
from eaglejax.train.attention import training_attention
from kernels_pallas import dispatch
from kernels_pallas.hopper import has_simulator

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(4, 64)), jnp.bfloat16)
Q = jnp.asarray(RNG.normal(size=(1, 16, 1, 64)), jnp.bfloat16)
WEIGHT = QuantArray(
    values=jnp.asarray(RNG.integers(-127, 128, (64, 64)), jnp.int8),
    scale=jnp.asarray(RNG.uniform(0.01, 0.02, 64), jnp.float32),
)


def train():
    """One step's attention over a row of 16 tokens."""
    attend = training_attention(jnp.zeros((1, 16), jnp.int32), windows=False, remat=False)
    causal = jnp.tril(jnp.ones((1, 16, 16), bool))
    return attend(Q, [Q], [Q], causal, scale=0.125, window=None)


CALLS = {
    "quant_matmul": lambda: WEIGHT.matmul(X, transposed=False),
    "hadamard": lambda: HadamardInput(jnp.eye(64, dtype=jnp.bfloat16)).matmul(X, transposed=False),
    "ttt_attention": train,
}


@pytest.fixture
def choose_operations(tmp_path, monkeypatch):
    def use(**chosen):
        lines = [f'{name} = "{implementation}"\n' for name, implementation in chosen.items()]
        (tmp_path / "adapter.toml").write_text("".join(["[operations]\n", *lines]))
        monkeypatch.setenv(choice.VARIABLE, str(tmp_path / "adapter.toml"))
        devices.current.cache_clear()

    yield use
    monkeypatch.undo()
    devices.current.cache_clear()


@pytest.mark.parametrize("name", CALLS)
def test_an_operation_runs_where_the_user_says(choose_operations, monkeypatch, name):
    ran = []

    def note(op, implementation, refusals):
        ran.append((op, choose(op, implementation, refusals)))
        return ran[-1][1]

    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", note)
    choose_operations(**{name: "xla"})
    want = CALLS[name]()
    choose_operations(**{name: "tpu"})
    got = CALLS[name]()
    assert [chosen for op, chosen in ran if op == name] == ["xla", "tpu"]
    np.testing.assert_allclose(
        np.asarray(got, np.float32),
        np.asarray(want, np.float32),
        rtol=0.02,
        atol=0.02 * float(jnp.abs(want).max()),
    )
    choose_operations(**{name: "gpu"})
    if not has_simulator():
        with pytest.raises(EaglejaxError, match=f"{name}: the 'gpu' kernel is interpreted by jax 0.12"):
            CALLS[name]()
    assert devices.current().describe()["operations"] == {name: "gpu"}
    assert dict(devices.current().reasons)["operations"] == "chosen by the user"


def test_what_cannot_be_chosen_is_refused():
    here = SimpleNamespace(platform="cpu", device_kind="cpu")
    old = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0")
    for device, chosen, message in (
        (here, {"softmax": "xla"}, "operation 'softmax' is not known; known are quant_matmul"),
        (here, {"hadamard": "npu"}, "hadamard is to run on 'npu'; it runs on one of auto, xla, tpu, gpu"),
        (here, {"hadamard": ["gpu"]}, "hadamard is to run on"),
        (old, {"quant_matmul": "gpu"}, "'gpu' kernel of quant_matmul cannot be compiled for"),
    ):
        with pytest.raises(ConfigError, match=message):
            devices.choose(device, {"operations": chosen})
    with pytest.raises(ConfigError, match="must be of type dict"):
        devices.choose(here, {"operations": "gpu"})


def test_a_draft_with_windows_does_not_train_on_a_kernel_by_name(choose_operations):
    choose_operations(ttt_attention="tpu")
    with pytest.raises(ConfigError, match="'tpu', which knows no attention with windows"):
        training_attention(jnp.zeros((1, 16), jnp.int32), windows=True, remat=False)


def test_nothing_is_chosen_unasked():
    got = devices.choose(jax.devices("cpu")[0])
    assert {name: got.operation(name) for name in CALLS} == dict.fromkeys(CALLS, "auto")
