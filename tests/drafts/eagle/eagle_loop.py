"""Tiny targets and drafts that go together, for tests of the whole loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from eaglejax.checkpoint.eagle import bind
from eaglejax.drafts.eagle_config import EagleConfig
from eaglejax.drafts.eagle_model import EagleParams
from eaglejax.models import decoder
from eaglejax.models.config import ModelConfig
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
