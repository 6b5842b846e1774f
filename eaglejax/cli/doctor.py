"""``eaglejax doctor``: what this machine is, what is in force on it, and whether it decodes correctly."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING, Any

import rich.table

import eaglejax as ej
from eaglejax import devices
from eaglejax.cli import show
from eaglejax.cli.inspect import target_config
from eaglejax.devices import compile_cache
from eaglejax.errors import ConfigError

if TYPE_CHECKING:
    from eaglejax.models.config import ModelConfig

MOST_COSTS = 8
"""Tables of costs that are printed."""


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Report versions, devices, compiler flags, caches and memory, and decode with a tiny random model."""

    target: str | None = None
    """Say how many rows of this model fit the device (its configuration alone is read)."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else there."""

    def run(self) -> int:
        """The command. Exit status 1 when the self-test fails."""
        report = examine(self.target)
        if self.json:
            show.print_json(report)
        else:
            _print(report)
        return 0 if report["self_test"]["passed"] else 1


def examine(target: str | None = None) -> dict[str, Any]:
    """The object that ``doctor --json`` prints. ``target``: a model whose memory is to be counted;
    raises what reading its configuration does."""
    # A model that is not there is told before anything is measured.
    config = None if target is None else target_config(target)
    from eaglejax.devices import cpu, machine
    from eaglejax.speculate import costs

    startup = devices.prepare()
    adapter = devices.current()
    on_cpu = adapter.platform == "cpu"
    choice = cpu.choose_dtype()
    return {
        "machine": machine.describe(),
        "adapter": {
            **adapter.describe(),
            "fastest_dtype": choice.dtype,
            "fastest_dtype_reason": choice.reason,
            "product_ms": choice.milliseconds,
        },
        "bfloat16_products": dataclasses.asdict(cpu.bfloat16_products()) if on_cpu else None,
        "packed_products": dataclasses.asdict(cpu.packed_products()) if on_cpu else None,
        "cache_operations": (
            {name: dataclasses.asdict(how) for name, how in cpu.cache_operations().items()}
            if on_cpu
            else None
        ),
        "memory": None if config is None else memory(config, adapter),
        "cpu_flags": dataclasses.asdict(startup.cpu_flags),
        "compile_cache": dataclasses.asdict(startup.compile_cache),
        "home": str(compile_cache.home(os.environ)),
        "speculation_costs": costs.stored(),
        "self_test": self_test(),
        "peak_memory_gib": round(machine.peak_memory_bytes() / machine.GIB, 2),
    }


def memory(config: ModelConfig, adapter: devices.Adapter) -> dict[str, Any]:
    """What decoding with trees of the usual size takes on the device: GiB of weights, how many rows of the
    whole ``context`` fit, and how long one row can be; ``refused``: why not even the weights fit."""
    from eaglejax.devices import machine
    from eaglejax.models.memory import footprint_on

    fits = footprint_on(adapter, config, nodes=ej.DynamicTree().nodes)
    found: dict[str, Any] = {
        "weights_gib": round(fits.weights / machine.GIB, 2),
        "weight_dtype": adapter.weight_dtype,
        "cache_dtype": adapter.cache_dtype,
        "context": config.max_position,
        "rows": 0,
        "longest_row": 0,
        "refused": None,
    }
    try:
        return found | {
            "rows": fits.largest_batch(config.max_position),
            "longest_row": min(config.max_position, fits.largest_context(1)),
        }
    except ConfigError as error:
        return found | {"refused": str(error)}


def tiny_config() -> ModelConfig:
    """A decoder that initialises and compiles in seconds."""
    from eaglejax.models.config import ModelConfig
    from eaglejax.nn.rope import RopeConfig

    return ModelConfig(
        family="llama",
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=256,
        rope=RopeConfig(theta=1e4),
        query_scale=8**-0.5,
    )


def self_test() -> dict[str, Any]:
    """Greedy decoding of a tiny random model in float32: the same tokens plain and with drafts?"""
    start = time.perf_counter()
    target = ej.random_target(tiny_config(), seed=0)
    prompt = [1, 2, 3, 4, 1, 2, 3]
    plain, drafted = (
        ej.generate(target, prompt, proposer=proposer, max_new_tokens=24, speculation="fixed")
        for proposer in (None, ej.NGram(length=3))
    )
    return {
        "passed": plain.token_ids == drafted.token_ids,
        "tokens": len(plain.token_ids),
        "accepted_drafts": drafted.stats.num_accepted_tokens,
        "seconds": round(time.perf_counter() - start, 2),
    }


