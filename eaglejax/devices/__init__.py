"""What the machine is, and what must be set before jax starts on it.

Importing ``eaglejax`` calls :func:`prepare` once. Nothing in this package imports jax at module
level, because some settings are read only while jax starts; adapters are imported when one is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from eaglejax.devices.startup import Startup, jax_has_started, prepare

if TYPE_CHECKING:
    from eaglejax.devices.adapter import XLA, Adapter, Attention
    from eaglejax.devices.choice import choose, current

__all__ = ["XLA", "Adapter", "Attention", "Startup", "choose", "current", "jax_has_started", "prepare"]

_PLACES = {
    "XLA": "eaglejax.devices.adapter",
    "Adapter": "eaglejax.devices.adapter",
    "Attention": "eaglejax.devices.adapter",
    "choose": "eaglejax.devices.choice",
    "current": "eaglejax.devices.choice",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value
