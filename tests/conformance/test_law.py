"""Law 2, end to end: three tokens decoded by real rounds have the joint distribution that enumeration gives.
Every proposer, every kind of target; temperature, filters, penalties, and an end of text among the three."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, PROPOSERS, Case, every
from law_oracle import SIGNIFICANCE, p_value, transform
from loop_tools import COLD, PLAIN, SMALL_PROMPT, SMALL_VOCAB, Layers, logits_of, penalised, split

from eaglejax import sampling
from eaglejax.kv_format import KVFormat
from eaglejax.sampling import Sampling
from eaglejax.speculate import rounds

OPTIMISED = True

V, PROMPT = SMALL_VOCAB, SMALL_PROMPT
TOKENS = 3
TRIALS, AT_ONCE = 100_000, 10_000
NEVER = V
SETTINGS = {
    "temperature": (Sampling(temperature=0.7), NEVER),
    "filters": (Sampling(temperature=1.3, top_k=4, top_p=0.9, min_p=0.05), NEVER),
    "penalties": (
        Sampling(temperature=0.8, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.3),
        NEVER,
    ),
    "end of text": (Sampling(temperature=1.1), 2),
}
"""Sampling, and the id that ends a text."""


@functools.cache
def exact_joint(layers: Layers, name: str) -> np.ndarray:
    """[V, V, V]: probability of every answer of three tokens; behind an end of text stand zeros."""
    how, eos = SETTINGS[name]
    answers = list(itertools.product(range(V), repeat=TOKENS))
    texts = np.asarray([PROMPT + a for a in answers], np.int32)
    logits = logits_of(layers.small_target(), texts)
    joint = np.zeros((V,) * TOKENS)
    for row, answer in enumerate(answers):
        chance, ended = 1.0, False
        for n, token in enumerate(answer):
            if ended:
                chance *= token == 0
                continue
            here = penalised(logits[row, len(PROMPT) - 1 + n], how, PROMPT, answer[:n])
            chance *= transform(here, how.temperature, how.top_k, how.top_p, how.min_p)[token]
            ended = token == eos
        joint[answer] = chance
    assert abs(joint.sum() - 1) < 1e-9
    return joint


def sampler(case: Case, method: str, **options: Any) -> Any:
    """(settings of one row, end of text, keys [n]) -> answers [n, 3] and accepted drafts [n] of n rows, each
    a batch of one; one program for all settings."""
    target = case.layers.small_target()
    proposer, brought = case.small([*PROMPT, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4])
    program = rounds.Program(target.config, proposer, method, **{**case.judged, **options})
    weights, inputs = split(proposer, brought)
    given = rounds.Params(target.params, weights), inputs, target.cache_scales, jnp.asarray([PROMPT])

    def one(given: Any, rows: Any, eos: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        params, inputs, scales, prompt = given
        state = rounds.init_state(
            program,
            params,
            rows.replace(keys=key[None]),
            capacity=len(PROMPT) + TOKENS + proposer.nodes,
            budget=jnp.asarray([TOKENS], jnp.int32),
            eos=eos,
            cache_dtype=KVFormat(case.layers.cache),
            cache_scales=scales,
            inputs=inputs,
        )
        size = jnp.asarray([len(PROMPT)], jnp.int32)
        state, first = rounds.prefill_chunk(program, params, state, prompt, prompt, size, size > 0)
        answer = jnp.zeros((TOKENS,), jnp.int32).at[0].set(first.tokens[0, 0])

        def turn(carry: Any, _: None) -> tuple[Any, jax.Array]:
            state, answer = carry
            at = state.emitted[0]
            state, record = rounds.decode_round(program, params, state)
            steps = jnp.arange(record.tokens.shape[1])
            place = jnp.where(steps < record.count[0], at + steps, TOKENS)
            return (state, answer.at[place].set(record.tokens[0], mode="drop")), record.accepted[0]

        (_, answer), accepted = jax.lax.scan(turn, (state, answer), None, length=TOKENS - 1)
        return answer, accepted.sum()

    # What is given is an argument, lest the compiler work out the prompt's forward itself.
    return functools.partial(jax.jit(jax.vmap(one, (None, None, None, 0))), given)


def check(case: Case, method: str, names: Iterable[str], **options: Any) -> None:
    run = sampler(case, method, **options)
    keys = jax.random.split(jax.random.key(11, impl="threefry2x32"), TRIALS)
    for name in names:
        how, eos = SETTINGS[name]
        # The second row brings every flag and array with it, so that all settings run one program.
        rows = sampling.rows([how, COLD], V, [PROMPT] * 2)
        rows = jax.tree.map(lambda x: x[:1], rows).replace(sampled=True, filtered=True)
        parts = [run(rows, jnp.asarray([eos], jnp.int32), k) for k in jnp.split(keys, TRIALS // AT_ONCE)]
        answers, accepted = (np.concatenate(x) for x in zip(*parts, strict=True))
        counts = np.bincount(np.ravel_multi_index(answers.T, (V,) * TOKENS), minlength=V**TOKENS)
        counts, joint = counts.reshape((V,) * TOKENS), exact_joint(case.layers, name)
        # The joint distribution, then those of two tokens and of the last, which are sharper.
        for axes in ((), (0,), (1,), (2,), (0, 1)):
            p = p_value(counts.sum(axes), joint.sum(axes))
            assert p > SIGNIFICANCE, f"{name}, summed over {axes}: p = {p}"
        if case.proposer.depth and name == "temperature":
            assert 0.05 < accepted.mean() < TOKENS - 1.05, "neither side of the rule may go untested"


def some(case: Case) -> list[str]:
    """Two of the settings, others for the next case."""
    names, place = list(SETTINGS), sorted(CASES).index(case.name) if case.name in CASES else 0
    return [names[(2 * place + i) % len(names)] for i in range(2)]


@every("law")
def test_joint_law(case: Case) -> None:
    """Two of the settings."""
    check(case, "token", some(case))


@pytest.mark.slow
@every("law")
def test_joint_law_of_the_other_settings(case: Case) -> None:
    check(case, "token", [name for name in SETTINGS if name not in some(case)])


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in PROPOSERS if case.small(PROMPT)[0].chain])
def test_joint_law_of_block_verification(case: Case) -> None:
    """A chain whose drafts are judged together."""
    check(case, "block", SETTINGS)


def test_a_wrong_law_is_rejected() -> None:
    """What common mistakes give fails the same test at the same number of trials."""
    rng, right = np.random.default_rng(0), exact_joint(PLAIN, "filters")
    hot, flat = exact_joint(PLAIN, "temperature"), exact_joint(PLAIN, "penalties")
    first = right.sum((1, 2))
    reused = first[:, None, None] * right.sum((0, 2))[None, :, None] * right.sum((0, 1))[None, None, :]
    for wrong in (0.97 * right + 0.03 * hot, 0.99 * right + 0.01 / right.size, reused, flat):
        counts = rng.multinomial(TRIALS, (wrong / wrong.sum()).ravel()).reshape(right.shape)
        assert p_value(counts, right) < SIGNIFICANCE
