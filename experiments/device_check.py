"""Check and time the kernels on the GPU or TPU at hand: numerics, bandwidth, a step and a verify.

    python -m experiments.device_check --seconds 600 > report.json
    python -m experiments.device_check --dry-run        tiny sizes on a CPU, kernels interpreted

One JSON object goes to standard output, and each case as it ends to standard error, so that a run that is
cut short loses nothing. Parts run in the order of their worth; cases that no longer fit ``--seconds`` are
listed as skipped. The exit status is 1 when a case failed or a result lies outside its tolerance.
docs/kernels.md says what each figure means.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eaglejax import devices
from eaglejax.devices.dtypes import dtype_bytes
from eaglejax.kv_format import SCALE_BYTES
from eaglejax.models import decoder, memory
from eaglejax.models.config import ModelConfig
from eaglejax.nn.attention import attention_by
from eaglejax.nn.rope import RopeConfig
from eaglejax.nn.visible import Tree
from experiments.device_bench import (
    CYCLED_BYTES,
    FORMS,
    MOST_COPIES,
    TINY,
    Bench,
    Sizes,
    binary_tree,
    compare,
    exactly,
    normal,
    product_problem,
    tree_problem,
    widen,
)
from kernels_pallas.hadamard import hadamard
from kernels_pallas.quant_matmul import quant_matmul
from kernels_pallas.tree_attention import tree_attention
from kernels_pallas.ttt_attention import ttt_attention

Case = tuple[str, Callable[[], dict[str, Any]]]


def check_trees(bench: Bench) -> Iterator[Case]:
    """Tree attention against its reference in float32."""

    def check(nodes: int, cache: str, statics: dict[str, Any]) -> dict[str, Any]:
        args, options = tree_problem(bench.sizes, nodes, bench.sizes.slots[0], cache)
        got = jax.jit(functools.partial(tree_attention, **statics, **bench.options))(*args, **options)
        attend = functools.partial(tree_attention, **statics, implementation="xla")
        return compare(got, exactly(lambda a, o: attend(*a, **o), widen(args), widen(options)), 2e-2)

    for nodes in bench.sizes.nodes:
        yield f"{nodes} nodes, bfloat16", functools.partial(check, nodes, "bfloat16", {})
    for cache in ("int8", "float8_e4m3fn"):
        yield f"{cache}", functools.partial(check, bench.sizes.nodes[0], cache, {})
    masked = {"window": bench.sizes.slots[0] // 2, "softcap": 30.0}
    yield "window and softcap", functools.partial(check, bench.sizes.nodes[0], "bfloat16", masked)


def check_products(bench: Bench) -> Iterator[Case]:
    """Quantised products against the reference; integers are summed exactly, floats in the unit's way."""

    def check(form: str, rows: int) -> dict[str, Any]:
        problem = product_problem(bench.sizes, form, rows)

        def multiply(problem, **options):
            return quant_matmul(**problem, out_dtype=jnp.float32, **options)

        got = jax.jit(functools.partial(multiply, **bench.options))(problem)
        want = exactly(functools.partial(multiply, implementation="xla"), widen(problem))
        tolerance = 2e-6 if FORMS[form][1] else 1e-4
        return compare(got, want, tolerance) | {"same_bits": bool((got == want).all())}

    for form in FORMS:
        for rows in bench.sizes.rows:
            yield f"{form}, {rows} rows", functools.partial(check, form, rows)


def check_rotations(bench: Bench) -> Iterator[Case]:
    """Rotation against the reference, and back again."""

    def check(size: int) -> dict[str, Any]:
        x = normal(0, (bench.sizes.rows[0], size))
        rotated = jax.jit(functools.partial(hadamard, **bench.options))(x)
        back = jax.jit(functools.partial(hadamard, transpose=True, **bench.options))(rotated)
        want = exactly(functools.partial(hadamard, implementation="xla"), x.astype(jnp.float32))
        return compare((rotated, back), (want, x), 1e-2)

    for size in bench.sizes.rotations:
        yield f"size {size}", functools.partial(check, size)


def check_training(bench: Bench) -> Iterator[Case]:
    """Training-time-test attention of three packed documents and three steps, with its gradients."""
    sizes = bench.sizes

    def check() -> dict[str, Any]:
        def arrays(first: int, heads: int) -> jax.Array:
            return normal(first, (1, sizes.train_length, heads, sizes.dim))

        q, grad = arrays(0, sizes.heads), arrays(1, sizes.heads)
        keys, values = ([arrays(10 * side + i, sizes.kv_heads) for i in range(3)] for side in (1, 2))
        ids = (jnp.arange(sizes.train_length, dtype=jnp.int32) * 3 // sizes.train_length)[None]

        def gradients(q, keys, values, grad, **options):
            def attend(q, keys, values):
                return ttt_attention(q, keys, values, document_ids=ids, **options)

            out, pull = jax.vjp(attend, q, keys, values)
            return out, pull(grad)

        problem = (q, keys, values, grad)
        got = jax.jit(functools.partial(gradients, **bench.options))(*problem)
        want = exactly(functools.partial(gradients, implementation="xla"), *widen(problem))
        return compare(got, want, 3e-2)

    yield f"{sizes.train_length} tokens", check


def _attend(choice: dict[str, Any], q: jax.Array, args: tuple, options: dict[str, Any]) -> jax.Array:
    keys, values, words, lengths = args
    return tree_attention(q, keys, values, words, lengths, **options, **choice)[0]


def _attend_jax(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, *, implementation: Any
) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)


