"""Tiny targets and drafts that go together, for tests of the whole loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.load import bind
from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.models import decoder
from eaglejax.models.config import LayerSpec, ModelConfig
from eaglejax.models.target import Target
from eaglejax.nn.rope import RopeConfig
from eaglejax.sampling import Sampling
from eaglejax.speculate.generate import BatchDecoder, DecodeOptions, Generation, Request

CONTEXT = 40


def target_config(**changes: Any) -> ModelConfig:
    config = ModelConfig(
        family="llama",
        vocab_size=24,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=CONTEXT,
        rope=RopeConfig(),
        query_scale=8**-0.5,
    )
    return dataclasses.replace(config, **changes)


def make_target(config: ModelConfig, seed: int = 0, scale: float = 15.0) -> Target:
    """Random weights large enough that the text varies."""
    params = decoder.init_params(config, jax.random.key(seed))
    params = jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, params)
    return Target(config=config, params=params, dtype=np.dtype("float32"), context=config.max_position)


def draft_config(target: ModelConfig, version: int = 3, **changes: Any) -> EagleConfig:
    """A draft of ``target`` that borrows its embedding, and its head where it can."""
    third: dict[str, Any] = {"num_aux": 3, "aux": (0, 1, 2), "head_norm": True, "own_head": True}
    config = EagleConfig(
        version=version,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=20,
        num_heads=2,
        num_kv_heads=1,
        head_dim=6,
        **(third if version == 3 else {}),
    )
    return dataclasses.replace(config, **changes)


def join(made: EagleParams, config: EagleConfig, target: Target) -> EagleParams:
    """Random draft weights joined with what they borrow of ``target``."""
    return bind(config, made.weights, target, None if made.ids is None else np.asarray(made.ids))


def _unit_rows(table: jax.Array) -> jax.Array:
    return table / jnp.sqrt(jnp.mean(table**2, -1, keepdims=True))


def own_layer_pair() -> tuple[Target, EagleConfig, EagleParams]:
    """A one-layer target whose window hides the token that drafts never see, and that layer as EAGLE-1 draft.

    Embeddings of unit RMS make the target's input norm the identity, so EAGLE-1's layer without one computes
    the target's layer on the next token; the final norm changes no argmax. Greedy drafts are all right.
    """
    window = 4
    config = target_config(num_layers=1, layers=(LayerSpec(window=window),))
    target = make_target(config, seed=2, scale=12.0)
    params = {**target.params, "embed": _unit_rows(target.params["embed"])}
    layer = params["layers"][0]
    target = dataclasses.replace(target, params=params)
    draft = draft_config(
        config,
        1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=24,
        windows=(window,),
        norm_eps=config.norm_eps,
    )
    weights = {
        "fc": jnp.concatenate([jnp.eye(16), jnp.zeros((16, 16))]),
        "layers": [{k: layer[k] for k in ("q", "k", "v", "o", "mlp_norm", "gate", "up", "down")}],
    }
    return target, draft, join(EagleParams(weights), draft, target)


def last_token_pair(
    embed_scale: float | None = None, softcap: float | None = None
) -> tuple[Target, EagleConfig, EagleParams]:
    """A target whose next token depends on the last alone, and an EAGLE-3 draft with the same distribution:
    v and o that turn [e, h] into e - h undo the residual."""
    config = target_config(num_layers=1, max_position=64, embed_scale=embed_scale, final_softcap=softcap)
    target = make_target(config, seed=4, scale=12.0)
    layer = {**target.params["layers"][0], "o": jnp.zeros((32, 16))}
    embed = _unit_rows(target.params["embed"]) / (embed_scale or 1.0)
    params = {**target.params, "embed": embed, "layers": [layer]}
    target = dataclasses.replace(target, params=params)
    draft = draft_config(
        config,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=24,
        windows=(1,),
        num_aux=1,
        aux=(1,),
        norm_before_residual=True,
        norm_eps=config.norm_eps,
        embed_scale=embed_scale,
        softcap=softcap,
    )
    eye, zero = jnp.eye(16), jnp.zeros((32, 16))
    weights = {
        "fc": eye,
        "layers": [
            {
                "q": zero,
                "k": zero,
                "v": jnp.concatenate([eye, -eye]),
                "o": eye,
                "input_norm": jnp.ones(16),
                "hidden_norm": jnp.ones(16),
                **{k: layer[k] for k in ("mlp_norm", "gate", "up", "down")},
            }
        ],
        "norm": params["norm"],
        "head": params["head"],
    }
    return target, draft, join(EagleParams(weights), draft, target)


def decode(
    target: Target,
    proposer: Any,
    params: Any,
    prompts: Any,
    *,
    sampling: Any = None,
    tokens: int = CONTEXT,
    **options: Any,
) -> list[Generation]:
    samplings = [sampling or Sampling(seed=0)] * len(prompts)
    run = BatchDecoder(
        target,
        proposer,
        params,
        [Request(tuple(p), s, tokens) for p, s in zip(prompts, samplings, strict=True)],
        options=DecodeOptions(**{"rounds_a_chunk": 4, "prefill_width": 16, **options}),
    )
    for _ in run:
        pass
    return run.results()
