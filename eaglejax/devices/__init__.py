"""What the machine is, and what must be set before jax starts on it.

Importing ``eaglejax`` calls :func:`prepare` once. Nothing in this package imports jax at module
level, because some settings are read only while jax starts.
"""

from eaglejax.devices.adapter import XLA, Adapter, Attention
from eaglejax.devices.choice import choose, current
from eaglejax.devices.startup import Startup, jax_has_started, prepare

__all__ = ["XLA", "Adapter", "Attention", "Startup", "choose", "current", "jax_has_started", "prepare"]
