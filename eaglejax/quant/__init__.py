"""Weight quantisation: schemes and plans, quantised arrays, calibration, and quantised targets."""

from eaglejax.quant.array import QuantArray
from eaglejax.quant.blocks import BlockArray
from eaglejax.quant.calibrate import InputRange, Statistics, calibrate
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
    "calibrate",
    "get_scheme",
    "quantize_array",
    "quantize_target",
]
