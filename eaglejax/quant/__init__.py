"""Weight quantisation: schemes and plans, quantised arrays, calibration, and quantised targets.

Names are imported when they are asked for, so that schemes are known before jax is. ``calibrate``, named as
its module is, is imported from there.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eaglejax.quant.array import QuantArray
    from eaglejax.quant.blocks import BlockArray
    from eaglejax.quant.calibrate import InputRange, Statistics
    from eaglejax.quant.quantize import quantize_array, quantize_target
    from eaglejax.quant.schemes import DEFAULT_EXCLUDE, SCHEMES, Plan, Scheme, as_plan, get_scheme

__all__ = [
    "DEFAULT_EXCLUDE",
    "SCHEMES",
    "BlockArray",
    "InputRange",
    "Plan",
    "QuantArray",
    "Scheme",
    "Statistics",
    "as_plan",
    "get_scheme",
    "quantize_array",
    "quantize_target",
]

_PLACES = {
    "array": ("QuantArray",),
    "blocks": ("BlockArray",),
    "calibrate": ("InputRange", "Statistics"),
    "quantize": ("quantize_array", "quantize_target"),
    "schemes": ("DEFAULT_EXCLUDE", "SCHEMES", "Plan", "Scheme", "as_plan", "get_scheme"),
}


def __getattr__(name: str) -> Any:
    for module, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
