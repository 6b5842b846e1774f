"""Runs whose times hold no compilation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.monitoring

from eaglejax.api import stream
from eaglejax.errors import EaglejaxError
from eaglejax.models.target import Target
from eaglejax.speculate.books import Generation

_COMPILED = "/jax/core/compile/backend_compile_duration"
_TRIES = 3
_count = 0


@functools.cache
def _listen() -> None:
    """Count compilations from now on, those that the persistent cache answers included."""

    def on_event(event: str, duration_secs: float, **_: str | int) -> None:
        global _count
        del duration_secs
        _count += event == _COMPILED

    jax.monitoring.register_event_duration_secs_listener(on_event)


def compilations() -> int:
    """Programs compiled in this process since the first call."""
    _listen()
    return _count


def warm_up(target: Target, prompt: Sequence[int], **options: Any) -> None:
    """Compile what :func:`decode` with these options needs, by way of the first chunk of rounds."""
    for _ in itertools.islice(stream(target, prompt, **options), 2):
        pass


def decode(
    target: Target, prompt: Sequence[int], on_text: Callable[[str], None] | None = None, **options: Any
) -> Generation:
    """One answer; ``on_text`` sees its text as it settles. ``options`` are those of ``stream``."""
    result = None
    for item in stream(target, prompt, **options):
        if isinstance(item, Generation):
            result = item
        elif on_text is not None:
            on_text(item.text)
    assert result is not None
    return result


def timed(
    target: Target,
    prompt: Sequence[int],
    view: Callable[[], Callable[[str], None]] | None = None,
    **options: Any,
) -> Generation:
    """A run without compilation in its times; ``view()``, called before each run, gives what sees its text.

    Raises EaglejaxError where every run compiles something new.
    """
    warm_up(target, prompt, **options)
    for _ in range(_TRIES):
        before = compilations()
        result = decode(target, prompt, view and view(), **options)
        if compilations() == before:
            return result
    raise EaglejaxError(f"each of {_TRIES} runs of the same prompt compiled something, so none can be timed")
