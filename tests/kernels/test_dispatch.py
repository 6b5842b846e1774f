import jax
import pytest

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
