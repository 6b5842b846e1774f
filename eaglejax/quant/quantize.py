"""Quantising weights: one matrix, or all that a plan names of a target.

Scales are symmetric. ``minmax`` maps the largest magnitude of a column (of its group of rows) to the largest
integer, 127 or 7. ``mse`` tries smaller scales too and keeps the one with the least squared error of the
weights, which matters for 4 bits: what few large weights lose by clipping, all others gain in resolution.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.devices.dtypes import WEIGHT_DTYPES
from eaglejax.errors import ConfigError
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target
from eaglejax.pytree import leaf_paths, unflatten
from eaglejax.quant.array import QuantArray, column_sums
from eaglejax.quant.calibrate import InputRange, Statistics, weight_paths
from eaglejax.quant.schemes import Plan, Scheme, Search, as_plan
from eaglejax.quant.smooth import Smoothing, plan_smoothing

EXTREMES = {8: (-127, 127), 4: (-8, 7)}
"""Least and greatest integer by width. Symmetric for 8 bits, where nothing is gained by the 256th value."""

CLIP_RATIOS = np.linspace(1.0, 0.4, 31, dtype=np.float32)
"""Scales that the search tries, as parts of the minmax scale, the largest first (a tie clips nothing)."""


def quantize_array(
    weight: Any,
    scheme: Scheme,
    *,
    search: Search = "minmax",
    transposed: bool = False,
    smooth: np.ndarray | None = None,
    inputs: InputRange | None = None,
    dtype: Any = None,
    where: str = "the weight",
) -> QuantArray:
    """``weight`` [I, O] or [E, I, O], float, in ``scheme``.

    ``transposed``: ``weight`` is a table [O, I]. ``smooth`` f32 [I]: the rows are multiplied by it before,
    the input divided by it in every product. ``inputs``: range of the input (before that division), for
    static schemes. ``dtype``: of the matrix that the result stands for (None: the weight's). ``where`` names
    it in errors. Raises ConfigError for shapes that the scheme cannot hold, values that are not finite and a
    static scheme without a range.
    """
    array = jnp.asarray(weight)
    if array.dtype.name not in WEIGHT_DTYPES or array.ndim not in (2, 3) or (transposed and array.ndim != 2):
        raise ConfigError(
            f"{where} is {array.dtype.name} {array.shape}; a matrix or a stack of matrices in "
            f"{', '.join(WEIGHT_DTYPES)} can be quantised"
        )
    rows = array.shape[1 if transposed else -2]
    groups = _groups(rows, scheme, where)
    if smooth is not None and (smooth.shape != (rows,) or not (np.isfinite(smooth) & (smooth > 0)).all()):
        raise ConfigError(f"the smoothing factors of {where} must be {rows} positive numbers")
    values, scale, finite = _quantize(
        array, smooth, bits=scheme.weight_bits, groups=groups, search=search, transposed=transposed
    )
    if not finite:
        raise ConfigError(f"{where} holds values that are not finite; such weights cannot be quantised")
    found = QuantArray(
        values=values,
        scale=scale if scheme.group_size is not None else scale.reshape(*scale.shape[:-2], -1),
        smooth=None if smooth is None else jnp.asarray(smooth, jnp.float32),
        bits=scheme.weight_bits,
        activation=scheme.activation,
        transposed=transposed,
        dtype=np.dtype(array.dtype if dtype is None else dtype),
    )
    if scheme.activation != "static":
        return found
    if inputs is None:
        raise ConfigError(f"{where}: scheme {scheme.label} needs the range of the input; calibrate first")
    return static_inputs(found, inputs if smooth is None else inputs.divided(smooth), scheme.asymmetric)


def static_inputs(weight: QuantArray, inputs: InputRange, asymmetric: bool) -> QuantArray:
    """``weight`` with one activation scale, and offset when ``asymmetric``, that holds all of ``inputs``."""
    if not asymmetric:
        scale = np.float32(inputs.absmax.max() / 127)
        return dataclasses.replace(weight, input_scale=jnp.float32(scale if scale > 0 else 1.0))
    low, high = min(inputs.low.min(), 0.0), max(inputs.high.max(), 0.0)
    scale = np.float32((high - low) / 255)
    scale = scale if scale > 0 else np.float32(1.0)
    offset = np.float32(np.round(-128 - low / scale))
    return dataclasses.replace(
        weight,
        input_scale=jnp.float32(scale),
        input_offset=jnp.float32(offset),
        offset_sums=jax.jit(column_sums)(weight),
    )


def _groups(rows: int, scheme: Scheme, where: str) -> int:
    """Groups of a weight of ``rows`` input rows."""
    size = scheme.group_size
    if size is not None and rows % size:
        fitting = [s for s in (256, 128, 64, 32, 16, 8, 4, 2) if rows % s == 0]
        advice = f"a group size of {fitting[0]} would" if fitting else "no even group size does"
        raise ConfigError(
            f"{where} has {rows} input rows, which groups of {size} do not divide; {advice}. "
            "Otherwise exclude it"
        )
    if scheme.weight_bits == 4 and rows % 2:
        raise ConfigError(
            f"{where} has {rows} input rows, but 4-bit rows come in pairs; exclude it or use 8 bits"
        )
    return 1 if size is None else rows // size


@functools.partial(jax.jit, static_argnames=("bits", "groups", "search", "transposed"))
def _quantize(
    weight: jax.Array, smooth: Any, *, bits: int, groups: int, search: Search, transposed: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(values as ``QuantArray`` holds them, scale f32 [..., G, O], whether all weights are finite)."""
    wide = weight.astype(jnp.float32)
    wide = wide.T if transposed else wide
    if smooth is not None:
        wide = wide * smooth[:, None]
    parts = wide.reshape(*wide.shape[:-2], groups, -1, wide.shape[-1])
    low, high = EXTREMES[bits]
    largest = jnp.max(jnp.abs(parts), axis=-2, keepdims=True)
    # Below that a quotient would not be a normal number; such columns are zero for every purpose.
    full = jnp.where(largest > 128 * jnp.finfo(jnp.float32).tiny, largest / high, 1.0)

    def integers(scale: jax.Array) -> jax.Array:
        return jnp.clip(jnp.round(parts / scale), low, high)

    def attempt(best: tuple[jax.Array, jax.Array], ratio: jax.Array) -> tuple[Any, None]:
        scale = full * ratio
        error = jnp.sum((integers(scale) * scale - parts) ** 2, axis=-2, keepdims=True)
        better = error < best[0]
        return (jnp.where(better, error, best[0]), jnp.where(better, scale, best[1])), None

    scale = full
    if search == "mse":
        start = (jnp.full_like(full, jnp.inf), full)
        scale = jax.lax.scan(attempt, start, jnp.asarray(CLIP_RATIOS))[0][1]
    values = integers(scale).astype(jnp.int8).reshape(wide.shape)
    if bits == 4:
        from kernels_pallas.quant_matmul import pack_int4

        values = pack_int4(values)
    return values, scale[..., 0, :], jnp.isfinite(wide).all()


class Packer:
    """Quantises a target's leaves one after another, as a plan says.

    ``config``: of the target; ``paths``: those of all its weights. Raises ConfigError for globs that match
    nothing and a plan that leaves everything float.
    """

    def __init__(self, config: ModelConfig, plan: Plan, paths: list[str]) -> None:
        self.config, self.plan, self.paths = config, plan, frozenset(paths)
        plan.check_globs(paths)
        if not any(plan.scheme_of(path) for path in paths):
            raise ConfigError("the plan excludes every weight; nothing would be quantised")

    def scheme_of(self, path: str) -> Scheme | None:
        """The scheme of a leaf; None for one that stays float, norms and biases among them."""
        scheme = self.plan.scheme_of(path) if path in self.paths else None
        if scheme is not None and path == "embed" and not self.config.tie_embeddings:
            # Looked up alone: it multiplies no activations.
            return dataclasses.replace(scheme, activation=None, asymmetric=False)
        return scheme

    def pack(
        self,
        path: str,
        leaf: Any,
        *,
        smooth: np.ndarray | None = None,
        inputs: InputRange | None = None,
        dtype: Any = None,
    ) -> QuantArray:
        """A leaf that has a scheme, quantised; arguments as in :func:`quantize_array`."""
        scheme = self.scheme_of(path)
        assert scheme is not None
        return quantize_array(
            leaf,
            scheme,
            search=self.plan.search,
            transposed=path == "embed",
            smooth=smooth,
            inputs=inputs,
            dtype=dtype,
            where=path,
        )


def quantize_target(
    target: Target,
    plan: Plan | Scheme | str,
    *,
    statistics: Statistics | None = None,
    search: Search | None = None,
) -> Target:
    """``target`` with the weights that ``plan`` names quantised; the others are the same arrays.

    ``plan``: see ``schemes.as_plan``. ``statistics``: what ``calibrate`` found on this target, which static
    schemes and smoothing need. ``search``: how scales are found (None: as the plan says). Every matrix is
    converted on its own, so that beyond both targets one matrix in f32 is held. Raises ConfigError for a
    target that is quantised already, a plan that does not fit it, missing statistics and weights that are
    not finite.
    """
    plan = as_plan(plan)
    if target.quantization is not None:
        raise ConfigError(
            f"{target.name} is quantised already ({target.quantization}); quantise the float weights it was "
            "made of"
        )
    if plan.keep:
        raise ConfigError("only a GGUF file has integers to keep; name the plan when the file is loaded")
    target.config.require_grouped("quantisation")
    if search is not None:
        plan = dataclasses.replace(plan, search=search)
    packed = dict(pack_leaves(target.config, target.params, plan, statistics))
    params = unflatten(target.params, packed)
    return dataclasses.replace(target, params=params, quantization=plan.label)


def pack_leaves(
    config: ModelConfig, params: Any, plan: Plan, statistics: Statistics | None = None
) -> Iterator[tuple[str, Any]]:
    """Every leaf of ``params`` by path, in tree order, quantised where ``plan`` says so."""
    leaves: dict[str, Any] = leaf_paths(params)
    paths = weight_paths(config, params)
    packer = Packer(config, plan, paths)
    smoothing = Smoothing()
    if plan.needs_statistics and statistics is None:
        raise ConfigError(
            f"{plan.label} needs to know the inputs of the layers; pass statistics=calibrate(target, prompts)"
        )
    if plan.smooth is not None:
        assert statistics is not None
        smoothing = plan_smoothing(leaves, config, plan, statistics, paths)
    for path, leaf in leaves.items():
        scheme = packer.scheme_of(path)
        if scheme is None:
            yield path, smoothing.vectors.get(path, leaf)
            continue
        inputs = None
        rows = smoothing.rows.get(path)
        if scheme.activation == "static":
            assert statistics is not None
            inputs = statistics.of(path, leaf.shape[-1] if path == "embed" else leaf.shape[-2])
        smooth = rows if path in smoothing.divides else None
        if smooth is None and rows is not None and inputs is not None:
            inputs = inputs.divided(rows)
        weight = smoothing.weight(path, leaf)
        yield path, packer.pack(path, weight, smooth=smooth, inputs=inputs, dtype=leaf.dtype)
