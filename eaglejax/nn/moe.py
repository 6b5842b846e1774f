"""Mixture of experts without capacity limits: no token is dropped, so none depends on its batch mates."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from eaglejax.errors import ConfigError
from eaglejax.nn.linear import grouped_linear, linear
from eaglejax.nn.mlp import gated, gated_mlp


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """``experts`` E of width ``intermediate_size``, ``top_k`` of them a token.

    ``scores``: an expert's weight is its softmax over all experts (Qwen), over the chosen ones alone
    (Mixtral), or its sigmoid (DeepSeek-V3). ``normalize``: the chosen weights are divided by their sum (has
    no effect on those "of chosen", whose sum is one). ``scale`` multiplies them at last. ``correction``:
    a bias an expert, added to the scores that are compared, not to the weights. ``groups``: only experts of
    the ``top_groups`` best of so many equal groups are chosen; a group is as good as the sum of its
    ``group_best`` best scores. ``router_bias``: a bias on the logits. ``shared``: width of an expert
    that every token passes besides (0: none), weighted by a sigmoid of its own with ``shared_gate``.
    ``bias``: every product of an expert has one. ``weighs_input``: an expert's weight multiplies what it
    reads, not what it yields (Llama 4).
    """

    experts: int
    top_k: int
    intermediate_size: int
    scores: Literal["softmax", "of chosen", "sigmoid"]
    normalize: bool
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    scale: float = 1.0
    router_bias: bool = False
    shared: int = 0
    shared_gate: bool = False
    bias: bool = False
    weighs_input: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise ConfigError(f"{self.top_k} experts a token of {self.experts}; give 1 to {self.experts}")
        if self.groups < 1 or self.experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ConfigError(
                f"{self.top_groups} of {self.groups} groups of {self.experts} experts; groups are of equal "
                "size, and 1 to all of them are chosen"
            )
        size = self.experts // self.groups
        if self.group_best > size or self.top_k > size * self.top_groups:
            raise ConfigError(
                f"{self.top_k} experts are chosen from {self.top_groups} groups of {size}, each ranked by "
                f"its {self.group_best} best; there are too few"
            )


def route(
    logits: jax.Array, moe: MoeConfig, correction: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Router ``logits`` [T, E] f32, ``correction`` [E] -> (weights [T, k] f32, experts [T, k] int32)."""
    if moe.scores == "of chosen":
        scores = logits
    else:
        scores = jax.nn.sigmoid(logits) if moe.scores == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    compared = scores if correction is None else scores + correction.astype(jnp.float32)
    if moe.top_groups < moe.groups:
        grouped = compared.reshape(-1, moe.groups, moe.experts // moe.groups)
        best = jax.lax.top_k(grouped, moe.group_best)[0].sum(-1)
        kept = jax.lax.top_k(best, moe.top_groups)[1]
        inside = jax.nn.one_hot(kept, moe.groups, dtype=bool).any(1)
        compared = jnp.where(inside[:, :, None], grouped, -jnp.inf).reshape(compared.shape)
    chosen = jax.lax.top_k(compared, moe.top_k)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if moe.scores == "of chosen":
        weights = jax.nn.softmax(weights, axis=-1)
    elif moe.normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights * moe.scale, chosen


def router_logits(x: jax.Array, params: dict[str, Any]) -> jax.Array:
    """Router logits [..., E] f32 for ``x`` [..., H]; in f32 throughout where the router is.

    ``params``: router [H, E], and router_bias [E] where the model has it.
    """
    router = params["router"]
    if isinstance(router, jax.Array) and router.dtype == jnp.float32:
        x = x.astype(jnp.float32)
    return linear(x, router, params.get("router_bias"), dtype=jnp.float32)


def moe_mlp(x: jax.Array, params: dict[str, Any], moe: MoeConfig, act: str) -> jax.Array:
    """Weighted sum of the chosen experts' gated MLPs for ``x`` [..., H].

    ``params``: router [H, E] and experts {gate, up [E, H, F], down [E, F, H]}, with what ``moe`` has besides
    (see ``table``). Tokens are sorted by expert and each expert multiplies its own run of rows, however long.
    """
    rows = x.reshape(-1, x.shape[-1])
    weights, chosen = route(router_logits(rows, params), moe, params.get("correction"))
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.zeros((moe.experts,), jnp.int32).at[chosen.reshape(-1)].add(1)
    experts = params["experts"]
    whose = jnp.take(chosen.reshape(-1), order)

    def product(y: jax.Array, name: str) -> jax.Array:
        y = grouped_linear(y, experts[name], sizes)
        return y + jnp.take(experts[f"{name}_bias"], whose, axis=0) if moe.bias else y

    inner = jnp.take(rows, order // moe.top_k, axis=0)
    if moe.weighs_input:
        inner = (inner * jnp.take(weights.reshape(-1), order)[:, None]).astype(rows.dtype)
        weights = jnp.ones_like(weights)
    out = product(gated(product(inner, "gate"), product(inner, "up"), act), "down")
    # Back to token order by the inverse permutation: a gather, so that the sum's order is the router's own.
    out = jnp.take(out, jnp.argsort(order), axis=0).reshape(*chosen.shape, -1)
    mixed = jnp.sum(out.astype(jnp.float32) * weights[..., None], axis=1)
    if moe.shared:
        always = gated_mlp(rows, params["shared"], act).astype(jnp.float32)
        if moe.shared_gate:
            always *= jax.nn.sigmoid(linear(rows, params["shared_gate"], dtype=jnp.float32))
        mixed += always
    return mixed.astype(x.dtype).reshape(x.shape)
