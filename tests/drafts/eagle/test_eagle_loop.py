"""EAGLE drafts in the whole loop: greedy text is the target's, a perfect draft is accepted whole, and every
law of the output is the target's."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_cases import make
from eagle_loop import (
    CONTEXT,
    decode,
    draft_config,
    join,
    last_token_pair,
    make_target,
    own_layer_pair,
    target_config,
)
from width_tools import Turns

from eaglejax import sampling
from eaglejax.drafts.autoregressive import Autoregressive
from eaglejax.drafts.eagle.model import EagleParams
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.drafts.grow import DynamicTree
from eaglejax.drafts.tree import chain, from_choices
from eaglejax.models import decoder
from eaglejax.models.target import Target
from eaglejax.nn.visible import Causal
from eaglejax.sampling import Sampling
from eaglejax.speculate import rounds
from eaglejax.speculate.state import UNREAD

CHOICES = from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
PROMPTS = ([5], [1, 2, 3, 4, 5, 6, 7], [(7 * i) % 24 for i in range(19)])


@functools.cache
def greedy_target() -> Target:
    return make_target(target_config())


@functools.cache
def plain() -> list[list[int]]:
    return [r.token_ids for r in decode(greedy_target(), Autoregressive(), None, PROMPTS)]


@pytest.mark.parametrize(
    ("version", "changes", "options"),
    [
        (3, {"draft_vocab_size": 14, "norm_before_residual": True}, {"tree": DynamicTree(4, 3, 12)}),
        (1, {}, {"tree": CHOICES, "min_confidence": 0.05}),
        (3, {"own_head": False, "head_dim": 10, "feed_normed": True}, {"tree": CHOICES, "sample": True}),
    ],
    ids=["eagle3-dynamic", "eagle1-static", "eagle3-sampled"],
)
def test_greedy_text_is_the_targets(version, changes, options):
    """Law 1 (O1), ragged prompts, to the end of the context, past what the draft's own context holds
    (A26)."""
    target = greedy_target()
    config = draft_config(target.config, version, **changes)
    config = dataclasses.replace(config, rope=dataclasses.replace(config.rope, max_position=8))
    params = join(make(config, seed=1), config, target)
    results = decode(target, Eagle(config, **options), params, PROMPTS)
    assert [r.token_ids for r in results] == plain()
    assert all(len(r.token_ids) == CONTEXT - len(p) for r, p in zip(results, PROMPTS, strict=True))
    assert all(r.stats.num_draft_tokens > 0 for r in results)


@pytest.mark.slow
def test_rounds_of_every_width_and_none_give_the_targets_text():
    target, tree = greedy_target(), DynamicTree(3, 2, 6)
    config = draft_config(target.config, 3)
    params = join(make(config, seed=1), config, target)
    results = decode(target, Eagle(config, tree), params, PROMPTS, widths=(1, 3, 6), policy=Turns(rest=5))
    assert [r.token_ids for r in results] == plain()
    for result in results:
        assert {width for width, _ in result.stats.widths} == {1, 3, 6}


def test_features_left_unread_are_read_before_the_next_draft():
    """More rounds without a draft than may be left unread; the target's own layer then drafts as if it had
    read every round."""
    target, draft, params = own_layer_pair()
    prompts = ([1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4, 3, 2, 1])
    how = {"widths": (1, 3, 5), "policy": Turns(rest=UNREAD + 1)}
    for r in decode(target, Eagle(draft, chain(4)), params, prompts, tokens=UNREAD + 10, **how):
        assert dict(r.stats.widths) == {1: UNREAD + 1, 3: 1, 5: 1}
        assert r.stats.num_accepted_tokens == r.stats.num_draft_tokens == 4 + 2


def test_the_targets_own_layer_as_eagle1_draft_is_accepted_whole():
    """O3 with attention. Any slip of one position, mask or refill costs acceptance."""
    depth = 5
    target, draft, params = own_layer_pair()
    prompts = ([1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4, 3, 2, 1])
    # Every node's best child is in the tree, beside others that the walk has to leave out.
    tree = from_choices([[1], [0, 1], *([0] * n for n in range(1, depth + 1))])
    for r in decode(target, Eagle(draft, tree), params, prompts, tokens=25):
        assert r.stats.mean_acceptance_length == depth + 1
        assert len({*r.token_ids}) >= 3, "a constant text would prove little"


def test_a_perfect_eagle3_draft_is_accepted_whole_sampled_too():
    """O3 for the 2H layer: chains are accepted whole at any temperature."""
    target, draft, params = last_token_pair()
    prompts = ([1, 2, 3], [9, 8, 7, 6])
    heat = Sampling(1.0, seed=3)
    for r in decode(target, Eagle(draft, chain(4), sample=True), params, prompts, tokens=41, sampling=heat):
        assert len({*r.token_ids}) > 5
        # Rounding of p / q can refuse a draft once in a long while.
        assert r.stats.mean_acceptance_length >= 4.8


VOCAB, TRIALS = 6, 16_000


@functools.cache
def tiny() -> Target:
    config = target_config(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=12,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        max_position=16,
    )
    return make_target(config, seed=5, scale=12.0)


SETTINGS = {
    "greedy": Sampling(0.0),
    "cool": Sampling(0.3),
    "plain": Sampling(1.0),
    "hot": Sampling(1.5),
    "nucleus": Sampling(1.2, top_p=0.7),
    "top-k": Sampling(1.0, top_k=3),
}


@functools.partial(jax.jit, static_argnums=0)
def laws(config, params, rows, texts):
    """p behind every prefix of ``texts`` [n, T] by uncached forwards: [n, T, V]."""
    n, length = texts.shape
    cache = decoder.init_cache(config, n, length)
    place = jnp.broadcast_to(jnp.arange(length), texts.shape)
    out = decoder.forward(params, config, texts, place, cache, Causal())
    rows = jax.tree.map(lambda x: jnp.repeat(x, n, 0), rows)
    return sampling.law(sampling.process(decoder.unembed(params, config, out.hidden), rows), rows)


@functools.cache
def exact(name: str) -> np.ndarray:
    """p of every three tokens behind PROMPT: [V, V, V]."""
    target = tiny()
    texts = jnp.array([[*PROMPT, *t] for t in itertools.product(range(VOCAB), repeat=2)])
    p = np.asarray(laws(target.config, target.params, one_row(SETTINGS[name]), texts), np.float64)
    p = p[:, len(PROMPT) - 1 :].reshape(VOCAB, VOCAB, 3, VOCAB)
    first, second, third = p[0, 0, 0], p[:, 0, 1], p[:, :, 2]
    return first[:, None, None] * second[:, :, None] * third


PROMPT = (1, 4, 2)


def one_row(settings: Sampling) -> sampling.RowSampling:
    row = sampling.rows([dataclasses.replace(settings, seed=0)], VOCAB)
    return row.replace(sampled=True, filtered=True)


def sampler(proposer: Eagle, params: EagleParams):
    """(settings, keys [n]) -> three emitted tokens of n independent rows [n, 3]; one program for all
    settings."""
    target = tiny()
    program = rounds.Program(target.config, proposer)
    both = rounds.Params(target.params, params)

    def run(rows, key):
        rows = rows.replace(keys=key[None])
        state = rounds.init_state(
            program,
            both,
            rows,
            capacity=24,
            budget=jnp.array([3]),
            eos=jnp.array([VOCAB]),
            cache_dtype=jnp.float32,
        )
        prompt = jnp.array([PROMPT], jnp.int32)
        following = jnp.array([[*PROMPT[1:], 0]], jnp.int32)
        state, record = rounds.prefill_chunk(
            program, both, state, prompt, following, jnp.array([3]), jnp.array([True])
        )
        out, count = jnp.zeros(8, jnp.int32).at[0].set(record.tokens[0, 0]), 1
        for _ in range(2):
            state, record = rounds.decode_round(program, both, state)
            place = jnp.where(jnp.arange(record.tokens.shape[1]) < record.count[0], count, 8)
            out = out.at[place + jnp.arange(record.tokens.shape[1])].set(record.tokens[0], mode="drop")
            count = count + record.count[0]
        return out[:3]

    return jax.jit(jax.vmap(run, in_axes=(None, 0)))


LAW_CASES = {
    "siblings-reduced": (
        3,
        {"draft_vocab_size": 4},
        {"tree": from_choices([[0], [1], [0, 0], [0, 1], [1, 0]]), "sample": True},
    ),
    "dynamic-reduced": (3, {"draft_vocab_size": 4}, {"tree": DynamicTree(2, 3, 7)}),
    "eagle1-chain": (1, {}, {"tree": chain(2), "sample": True, "temperature": 0.7, "min_confidence": 0.3}),
}


@pytest.mark.parametrize("name", LAW_CASES)
def test_the_law_of_three_tokens_is_the_targets(name):
    """Law 2 (O2), joint over three tokens: temperatures 0, 0.3, 1 and 1.5, nucleus and top-k, siblings drawn
    without replacement, a reduced vocabulary that leaves much of p outside, cuts by confidence (A05, A06,
    A07, A09)."""
    version, changes, options = LAW_CASES[name]
    target = tiny()
    config = (
        draft_config(target.config, version, aux=(0, 1), num_aux=2, **changes)
        if version == 3
        else draft_config(target.config, 1, **changes)
    )
    made = make(config, seed=3, scale=0.7)
    run = sampler(Eagle(config, **options), join(made, config, target))
    keys = jax.random.split(jax.random.key(11), TRIALS)
    if config.reduced:
        outside = np.setdiff1d(np.arange(VOCAB), np.asarray(made.ids))
        assert exact("plain").sum((1, 2))[outside].sum() > 0.05, (
            "some of p must lie outside the draft's vocabulary"
        )
    for setting, chosen in SETTINGS.items():
        tokens = np.asarray(run(one_row(chosen), keys[:64] if setting == "greedy" else keys))
        counts = np.zeros((VOCAB,) * 3)
        np.add.at(counts, tuple(tokens.T), 1)
        want = exact(setting) * len(tokens)
        assert counts[want == 0].sum() == 0, f"{setting}: a text of probability zero came out"
        for axes in (
            (),
            (2,),
            (1, 2),
            (0, 2),
            (0, 1),
        ):  # the joint law, then the marginals, which are sharper
            chi, freedom = chi_square(counts.sum(axes), want.sum(axes))
            assert chi < freedom + 5 * np.sqrt(2 * freedom) + 5, f"{setting} {axes}: {chi:.0f} on {freedom}"


def chi_square(counts: np.ndarray, want: np.ndarray) -> tuple[float, int]:
    """Statistic and degrees of freedom; cells that expect fewer than eight are pooled."""
    common = want >= 8
    seen = np.append(counts[common], counts[~common].sum())
    hope = np.append(want[common], want[~common].sum())
    seen, hope = seen[hope > 0], hope[hope > 0]
    return float(((seen - hope) ** 2 / hope).sum()), max(len(hope) - 1, 1)