def time_trees(bench: Bench) -> Iterator[Case]:
    """Tree attention by kernel, by XLA and by ``jax.nn.dot_product_attention``, against bandwidth."""
    sizes = bench.sizes

    def measure(nodes: int, slots: int, cache: str, how: str) -> dict[str, Any]:
        width = sizes.dim * dtype_bytes(cache) + (SCALE_BYTES if cache == "int8" else 0)
        moved = 2 * sizes.kv_heads * slots * width + 4 * nodes * sizes.heads * sizes.dim
        bound = bench.bound_us(moved, 4.0 * sizes.heads * nodes * slots * sizes.dim)
        copies = 1 if bench.interpret else min(MOST_COPIES, max(2, math.ceil(CYCLED_BYTES / moved)))
        problems = [tree_problem(sizes, nodes, slots, cache, seed=10 * i) for i in range(copies)]
        q = problems[0][0][0]
        operands: list[tuple[Any, ...]]
        if how.startswith("jax.nn"):
            mask = np.zeros((1, 1, nodes, slots), bool)
            length = int(problems[0][0][4][0])
            mask[..., :length], mask[0, 0, :, length : length + nodes] = True, binary_tree(nodes)
            step = functools.partial(_attend_jax, implementation=how.split()[-1])
            # In the layout that it wants, and without nan in slots that it masks only after reading.
            operands = [
                (*(jnp.nan_to_num(x).swapaxes(1, 2) for x in args[1:3]), jnp.asarray(mask))
                for args, _ in problems
            ]
        else:
            step = functools.partial(_attend, bench.options if how == "kernel" else {"implementation": "xla"})
            operands = [(args[1:], options) for args, options in problems]
        return bench.timed(bench.loop(step, q, operands, bound), moved, bound)

    baselines = ["jax.nn xla"] + (["jax.nn cudnn"] if jax.default_backend() == "gpu" else [])
    for slots in sizes.slots:
        for nodes in sizes.nodes:
            for cache, ways in (("bfloat16", ["kernel", "xla", *baselines]), ("int8", ["kernel", "xla"])):
                for how in ways:
                    name = f"{nodes} nodes, {slots} slots, {cache}, {how}"
                    yield name, functools.partial(measure, nodes, slots, cache, how)


def time_products(bench: Bench) -> Iterator[Case]:
    """Quantised products by kernel and by XLA, against bandwidth."""

    def measure(form: str, rows: int, how: str) -> dict[str, Any]:
        problem = product_problem(bench.sizes, form, rows)
        moved = sum(x.nbytes for x in problem.values()) + 2 * rows * bench.sizes.outputs
        bound = bench.bound_us(moved, 2.0 * rows * bench.sizes.inputs * bench.sizes.outputs)
        copies = 1 if bench.interpret else min(MOST_COPIES, max(2, math.ceil(CYCLED_BYTES / moved)))
        choice = bench.options if how == "kernel" else {"implementation": "xla"}
        problems = [product_problem(bench.sizes, form, rows, seed=10 * i) for i in range(copies)]

        def step(carry, problem):
            # One number of the last result goes into the next activations, so that none runs ahead.
            x = problem["x"] + carry.astype(problem["x"].dtype)
            return quant_matmul(**(problem | {"x": x}), **choice)[0, 0] * 0

        us = bench.loop(step, jnp.zeros((), jnp.bfloat16), [(p,) for p in problems], bound)
        return bench.timed(us, moved, bound)

    for rows in bench.sizes.rows:
        for form in FORMS:
            for how in ("kernel", "xla"):
                yield f"{form}, {rows} rows, {how}", functools.partial(measure, form, rows, how)


def model_config(sizes: Sizes, adapter: devices.Adapter) -> ModelConfig:
    """The shape of an 8B Llama, with as many layers as leave room beside the weights."""
    config = ModelConfig(
        family="llama",
        vocab_size=sizes.vocab,
        hidden_size=sizes.inputs,
        intermediate_size=sizes.outputs,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.dim,
        max_position=max(sizes.slots),
        rope=RopeConfig(theta=500_000.0, max_position=max(sizes.slots)),
        query_scale=sizes.dim**-0.5,
    )
    while config.num_layers > 1 and 2 * memory.parameter_count(config) > 0.75 * adapter.memory_bytes:
        config = dataclasses.replace(config, num_layers=config.num_layers - 1)
    return config