def _choices(adapter: dict[str, Any]) -> dict[str, str]:
    """What the adapter chose, each with its reason, as a person reads it."""
    attention = adapter["attention"]
    values = {
        "attention": ", ".join(
            [attention["implementation"]]
            + [f"{k} {v}" for k, v in attention.items() if k != "implementation"]
        ),
        "block_kv": "by shape" if "block_kv" in adapter["reasons"] else None,
        "weight_dtype": adapter["weight_dtype"],
        "cache_dtype": adapter["cache_dtype"],
        "matmul_precision": adapter["matmul_precision"],
        "memory_bytes": f"{adapter['memory_gib']} GiB",
        "mesh": "axes " + ", ".join(adapter["mesh"]["axes"]),
    }
    return {
        name.replace("_", " "): f"{value}: {adapter['reasons'][name]}"
        for name, value in values.items()
        if value is not None
    }


def _kernel(how: dict[str, Any]) -> str:
    return f"C++ kernel, {how['level']}" if how["level"] else "XLA, no C++ kernel"


def _times(milliseconds: dict[int, float]) -> str:
    return ", ".join(f"{rows} rows {ms:.2f} ms" for rows, ms in milliseconds.items())


def _costs(report: dict[str, Any]) -> list[str]:
    """What is known of the costs of speculation on this machine, a line a kind of batch, newest first."""
    from eaglejax.speculate import costs

    rows = report["speculation_costs"]
    here = [row for row in rows if row["here"]]
    if not here:
        return ["none measured yet; the first batch of a kind measures them"]
    lines = []
    for row in here[:MOST_COSTS]:
        again = ", to be taken again" if row["again"] else ""
        lines.append(
            f"{row['model']} of {row['parameters'] / 1e6:.4g} M parameters in {row['dtype']}, "
            f"{row['draft']} of {row['nodes']} nodes, {row['batch']} x {row['capacity']} slots "
            f"in {row['cache']}, "
            f"{row['age'] / 3600:.3g} hours ago: {costs.text(row['widths'], row['seconds'])}; "
            f"they scatter by {row['spread'] - 1:.0%}{again}"
        )
    others = len(rows) - len(here[:MOST_COSTS])
    return [*lines, f"and {others} more, older or of other machines and settings"] if others else lines


def _print(report: dict[str, Any]) -> None:
    place, adapter = report["machine"], report["adapter"]
    table = rich.table.Table(show_header=False, title="eaglejax doctor", title_justify="left")
    table.add_row(
        "machine",
        f"{place['system']}, {place['processor']}, {place['cores']} cores, {place['memory_gib']} GiB",
    )
    table.add_row("versions", ", ".join(f"{k} {v}" for k, v in place["versions"].items() if v))
    table.add_row("python", place["python"])
    table.add_row("devices", f"{place['platform']}: {', '.join(place['devices'])}")
    table.add_row("adapter", f"{adapter['name']} ({adapter['platform']}, {adapter['generation']})")
    for choice, value in _choices(adapter).items():
        table.add_row(choice, value)
    table.add_row("fastest dtype", f"{adapter['fastest_dtype']}: {adapter['fastest_dtype_reason']}")
    for dtype, times in adapter["product_ms"].items():
        table.add_row("", f"{dtype}: {_times(times)}")
    if wide := report["bfloat16_products"]:
        rows = f" up to {wide['most_rows']} rows" if wide["level"] else ""
        table.add_row("bfloat16 weights", f"{_kernel(wide)}{rows}: {wide['reason']}")
    if packed := report["packed_products"]:
        table.add_row("packed weights", f"{_kernel(packed)}: {packed['reason']}")
        table.add_row("", f"W8A8: {_times(packed['milliseconds'])}")
    if over_cache := report["cache_operations"]:
        for row, name in (("cache attention", "attention"), ("cache writes", "write")):
            table.add_row(row, f"{_kernel(over_cache[name])}: {over_cache[name]['reason']}")
    if takes := report["memory"]:
        table.add_row("the model", f"{takes['weights_gib']} GiB of weights in {takes['weight_dtype']}")
        fits = f"{takes['rows']} rows of {takes['context']} tokens fit, one row of {takes['longest_row']}"
        table.add_row("", takes["refused"] or fits)
    flags = report["cpu_flags"]
    table.add_row("CPU flags", "\n".join([flags["reason"], *flags["in_force"]]))
    cache = report["compile_cache"]
    table.add_row("compilation cache", f"{cache['folder'] or 'off'} ({cache['reason']})")
    table.add_row("downloads", report["home"])
    for name, value in zip(("costs of rounds", *[""] * MOST_COSTS), _costs(report), strict=False):
        table.add_row(name, value)
    test = report["self_test"]
    table.add_row(
        "self-test",
        f"{'passed' if test['passed'] else 'FAILED'}: {test['tokens']} greedy tokens with drafts, "
        f"{test['accepted_drafts']} of them accepted drafts, compared with plain decoding",
    )
    table.add_row("peak memory", f"{report['peak_memory_gib']} GiB")
    show.stderr().print(table)
