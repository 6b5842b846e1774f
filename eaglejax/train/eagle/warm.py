"""Where a draft's weights start: random, from the target's last layer, or fitted to its features in closed
form.

With little data the start decides. ``fit`` sets up the first layer so that it already is the best *linear*
draft: ``fc`` maps the boundaries that the draft reads to the target's last one; some attention heads look at
their own position alone and write the ridge-regression guess of the next position's state before the last
MLP, from the next token's embedding and the feature; the MLP, the norms and the head are the target's own.
Being a map from (last state, next token) to (next last state), it holds at every step of a chain, not only at
the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.model import Weights, init_eagle
from eaglejax.errors import ConfigError
from eaglejax.models.config import ModelConfig
from eaglejax.models.target import Target
from eaglejax.nn.mlp import activation
from eaglejax.nn.rope import frequencies
from eaglejax.quant.online import plain
from eaglejax.rotation.rotate import norm_weight

_FAST_PAIRS = 3
"""Rotary pairs by which a self-attending head finds its own position: the fastest ones."""
_SHARPNESS = 6.0
"""Nats between the score of the own position and that of the one before."""
_RIDGE = 1e-3
_SMALL = 0.02


@dataclasses.dataclass(frozen=True)
class FitData:
    """Rows of real text, n of them in order of no importance.

    ``aux`` [n, A, Ht] at t; ``last`` [n, Ht] the last boundary (before the final norm) at t; ``middle`` [n,
    Ht] the state between the last block's attention and its MLP at t + 1; ``embedding`` [n, Ht] of token t +
    1.
    """

    aux: np.ndarray
    last: np.ndarray
    middle: np.ndarray
    embedding: np.ndarray


def check_start(config: EagleConfig, target: Target, start: str) -> None:
    """Raise ConfigError where ``start``, "layer" or "fit", cannot make the target's last layer the draft's
    first."""
    if config.version != 3:
        raise ConfigError(f"start {start!r} sets up an EAGLE-3 draft; use 'random' here")
    for name in ("hidden_size", "head_dim"):
        if getattr(config, name) != getattr(target.config, name):
            raise ConfigError(
                f"start {start!r} needs the target's {name} {getattr(target.config, name)}, the draft has "
                f"{getattr(config, name)}; use 'random'"
            )
    if mlp_width(config) > target.config.intermediate_size:
        raise ConfigError(
            f"start {start!r} takes MLP neurons of the target, which has {target.config.intermediate_size}, "
            f"not {mlp_width(config)}"
        )
    if "gate" not in target.params["layers"][-1]:
        raise ConfigError("the target's last layer has no dense MLP to start from; use start 'random'")
    if start == "fit" and config.num_kv_heads != config.num_heads:
        raise ConfigError(
            f"start 'fit' needs as many key/value heads as heads ({config.num_heads}), the draft has "
            f"{config.num_kv_heads}; use start 'layer'"
        )
    if start == "layer" and target.config.sandwich_norms:
        raise ConfigError(
            "start 'layer' would copy blocks without the norms that the target has behind them; use start "
            "'fit' or 'random'"
        )


def mlp_width(config: EagleConfig) -> int:
    """Neurons of the dense MLP, or of one expert."""
    return config.moe_intermediate_size or config.intermediate_size


def random_weights(config: EagleConfig, target: Target, seed: int) -> Weights:
    """Random weights but for the final norm, which is the target's, since the head is."""
    weights = init_eagle(config, jax.random.key(seed))
    if "norm" in weights and weights["norm"].shape == target.params["norm"].shape:
        weights["norm"] = _norm_weight(target, target.params["norm"])
    return weights


