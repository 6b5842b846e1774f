"""Moving outlier channels of a linear layer's input into its weight before quantisation.

``x @ w == (x / s) @ (s * w)`` for any positive s [I]. With ``s_i = max|x_i|**alpha / max|w_i|**(1 - alpha)``
the input's outliers shrink at the weight's cost (SmoothQuant, Xiao et al. 2023, equation 4). The division
costs nothing where whatever makes the input can absorb it: the norm before q, k, v and before gate, up; the
columns of ``up`` for ``down``; those of ``v`` for ``o``, as attention mixes tokens and never channels. The
rest of the layers divide their input as they run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from eaglejax.models.config import ModelConfig
from eaglejax.quant.calibrate import Statistics
from eaglejax.quant.schemes import Plan

LEAST = 1e-5
"""Smallest factor: an input channel or a weight row of zeros must not make one of zero or infinity."""


_ABSORBING = (
    ("v", "o"),
    ("up", "down"),
    ("experts.up", "experts.down"),
    ("shared.up", "shared.down"),
)
"""Products whose columns can be divided for the rows of the next."""

_BEHIND_MLP_NORM = (
    *("gate", "up", "router", "experts.gate", "experts.up"),
    *("shared.gate", "shared.up", "shared_gate"),
)
"""What reads the norm before a feed-forward block; where one of them is not quantised, the norm stays."""


@dataclasses.dataclass
class Smoothing:
    """What changes, by parameter path.

    ``rows`` f32 [I] multiply the input rows of a weight and divide its input; ``columns`` f32 [O] divide its
    output columns; ``divides``: weights whose input nobody else divides; ``vectors``: new norm weights and
    biases, in their dtype.
    """

    rows: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    columns: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    divides: set[str] = dataclasses.field(default_factory=set)
    vectors: dict[str, Any] = dataclasses.field(default_factory=dict)

    def weight(self, path: str, leaf: Any) -> Any:
        """``leaf`` [..., I, O] as it is quantised, in f32 where anything changes.

        Rows whose input is divided in every product are left for ``QuantArray.smooth``.
        """
        rows = None if path in self.divides else self.rows.get(path)
        columns = self.columns.get(path)
        if rows is None and columns is None:
            return leaf
        weight = np.asarray(leaf, np.float32)
        weight = weight if rows is None else weight * rows[:, None]
        return weight if columns is None else weight / columns


def plan_smoothing(
    leaves: dict[str, Any], config: ModelConfig, plan: Plan, statistics: Statistics, paths: list[str]
) -> Smoothing:
    """How to smooth the weights at ``paths`` that ``plan`` quantises, with strength ``plan.smooth``.

    ``leaves``: parameter path -> array, of which nothing is changed.
    """
    planner = _Planner(leaves, config, plan, statistics)
    quantised = {path for path in paths if plan.scheme_of(path) is not None}
    present = set(paths)
    done: set[str] = set()
    for i in range(config.num_layers):
        layer = f"layers.{i}."
        # Whatever divides a weight's columns comes first: the norm's factors look at its rows.
        sources = [(a, b) for a, b in _ABSORBING if layer + a in present]
        for source, reader in sources:
            if quantised.issuperset({layer + source, layer + reader}):
                planner.into_columns(layer, source, reader)
                done.add(layer + reader)
        norms = {
            "attn_norm": ("q", "k", "v", "q_gate"),
            "mlp_norm": _BEHIND_MLP_NORM,
        }
        for norm, names in norms.items():
            readers = [layer + name for name in names if layer + name in leaves]
            if readers and layer + norm in leaves and quantised.issuperset(readers):
                planner.into_norm(layer + norm, readers)
                done.update(readers)
    for path in paths:
        if path in quantised and path not in done and path in statistics.inputs:
            planner.at_input(path)
    return planner.found


class _Planner:
    def __init__(
        self, leaves: dict[str, Any], config: ModelConfig, plan: Plan, statistics: Statistics
    ) -> None:
        assert plan.smooth is not None
        self.leaves, self.config, self.statistics = leaves, config, statistics
        self.alpha, self.found = plan.smooth, Smoothing()

    def factors(self, readers: list[str], heads: int = 0) -> np.ndarray:
        """s [I] that serves all ``readers`` of one input; ``heads``: query heads that share a source head,
        whose factors must agree (0: all differ)."""
        rows = [self._row_max(path) for path in readers]
        x, w = self.statistics.of(readers[0], rows[0].size).absmax, np.max(rows, axis=0)
        if heads:
            shape = (self.config.num_kv_heads, heads, self.config.head_dim)
            x, w = (
                np.broadcast_to(a.reshape(shape).max(1, keepdims=True), shape).reshape(-1) for a in (x, w)
            )
        s = np.maximum(x, LEAST) ** self.alpha / np.maximum(w, LEAST) ** (1 - self.alpha)
        # A channel that is always zero, or that nothing reads, has no range to trade.
        return np.where((x > 0) & (w > 0), np.maximum(s, LEAST), 1.0).astype(np.float32)

    def _row_max(self, path: str) -> np.ndarray:
        weight = np.abs(np.asarray(self.found.weight(path, self.leaves[path]), np.float32))
        if path == "embed":
            weight = weight.T
        return weight.max(axis=tuple(a for a in range(weight.ndim) if a != weight.ndim - 2))

    def at_input(self, path: str) -> None:
        self.found.rows[path] = self.factors([path])
        self.found.divides.add(path)

    def into_columns(self, layer: str, source: str, reader: str) -> None:
        heads = self.config.num_heads // self.config.num_kv_heads if source == "v" else 0
        s = self.factors([layer + reader], heads)
        self.found.rows[layer + reader] = s
        if heads:
            s = s.reshape(self.config.num_kv_heads, heads, -1)[:, 0].reshape(-1)
        self.found.columns[layer + source] = s
        bias = self.leaves.get(f"{layer}{source}_bias")
        if bias is not None:
            self.found.vectors[f"{layer}{source}_bias"] = (jnp.asarray(bias, jnp.float32) / s).astype(
                bias.dtype
            )

    def into_norm(self, path: str, readers: list[str]) -> None:
        norm, offset = self.leaves[path], 1.0 if self.config.norm_offset else 0.0
        old = np.asarray(norm, np.float32) + offset
        new = (jnp.asarray(old / self.factors(readers)) - offset).astype(norm.dtype)
        stored = np.asarray(new, np.float32) + offset
        # The rows take the factor that the rounded norm has, so that nothing is lost to its dtype.
        usable = (old != 0) & (stored != 0)
        s = np.where(usable, old / np.where(usable, stored, 1.0), 1.0).astype(np.float32)
        self.found.vectors[path] = jnp.where(usable, new, norm)
        for reader in readers:
            self.found.rows[reader] = s
