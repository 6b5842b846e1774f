"""Law 2, end to end: three tokens decoded by real rounds have the joint law that enumeration gives."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_tools import full_forward, lively, tiny_config
from scipy import stats

from eaglejax import sampling
from eaglejax.drafts.autoregressive import Autoregressive
from eaglejax.drafts.draft_model.proposer import DraftModel
from eaglejax.drafts.ngram import NGram
from eaglejax.drafts.scripted import Scripted, ScriptedLaw
from eaglejax.drafts.tree import chain, from_choices
from eaglejax.models.config import LayerSpec
from eaglejax.sampling import Sampling
from eaglejax.speculate import rounds

V = 5
TOKENS = 3
TRIALS = 100_000
PROMPT = (1, 4, 1, 4, 2, 1)
CONFIG = tiny_config(
    vocab_size=V, hidden_size=8, num_heads=2, num_kv_heads=1, num_layers=1, layers=(LayerSpec(window=11),)
)
DRAFT_CONFIG = tiny_config(
    vocab_size=V - 1,
    hidden_size=8,
    num_heads=1,
    num_kv_heads=1,
    num_layers=1,
    layers=(),
    max_position=len(PROMPT),
)
"""A draft of another vocabulary, geometry and window than the target's, made for shorter texts (A26, A82)."""
TREE = from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0]])
SAMPLINGS = {
    "plain": Sampling(temperature=0.7, seed=0),
    "filtered": Sampling(temperature=1.3, top_k=4, top_p=0.9, seed=0),
    "penalised": Sampling(temperature=0.8, frequency_penalty=0.7, presence_penalty=0.4, seed=0),
}


@functools.cache
def weights() -> Any:
    return lively(CONFIG, 3, 12.0)


def numpy_law(logits: np.ndarray, how: Sampling, answer: tuple[int, ...]) -> np.ndarray:
    """The transform written out a second time, for one position."""
    logits = logits.astype(np.float64)
    for token in set(answer):
        logits[token] -= how.presence_penalty + how.frequency_penalty * answer.count(token)
    logits /= how.temperature
    if how.top_k:
        logits[logits < np.sort(logits)[-how.top_k]] = -np.inf
    p = np.exp(logits - logits.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= how.top_p]] = 0
    return p / p.sum()


def exact_joint(how: Sampling) -> np.ndarray:
    """[V, V, V]: probability of every answer of three tokens."""
    answers = list(itertools.product(range(V), repeat=TOKENS))
    texts = np.asarray([PROMPT + a for a in answers], np.int32)
    logits = np.asarray(full_forward(weights(), CONFIG, texts)[0])
    joint = np.zeros((V,) * TOKENS)
    for row, answer in enumerate(answers):
        chance = 1.0
        for n, token in enumerate(answer):
            chance *= numpy_law(logits[row, len(PROMPT) - 1 + n], how, answer[:n])[token]
        joint[answer] = chance
    assert abs(joint.sum() - 1) < 1e-9
    return joint


def sample(proposer: Any, draft_params: Any, how: Sampling, method: str) -> tuple[np.ndarray, np.ndarray]:
    """Answers [TRIALS, 3] and accepted drafts [TRIALS] of rows that are each decoded as a batch of one."""
    program = rounds.Program(CONFIG, proposer, method)
    params = rounds.Params(weights(), draft_params)
    rows = sampling.rows([how], V, [PROMPT])
    prompt = jnp.asarray([PROMPT], jnp.int32)

    def one(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = rounds.init_state(
            program,
            params,
            rows.replace(keys=key[None]),
            capacity=16,
            budget=jnp.asarray([TOKENS], jnp.int32),
            eos=jnp.asarray([V], jnp.int32),
            cache_dtype=np.dtype("float32"),
        )
        size = jnp.asarray([len(PROMPT)], jnp.int32)
        state, first = rounds.prefill_chunk(program, params, state, prompt, prompt, size, jnp.asarray([True]))
        answer = jnp.zeros((TOKENS + proposer.nodes,), jnp.int32).at[0].set(first.tokens[0, 0])

        def step(carry: Any, _: None) -> tuple[Any, jax.Array]:
            state, answer = carry
            at = state.emitted[0]
            state, record = rounds.decode_round(program, params, state)
            moved = jax.lax.dynamic_update_slice(answer, record.tokens[0], (at,))
            return (state, jnp.where(record.count[0] > 0, moved, answer)), record.accepted[0]

        (_, answer), accepted = jax.lax.scan(step, (state, answer), None, length=TOKENS - 1)
        return answer[:TOKENS], accepted.sum()

    run = jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=10_000))
    keys = jax.random.split(jax.random.key(11, impl="threefry2x32"), TRIALS)
    answers, accepted = run(keys)
    return np.asarray(answers), np.asarray(accepted)