def layer_weights(
    config: EagleConfig, target: Target, seed: int, middle: np.ndarray | None = None
) -> Weights:
    """The target's last layer as the draft's: its attention on the feature's half of the input, a small
    random one on the embedding's, ``fc`` passing the highest boundary on, and its MLP. Further layers begin
    by adding nothing, so that a deeper draft starts as the draft of one layer.

    ``middle`` [n, Ht], states in front of that MLP, tell which of its neurons matter most (None: the first
    are taken), and the size of what it writes where a norm follows it. Raises ConfigError for a target with
    such a norm without them.
    """
    check_start(config, target, "layer" if middle is None else "fit")
    weights = random_weights(config, target, seed)
    last, layer = target.params["layers"][-1], weights["layers"][0]
    hidden = config.hidden_size
    highest = int(np.argmax(config.aux))
    fc = np.zeros((config.num_aux, hidden, hidden), np.float32)
    fc[highest] = np.eye(hidden)
    weights["fc"] = jnp.asarray(fc.reshape(-1, hidden))
    rng = np.random.default_rng(seed)
    for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
        theirs = _f32(last[name]).reshape(hidden, -1, config.head_dim)
        lower = theirs[:, np.arange(heads) * theirs.shape[1] // heads].reshape(hidden, -1)
        upper = rng.normal(0, _SMALL, lower.shape)
        layer[name] = jnp.asarray(np.concatenate([upper, lower]), jnp.float32)
    theirs_o = _f32(last["o"]).reshape(-1, config.head_dim, hidden)
    chosen = np.arange(config.num_heads) * len(theirs_o) // config.num_heads
    # A head of the target that is there several times writes its part each time.
    times = np.bincount(chosen)[chosen]
    layer["o"] = jnp.asarray((theirs_o[chosen] / times[:, None, None]).reshape(-1, hidden), jnp.float32)
    _borrow_mlp(config, target, layer, middle)
    for further in weights["layers"][1:]:
        _silence(further)
    return weights


def fitted_weights(
    config: EagleConfig, target: Target, data: FitData, seed: int, *, heads: int | None = None
) -> Weights:
    """The closed-form start of the module's text; ``heads`` of them (default: not quite half) write the
    guess."""
    check_start(config, target, "fit")
    heads = max(1, config.num_heads * 3 // 7) if heads is None else heads
    weights = layer_weights(config, target, seed, data.middle)
    layer, hidden = weights["layers"][0], config.hidden_size
    flat = data.aux.reshape(len(data.aux), -1).astype(np.float32)
    last = data.last.astype(np.float32)
    if target.config.num_layers in config.aux:
        identity = np.zeros((config.num_aux, hidden, hidden), np.float32)
        identity[config.aux.index(target.config.num_layers)] = np.eye(hidden)
        fc = identity.reshape(-1, hidden)
    else:
        fc = ridge(flat, last)
    feature = flat @ fc
    hidden_norm = np.asarray(layer["hidden_norm"])
    x = np.concatenate(
        [
            _rms(data.embedding.astype(np.float32), np.asarray(layer["input_norm"]), config.norm_eps),
            _rms(feature, hidden_norm, config.norm_eps),
        ],
        axis=1,
    )
    ones = np.ones((len(x), 1), np.float32)
    maps = ridge(x, np.concatenate([data.middle.astype(np.float32) - feature, ones], axis=1))
    guess, constant = maps[:, :-1], maps[:, -1]
    # The guess has to pass through heads * head_dim dimensions: its principal ones.
    _, _, principal = np.linalg.svd(x[:: max(1, len(x) // 8192)] @ guess, full_matrices=False)
    wide, d = 2 * hidden, config.head_dim
    q, k, v = (np.asarray(layer[n]).reshape(wide, config.num_heads, d).copy() for n in "qkv")
    o = np.random.default_rng(seed).normal(0, 0.25 * _SMALL, (config.num_heads, d, hidden))
    pattern = _own_position(config)
    for head in range(heads):
        basis = principal[head * d : (head + 1) * d]
        q[:, head] = k[:, head] = np.outer(constant, pattern)
        v[:, head] = guess @ basis.T
        o[head] = basis
    layer["q"], layer["k"], layer["v"] = (jnp.asarray(m.reshape(wide, -1), jnp.float32) for m in (q, k, v))
    layer["o"] = jnp.asarray(o.reshape(-1, hidden), jnp.float32)
    weights["fc"] = jnp.asarray(fc, jnp.float32)
    return weights


def split_last_block(target: Target) -> tuple[Any, ModelConfig]:
    """The same function as ``target`` with its last block in two: one that only attends, one that is only the
    MLP. The state between them is then a boundary like the others, number ``num_layers``, and the last one
    has the number after it. Raises ConfigError for a mixture of experts."""
    *before, last = target.params["layers"]
    if "down" not in last:
        raise ConfigError("start 'fit' needs a dense MLP in the target's last layer; use start 'random'")

    def without(*names: str) -> dict[str, Any]:
        return {**last, **{n: jnp.zeros(last[n].shape, last[n].dtype) for n in names if n in last}}

    config = target.config
    parts = [without("down", "down_bias"), without("o", "o_bias")]
    return {**target.params, "layers": [*before, *parts]}, dataclasses.replace(
        config,
        num_layers=config.num_layers + 1,
        layers=(*config.layers, *config.layers[-1:]),
    )


def ridge(x: np.ndarray, y: np.ndarray, strength: float = _RIDGE) -> np.ndarray:
    """W [I, O] that minimises |x W - y|^2 + strength * n * |W|^2 in columns of x scaled to unit size."""
    scale = np.sqrt(np.mean(x * x, axis=0)) + 1e-6
    z = x / scale
    gram = z.T @ z + strength * len(x) * np.eye(x.shape[1], dtype=x.dtype)
    return np.linalg.solve(gram, z.T @ y) / scale[:, None]


def activity(target: Target, middle: np.ndarray) -> np.ndarray:
    """Activations [m, F] of the last MLP's neurons on some rows of ``middle`` [n, Ht]."""
    layer, config = target.params["layers"][-1], target.config
    rows = middle[:: max(1, len(middle) // 4096)].astype(np.float32)
    x = _rms(rows, np.asarray(_norm_weight(target, layer["mlp_norm"])), config.norm_eps)
    gate = np.asarray(activation(config.activation)(jnp.asarray(x @ _f32(layer["gate"]))))
    return gate * (x @ _f32(layer["up"]))


def concatenate(parts: Sequence[FitData]) -> FitData:
    """Rows of several texts."""
    return FitData(
        **{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in dataclasses.fields(FitData)}
    )


def _own_position(config: EagleConfig) -> np.ndarray:
    """The query and key [head_dim] of a head that attends to its own position, whatever it holds."""
    angles = frequencies(config.rope, config.head_dim)[0][:_FAST_PAIRS]
    gap = float(np.sum(1 - np.cos(angles)))
    pattern = np.zeros(config.head_dim, np.float32)
    pattern[: len(angles)] = np.sqrt(_SHARPNESS * np.sqrt(config.head_dim) / gap)
    return pattern


def _borrow_mlp(config: EagleConfig, target: Target, layer: Weights, middle: np.ndarray | None) -> None:
    last = target.params["layers"][-1]
    down, keep = _f32(last["down"]), np.arange(mlp_width(config))
    if middle is not None:
        active = activity(target, middle)
        if target.config.sandwich_norms:
            # The norm behind the MLP divides by each row's size, for which the median stands in.
            size = np.median(np.sqrt(np.mean((active @ down) ** 2, axis=1) + config.norm_eps))
            down = down * np.asarray(_norm_weight(target, last["post_mlp_norm"])) / size
        weight = np.sqrt(np.mean(active * active, axis=0)) * np.linalg.norm(down, axis=1)
        keep = np.argsort(-weight, kind="stable")[: mlp_width(config)]
    mlp = {n: jnp.asarray(_f32(last[n])[:, keep]) for n in ("gate", "up")}
    mlp["down"] = jnp.asarray(down[keep])
    if config.num_experts:
        # Copies of one MLP mix to that MLP, whatever the router says (sparse upcycling, Komatsuzaki et al.).
        layer["experts"] = {n: jnp.repeat(m[None], config.num_experts, axis=0) for n, m in mlp.items()}
    else:
        layer |= mlp
    layer["mlp_norm"] = _norm_weight(target, last["mlp_norm"])
    layer["hidden_norm"] = _norm_weight(target, last["attn_norm"])


def _silence(layer: Weights) -> None:
    """Make a layer pass its input on: the last matrix of each of its two branches is zero."""
    layer["o"] = jnp.zeros_like(layer["o"])
    mlp = layer.get("experts", layer)
    mlp["down"] = jnp.zeros_like(mlp["down"])


def _norm_weight(target: Target, weight: Any) -> jax.Array:
    return jnp.asarray(norm_weight(weight, target.config), jnp.float32)


def _f32(value: Any) -> np.ndarray:
    return np.asarray(plain(value, jnp.float32))


def _rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return (x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight).astype(np.float32)
