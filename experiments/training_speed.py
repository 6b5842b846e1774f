"""Where a training update's time goes, and which share of the machine's matrix rate it reaches.

    python -m experiments.training_speed --row-tokens 768 --steps 3

An update of an EAGLE-3 draft in the demo model's shape runs on random features: its time depends on shapes,
not on values. The share is the model's floating-point operations (three forwards' worth: forward, gradient by
activations, gradient by weights; recomputation is not counted) over time, against the rate of one large
bfloat16 product on the same machine in the same run. What an update spends on what follows from differences:
chain steps from K against K - 1, the head from two vocabulary sizes, the optimiser on its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import devices  # noqa: F401  sets what jax reads at its start
from eaglejax.devices import machine
from eaglejax.drafts.eagle.config import EagleConfig
from eaglejax.drafts.eagle.model import EagleParams, init_eagle
from eaglejax.train.batch import Batch
from eaglejax.train.objective import Objective
from eaglejax.train.objectives import Head
from eaglejax.train.optimizers import optimizer
from eaglejax.train.settings import OptimizerSettings
from eaglejax.train.state import init_state, make_update, micro_batches

TARGET_VOCAB = 151936


def draft(vocab: int, hidden: int, intermediate: int) -> EagleConfig:
    """The demo draft's shape with ``vocab`` draft tokens."""
    return EagleConfig(
        version=3,
        vocab_size=TARGET_VOCAB,
        draft_vocab_size=vocab,
        hidden_size=hidden,
        target_hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=hidden // 64,
        num_kv_heads=hidden // 64,
        head_dim=64,
        num_aux=3,
        aux=(2, 12, 24),
        head_norm=True,
        target_rows=True,
    )


def operations(config: EagleConfig, rows: int, length: int, steps: int) -> float:
    """Floating-point operations of one update: 6 a weight, token and pass, 2 for the frozen teacher head, and
    attention of each row over its row's T keys and its own chain."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    fuse = config.num_aux * hidden * hidden
    layer = 2 * hidden * (heads + 2 * config.num_kv_heads * config.head_dim) + heads * hidden
    layer += 3 * hidden * config.intermediate_size
    head = hidden * config.draft_vocab_size
    # The draft's head is frozen: it has no gradient by weights.
    per_token = 6 * fuse + 2 * head + steps * (6 * layer + 4 * head)
    attention = sum(3 * 4 * heads * (length + step) for step in range(steps))
    return float(rows * length * (per_token + attention))


def update_of(config: EagleConfig, rows: int, length: int, steps: int) -> Callable[[], Any]:
    """One update as a call that returns something to wait for."""
    rng = np.random.default_rng(0)
    weights = init_eagle(config, jax.random.key(0))
    bf16 = jnp.bfloat16
    size = (rows, length)

    def features(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape), bf16)

    ids = np.sort(rng.choice(TARGET_VOCAB, config.draft_vocab_size, replace=False)).astype(np.int32)
    head = features(config.hidden_size, config.draft_vocab_size) * 0.02
    frozen = EagleParams(
        weights={},
        embed=features(TARGET_VOCAB, config.hidden_size) * 0.02,
        head=head,
        ids=jnp.asarray(ids),
        tied=False,
    )
    batch = Batch(
        tokens=rng.integers(0, TARGET_VOCAB, size).astype(np.int32),
        documents=np.ones(size, np.int32),
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), size),
        supervised=np.ones(size, bool),
        aux=features(*size, config.num_aux, config.hidden_size),
        hidden=features(*size, config.hidden_size),
    )
    transform = optimizer(OptimizerSettings(warmup=1), 1000)
    apply = make_update(
        config,
        Objective(steps=steps, out_of_vocabulary="keep"),
        transform,
        frozen,
        Head(head, jnp.asarray(ids)),
        compute_dtype=bf16,
        seed=0,
    )
    state = init_state(weights, transform)
    micro = micro_batches([batch])

    def call() -> Any:
        nonlocal state
        state, report = apply(state, micro)
        return report.loss

    return call


def optimiser_of(config: EagleConfig) -> Callable[[], Any]:
    """The optimiser's part alone, on gradients that are there already."""
    import optax

    weights = init_eagle(config, jax.random.key(0))
    transform = optimizer(OptimizerSettings(warmup=1), 1000)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Any, state: Any, grads: Any) -> Any:
        changes, state = transform.update(grads, state, weights)
        return optax.apply_updates(weights, changes), state

    grads = jax.tree.map(lambda w: w * 1e-3, weights)
    held = [weights, transform.init(weights)]

    def call() -> Any:
        held[:] = step(*held, grads)
        return held[0]

    return call


def matrix_rate(size: int) -> float:
    """Operations a second of a bfloat16 product of three times ``size``."""
    a = jnp.asarray(np.random.default_rng(0).normal(size=(size, size)), jnp.bfloat16)
    product = jax.jit(lambda x, y: jnp.dot(x, y, preferred_element_type=jnp.float32))
    return 2.0 * size**3 / best(lambda: product(a, a), 5)


def best(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of ``repeats`` calls, compilation apart."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--row-tokens", type=int, default=768)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--intermediate", type=int, default=2432)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--matrix", type=int, default=2048, help="size of the product that gives the rate")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    config = draft(options.vocab, options.hidden, options.intermediate)
    shape = (options.rows, options.row_tokens)

    def seconds(config: EagleConfig, steps: int) -> float:
        return best(update_of(config, *shape, steps), options.repeats)

    rate = matrix_rate(options.matrix)
    whole = seconds(config, options.steps)
    fewer = seconds(config, options.steps - 1) if options.steps > 1 else None
    half = dataclasses.replace(config, draft_vocab_size=options.vocab // 2)
    smaller = seconds(half, options.steps)
    work = operations(config, *shape, options.steps)
    tokens = options.rows * options.row_tokens
    found = {
        "tokens": tokens,
        "steps": options.steps,
        "update_seconds": whole,
        "tokens_per_second": tokens / whole,
        "operations": work,
        "matrix_operations_per_second": rate,
        "share_of_matrix_rate": work / whole / rate,
        "seconds_per_further_step": None if fewer is None else whole - fewer,
        "seconds_of_the_head": 2 * (whole - smaller),
        "seconds_of_the_optimiser": best(optimiser_of(config), options.repeats),
    }
    print(json.dumps({"settings": vars(options), "figures": found, "machine": machine.describe()}, indent=1))


if __name__ == "__main__":
    main()