TABLE = np.log([[0.5, 0.2, 0.1, 0.1, 0.1], [0.05, 0.05, 0.3, 0.3, 0.3], [0.2, 0.2, 0.2, 0.2, 0.2]])
GUESSED = Scripted(TREE, V)
PROPOSERS: dict[str, tuple[Any, Any]] = {
    "ar": (Autoregressive(), None),
    "ngram": (NGram(length=2, max_ngram=2), None),
    "without_replacement": (ScriptedLaw(TREE), jnp.asarray(TABLE, jnp.float32)),
    "with_replacement": (ScriptedLaw(TREE, replacement=True), jnp.asarray(TABLE, jnp.float32)),
    "reduced": (ScriptedLaw(TREE, ids=(0, 2, 3)), jnp.asarray(TABLE[:, :3], jnp.float32)),
    "guessed_tree": (GUESSED, GUESSED.script([[0, 1, 2, 3, 4] * 4], [2, 1, 0], "alternate")),
    "chain": (ScriptedLaw(chain(2)), jnp.asarray(TABLE, jnp.float32)),
    "draft_model": (DraftModel(DRAFT_CONFIG, length=2, vocab_size=V), "model"),
}
RUNS = [
    ("ngram", "plain", "token"),
    ("without_replacement", "filtered", "token"),
    ("guessed_tree", "plain", "token"),
    ("draft_model", "penalised", "token"),
    ("draft_model", "filtered", "block"),
]
SLOW_RUNS = [
    ("with_replacement", "plain", "token"),
    ("reduced", "plain", "token"),
    ("ar", "plain", "token"),
    ("ar", "filtered", "token"),
    ("ngram", "penalised", "token"),
    ("ngram", "plain", "block"),
    ("chain", "plain", "token"),
    ("chain", "plain", "block"),
    ("without_replacement", "plain", "token"),
    ("without_replacement", "penalised", "token"),
    ("draft_model", "plain", "token"),
]


@pytest.mark.parametrize(
    ("name", "how", "method"), [*RUNS, *(pytest.param(*r, marks=pytest.mark.slow) for r in SLOW_RUNS)]
)
def test_joint_law(name: str, how: str, method: str) -> None:
    proposer, draft_params = PROPOSERS[name]
    if draft_params == "model":
        draft_params = lively(DRAFT_CONFIG, 4, 12.0)
    joint = exact_joint(SAMPLINGS[how]).ravel()
    answers, accepted = sample(proposer, draft_params, SAMPLINGS[how], method)
    counts = np.bincount(np.ravel_multi_index(answers.T, (V,) * TOKENS), minlength=V**TOKENS)
    assert counts[joint == 0].sum() == 0
    # Rare answers are pooled, so that every cell expects enough for the chi-square law to hold.
    rare = joint * TRIALS < 8
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(joint[~rare], joint[rare].sum()) * TRIALS
    if wanted[-1] < 8:
        seen, wanted = np.append(seen[:-2], seen[-2:].sum()), np.append(wanted[:-2], wanted[-2:].sum())
    assert len(seen) > 10
    assert stats.chisquare(seen, wanted).pvalue > 1e-3
    if name != "ar":
        assert 0.05 < accepted.mean() < TOKENS - 1.05  # neither side of the rule goes untested
