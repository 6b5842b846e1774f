"""Watching values as they are computed, without changing what computes them.

A computation says ``tap("q", q)`` where a value may be of interest, and ``scope("layers/3")`` around its
parts. Nobody watches as a rule, and then neither does anything: a compiled program is the same with and
without them. Under ``watch(sink)`` the sink is called with every value and its full name, such as
``target/layers/3/q``.

Values of jax are tracers while a function is traced, so it is the function to be compiled that watches
itself, and returns what it has seen::

    @jax.jit
    def watched(x):
        seen = {}
        with watch(seen.__setitem__):
            y = computation(x)
        return y, seen

What stands inside a loop or a branch of the device cannot leave it, and jax says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

Sink = Callable[[str, Any], None]
"""(full name, value) of what is tapped."""

_watching: ContextVar[tuple[Sink, str] | None] = ContextVar("watching", default=None)


def tap(name: str, value: Any) -> None:
    """Show ``value`` to whoever watches; a function is called for it, and only then."""
    watching = _watching.get()
    if watching is not None:
        sink, inside = watching
        sink(inside + name, value() if callable(value) else value)


def watched() -> bool:
    """Whether somebody watches."""
    return _watching.get() is not None


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Names that the body taps begin with ``name/``."""
    watching = _watching.get()
    if watching is None:
        yield
        return
    sink, inside = watching
    token = _watching.set((sink, f"{inside}{name}/"))
    try:
        yield
    finally:
        _watching.reset(token)


@contextlib.contextmanager
def watch(sink: Sink) -> Iterator[None]:
    """Call ``sink`` with every value that the body taps; whoever watched before sees none of them."""
    token = _watching.set((sink, ""))
    try:
        yield
    finally:
        _watching.reset(token)
