"""Watching a computation: full names, one watcher at a time, and no trace of it in what is compiled."""

import jax
import jax.numpy as jnp
import pytest

from eaglejax.tap import scope, tap, watch


def computation(x):
    with scope("layers/0"):
        y = jnp.sin(x)
        tap("sine", y)
        with scope("deep"):
            tap("square", y * y)
    tap("out", lambda: jnp.cos(y) + 1)
    return y + 1


def test_whoever_watches_sees_full_names_and_nobody_else_anything():
    seen, outer = {}, {}
    with watch(outer.__setitem__), scope("outside"):
        with watch(seen.__setitem__):
            computation(jnp.float32(0.5))
        tap("after", 1)
    assert list(seen) == ["layers/0/sine", "layers/0/deep/square", "out"]
    assert outer == {"outside/after": 1}
    computation(jnp.float32(0.5))
    assert len(seen) == 3


def test_a_fault_inside_ends_the_scope_and_the_watch():
    seen = {}

    def failing():
        with scope("a"):
            tap("before", 0)
            tap("never", 1 / 0)

    with watch(seen.__setitem__):
        with pytest.raises(ZeroDivisionError):
            failing()
        tap("between", 1)
    tap("after", 1)
    with watch(seen.__setitem__):
        tap("now", 2)
    assert seen == {"a/before": 0, "between": 1, "now": 2}


def test_a_compiled_function_hands_out_what_it_taps_and_is_the_same_unwatched():
    def watched(x):
        seen = {}
        with watch(seen.__setitem__):
            return computation(x), seen

    before = str(jax.make_jaxpr(computation)(0.5))
    y, seen = jax.jit(watched)(0.5)
    assert jnp.allclose(seen["out"], jnp.cos(y - 1) + 1)
    assert jnp.allclose(seen["layers/0/sine"], jnp.sin(0.5))
    assert str(jax.make_jaxpr(computation)(0.5)) == before
    assert "sin" in before
    assert "cos" not in before
