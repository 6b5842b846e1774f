import pytest
from jax.experimental.pallas import tpu as pltpu


@pytest.fixture
def tpu_simulator(capfd):
    """A simulated TPU; the test fails when a kernel raced, which jax 0.10 prints and does not raise."""
    yield pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise")
    assert "RACE DETECTED" not in capfd.readouterr().out
