import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from eaglejax.errors import EaglejaxError
from kernels_pallas import KernelError
from kernels_pallas.dispatch import choose, resolve_interpret


@pytest.mark.parametrize(
    ("backend", "refusals", "expected"),
    [
        ("cpu", {"xla": None, "tpu": None, "gpu": None}, "xla"),
        ("tpu", {"xla": None, "tpu": None, "gpu": None}, "tpu"),
        ("tpu", {"xla": None, "tpu": "takes less"}, "xla"),
        ("tpu", {"xla": None}, "xla"),
        ("gpu", {"xla": None, "tpu": None, "gpu": None}, "xla"),
        ("cpu", {"xla": None, "tpu": None, "cpu": lambda: None}, "cpu"),
        ("cpu", {"xla": None, "tpu": None, "cpu": lambda: "has no compiler"}, "xla"),
        ("tpu", {"xla": None, "cpu": None}, "xla"),
    ],
)
def test_auto_takes_the_kernel_of_the_backend_that_accepts(monkeypatch, backend, refusals, expected):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert choose("op", "auto", refusals) == expected


def test_a_named_implementation_is_taken_or_refused():
    refusals = {"xla": None, "tpu": None, "gpu": "takes less"}
    assert choose("op", "tpu", refusals) == "tpu"
    with pytest.raises(KernelError, match=r"^op: implementation 'gpu' takes less; .* \['xla', 'tpu'\]$"):
        choose("op", "gpu", refusals)
    with pytest.raises(KernelError, match=r"^op: no implementation 'rocm' .* \['xla', 'tpu'\] or 'auto'$"):
        choose("op", "rocm", refusals)


def test_what_is_slow_to_find_out_is_found_out_only_when_it_matters():
    def slow():
        raise AssertionError("asked")

    assert choose("op", "tpu", {"xla": None, "tpu": None, "cpu": slow}) == "tpu"
    with pytest.raises(KernelError, match="'cpu' has no compiler"):
        choose("op", "cpu", {"xla": None, "cpu": lambda: "has no compiler"})


def test_kernels_are_interpreted_off_their_own_backend_unless_told(monkeypatch):
    for backend, expected in (("cpu", True), ("tpu", False), ("gpu", True)):
        monkeypatch.setattr(jax, "default_backend", lambda name=backend: name)
        assert resolve_interpret("op", "tpu", None) is expected
        assert resolve_interpret("op", "tpu", False) is False
    for name in ("xla", "cpu"):
        assert resolve_interpret("op", name, None) is False
        with pytest.raises(KernelError, match=f"implementation '{name}' was chosen"):
            resolve_interpret("op", name, True)


def test_a_kernel_s_refusal_is_one_of_eaglejax_wherever_it_comes_from():
    from kernels_pallas.hadamard import hadamard
    from kernels_pallas.native import level_here

    for refused in (
        lambda: hadamard(jnp.zeros((2, 92))),
        lambda: hadamard(jnp.zeros((2, 8), jnp.int32)),
        lambda: choose("op", "rocm", {"xla": None}),
        lambda: level_here({"EAGLEJAX_NATIVE_LEVEL": "sve"}),
    ):
        with pytest.raises(EaglejaxError) as caught:
            refused()
        assert isinstance(caught.value, KernelError)


def test_without_eaglejax_the_kernels_raise_their_own_error():
    code = """
import sys
from kernels_pallas.errors import KernelError, require
try:
    require(False, "op", "is given too much")
except KernelError as error:
    assert type(error) is KernelError and str(error) == "op: is given too much", error
assert "eaglejax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