def time_model(bench: Bench) -> Iterator[Case]:
    """A whole autoregressive step and verifies of a random model, against the roofline."""
    sizes, adapter = bench.sizes, devices.current()
    config = model_config(sizes, adapter)
    slots = sizes.slots[0]
    params: list[Any] = []  # made by the first case, for all of them

    def measure(nodes: int, attention: devices.Attention | None) -> dict[str, Any]:
        if not params:
            params.append(decoder.init_params(config, jax.random.key(0), jnp.bfloat16))
        cache = decoder.init_cache(config, 1, slots, jnp.bfloat16)
        length = slots - max(sizes.verified)
        cache = dataclasses.replace(cache, lengths=jnp.full((1,), length, jnp.int32))
        seen = binary_tree(nodes)
        visible = Tree(jnp.asarray(seen)[None])
        positions = jnp.asarray(length + seen.sum(1) - 1, jnp.int32)[None]

        def step(carry, params):
            tokens, cache = carry
            with attention_by(attention):
                out = decoder.forward(params, config, tokens, positions, cache, visible)
            tokens = jnp.argmax(decoder.unembed(params, config, out.hidden), axis=-1).astype(jnp.int32)
            return tokens, out.cache

        # The table of embeddings is looked up, not read through.
        weights = memory.parameter_count(config) - config.vocab_size * config.hidden_size
        moved = 2.0 * weights + (length + nodes) * memory.cache_bytes_per_token(config, "bfloat16")
        attended = 4.0 * config.num_layers * config.num_heads * config.head_dim * (length + nodes)
        bound = bench.bound_us(moved, nodes * (2.0 * weights + attended))
        us = bench.loop(step, (jnp.zeros((1, nodes), jnp.int32), cache), [(params[0],)], bound)
        return bench.timed(us, moved, bound) | {"layers": config.num_layers, "slots": length + nodes}

    # What the adapter would not choose, for comparison.
    name, other = "xla", devices.XLA
    if adapter.attention.implementation == "xla":
        name = "kernel"
        other = devices.Attention(bench.kernel, interpret=bench.interpret or None)
    for how, attention in (("the adapter's choice", None), (name, other)):
        for nodes in sizes.verified:
            yield f"{nodes} nodes, attention by {how}", functools.partial(measure, nodes, attention)


PARTS: dict[str, Callable[[Bench], Iterator[Case]]] = {
    "numerics of tree_attention": check_trees,
    "numerics of quant_matmul": check_products,
    "numerics of hadamard": check_rotations,
    "numerics of ttt_attention": check_training,
    "time of the model": time_model,
    "time of tree_attention": time_trees,
    "time of quant_matmul": time_products,
}


def run(bench: Bench, seconds: float) -> dict[str, Any]:
    """Every case's result by part and name. A case that raises is reported and the others still run."""
    deadline = time.monotonic() + seconds
    report: dict[str, Any] = {}
    for part, cases in PARTS.items():
        results = report[part] = {}
        for name, case in cases(bench):
            start = time.monotonic()
            if start > deadline:
                results[name] = {"skipped": f"the {seconds:g} seconds were over"}
                continue
            try:
                results[name] = case()
            except Exception as error:  # whatever a driver or compiler raises belongs in the report
                results[name] = {"failed": f"{type(error).__name__}: {error}"}
            results[name]["seconds"] = round(time.monotonic() - start, 2)
            print(json.dumps({part: {name: results[name]}}), file=sys.stderr, flush=True)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no case after so many seconds")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, kernels interpreted on a CPU")
    arguments = parser.parse_args(argv)
    backend = jax.default_backend()
    if arguments.dry_run != (backend == "cpu"):
        parser.error(
            f"jax's device is a {backend}: "
            + ("--dry-run wants JAX_PLATFORMS=cpu" if arguments.dry_run else "there is --dry-run for it")
        )
    adapter = devices.current()
    bench = Bench(
        sizes=TINY if arguments.dry_run else Sizes(),
        kernel="tpu" if arguments.dry_run else backend,
        interpret=arguments.dry_run,
        chip=adapter.chip,
    )
    device = jax.devices()[0]
    report = {
        "device": device.device_kind,
        "adapter": adapter.describe(),
        "jax": jax.__version__,
        "dry_run": arguments.dry_run,
        "parts": run(bench, arguments.seconds),
    }
    print(json.dumps(report, indent=1))
    results = [result for part in report["parts"].values() for result in part.values()]
    return int(any("failed" in result or not result.get("passed", True) for result in results))


if __name__ == "__main__":
    sys.exit(main())
