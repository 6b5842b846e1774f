"""Every family of targets speculates: a random EAGLE-3 draft's tree and an n-gram's guesses leave the text of
plain decoding as it is."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from published import TARGETS, case

from eaglejax.drafts.autoregressive import Autoregressive
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.files.load import bind
from eaglejax.drafts.eagle.model import init_eagle
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.ngram import NGram
from eaglejax.drafts.tree import DynamicTree
from eaglejax.models.target import Target
from eaglejax.sampling import Sampling
from eaglejax.speculate.generate import BatchDecoder, DecodeOptions, Request

CONTEXT, NEW = 40, 14
QUICK = ("llama4",)
"""The others belong to `make test-all`: each compiles its own programs."""


def decoded(target: Target, proposer: Any, params: Any, starts: list[tuple[int, ...]]) -> list[list[int]]:
    """Greedy answers of one batch."""
    requests = [Request(start, Sampling(seed=0), NEW, (), None, ()) for start in starts]
    options = DecodeOptions(rounds_a_chunk=4, prefill_width=8)
    run = BatchDecoder(target, proposer, params, requests, batch=len(starts), options=options)
    for _ in run:
        pass
    return [list(result.token_ids) for result in run.results()]


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TARGETS]
)
def test_speculation_writes_what_plain_decoding_writes(name: str) -> None:
    config, params, tokens, _, _ = case(name)
    target = Target(config=config, params=params, dtype=np.dtype("float32"), context=CONTEXT)
    starts = [tuple(tokens[:11].tolist()), tuple(tokens[5:9].tolist())]
    plain = decoded(target, Autoregressive(), None, starts)
    assert [len(text) for text in plain] == [NEW, NEW]
    draft = EagleConfig(
        version=3,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size,
        hidden_size=24,
        target_hidden_size=config.hidden_size,
        intermediate_size=20,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        num_aux=2,
        aux=(1, config.num_layers),
        head_norm=True,
        own_embedding=True,
        own_head=True,
    )
    weights = bind(draft, init_eagle(draft, jax.random.key(1)), target)
    assert decoded(target, Eagle(draft, DynamicTree(3, 2, 6)), weights, starts) == plain
    assert decoded(target, NGram(4), None, starts) == plain
