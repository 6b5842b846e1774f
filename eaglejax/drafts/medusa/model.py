"""The Medusa heads: their table of weights and their pure forward.

Weights are a nested dict; every matrix is [in, out]::

    heads[k]: layers[j]: w [H, H], b [H]     x <- x + silu(x w + b)
              out [H, Vd]                    where each head has its own
    out [H, Vd]                              where they ship one for all
    feature_map [H, H]                       of heads aligned to a rotated target (always f32)

All heads read the target's state of one and the same token, so what one guesses does not depend on what the
others did.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from eaglejax import pytree
from eaglejax.drafts.features import FeatureAdapter
from eaglejax.drafts.medusa.config import MedusaConfig
from eaglejax.nn.linear import PackedWeight, linear
from eaglejax.pytree import ArrayInfo
from eaglejax.tap import tap

Weights = dict[str, Any]


@pytree.dataclass
class MedusaParams:
    """Heads and what they borrow.

    ``weights``: see the module's text. ``head`` ([H, Vd], or [Vd, H] when ``tied``): the target's array, by
    reference, where the heads have none (else None). ``ids`` [Vd] int32: target id of each draft id, None
    when they are the same. ``embed``: None, for they read no token.
    """

    weights: Weights
    head: Any = None
    ids: jax.Array | None = None
    adapter: FeatureAdapter = FeatureAdapter()
    embed: None = None
    tied: bool = pytree.static(default=False)


def param_table(config: MedusaConfig, dtype: Any = jnp.float32) -> Weights:
    """Shape, dtype, logical axes and initialiser of every weight."""
    hidden = config.hidden_size
    out = ArrayInfo((hidden, config.draft_vocab_size), dtype, ("embed", "vocab"))

    def layer() -> Weights:
        # A head begins as its output matrix alone, as the published recipe has it.
        table: Weights = {"w": ArrayInfo((hidden, hidden), dtype, (None, "embed"), pytree.constant(0.0))}
        if config.bias:
            table["b"] = ArrayInfo((hidden,), dtype, ("embed",), pytree.constant(0.0))
        return table

    def head() -> Weights:
        table: Weights = {"layers": [layer() for _ in range(config.layers)]}
        return table | ({"out": out} if config.output == "each" else {})

    table: Weights = {"heads": [head() for _ in range(config.heads)]}
    if config.output == "shared":
        table["out"] = out
    if config.feature_map:
        table["feature_map"] = ArrayInfo((hidden, hidden), jnp.float32, (None, "embed"))
    return table


def cast(weights: Weights, config: MedusaConfig, dtype: Any) -> Weights:
    """The weights, or some of them, each in what ``param_table`` of ``dtype`` holds it in."""
    infos, _ = jax.tree_util.tree_flatten_with_path(param_table(config, dtype), is_leaf=pytree.is_info)
    held_in = {path: info.dtype for path, info in infos}
    return jax.tree_util.tree_map_with_path(lambda path, w: w.astype(held_in[path]), weights)


def dtype_of(weights: Weights) -> Any:
    """The dtype that the heads compute in: that of their first matrix."""
    leaves = jax.tree.leaves(weights["heads"])
    return (leaves[0] if leaves else weights["out"]).dtype


def read_target(params: MedusaParams, config: MedusaConfig, features: jax.Array) -> jax.Array:
    """What the heads read of committed tokens [B, M, H], from the target's last states [B, M, 1, H]."""
    state = params.adapter.from_target(features)[:, :, 0]
    if config.feature_map:
        state = linear(state.astype(jnp.float32), params.weights["feature_map"])
    return state.astype(dtype_of(params.weights))


def state(params: MedusaParams, index: int, feature: jax.Array) -> jax.Array:
    """What head ``index`` hands to its output matrix [..., H], of the target's state ``feature`` [..., H]."""
    x = feature
    for layer in params.weights["heads"][index]["layers"]:
        x = x + jax.nn.silu(linear(x, layer["w"], layer.get("b")))
    return x


def logits(params: MedusaParams, config: MedusaConfig, index: int, hidden: jax.Array) -> jax.Array:
    """Logits [..., Vd] f32 of head ``index``, of what :func:`state` gives."""
    own = params.weights["heads"][index].get("out", params.weights.get("out"))
    out = params.head if own is None else own
    if not isinstance(out, PackedWeight):
        hidden = hidden.astype(out.dtype)
    found = linear(hidden, out, transposed=params.tied and own is None, dtype=jnp.float32)
    found = config.logit_scale * found
    if config.softcap is not None:
        found = config.softcap * jnp.tanh(found / config.softcap)
    tap("logits", found)
    return found
