"""How fast a quantised target decodes beside the float one, on this machine, and how many bytes it reads.

    python -m experiments.quantization.speed --prompts humaneval.jsonl

Every variant (see ``experiments.quantization.variants``) decodes the same prompts greedily to the same number
of tokens, plainly and with the draft, one prompt at a time and without compilation. Variants take turns, so
that a change in the machine's load meets all of them; a ratio is taken within a turn, and the median over
turns is what counts. Only ratios are kept: they say more about the scheme than about the machine. Times are
those of the tokens after the first, so that the prompt's forward is not among them.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import eaglejax as ej
from eaglejax.api import encode_prompt
from eaglejax.cli import show
from eaglejax.cli.run import run_command
from eaglejax.drafts.registry import load_draft
from eaglejax.drafts.tree import DynamicTree
from eaglejax.errors import ConfigError, EaglejaxError
from eaglejax.measure import timing
from eaglejax.models.target import Target
from eaglejax.speculate import metrics
from eaglejax.speculate.options import ROUNDS_A_CHUNK
from experiments import record
from experiments.evaluate import read_suite
from experiments.quantization.acceptance import SCHEMES, placeless
from experiments.quantization.variants import Targets, Variant

METHODS = ("plain", "eagle")


@dataclasses.dataclass(frozen=True)
class Speed:
    """Measure decoding speed and bytes of variants of a target, as ratios to the first one."""

    prompts: str
    """A prompt file; of a conversation the first question is asked."""
    target: str = "demo"
    """The float target."""
    draft: str = "demo"
    """An EAGLE draft that was made for it."""
    dtype: str = "bfloat16"
    """Of float weights and of activations."""
    variants: tuple[str, ...] = SCHEMES
    """Targets to measure; the others are held against the first."""
    limit: int = 1
    """Prompts that are asked."""
    max_new_tokens: int = 64
    """Of each answer, whether it ends before or not."""
    turns: int = 5
    """Runs of each variant and method."""
    tree_nodes: int = 16
    """Tokens that the target verifies a round."""
    tree_depth: int = 5
    """Most drafts that a round accepts."""
    tree_branching: int = 10
    """Nodes expanded at a level, and children of each."""
    name: str = "speed"
    """Of the result."""
    root: Path = record.ROOT
    """Where the studies' results lie."""

    def run(self) -> int:
        """The command; a Markdown table goes to stdout."""
        variants = [Variant.parse(name) for name in self.variants]
        if len(variants) < 2 or self.turns < 1 or self.max_new_tokens < 2:
            raise ConfigError("a ratio needs two variants, a turn and two tokens at least")
        suite = read_suite(self.prompts, self.limit)
        with show.status(f"loading {self.target}"):
            targets = Targets(ej.load_target(self.target, dtype=self.dtype))
        runners = {}
        for variant in variants:
            with show.status(f"compiling {variant.name}"):
                runners[variant.name] = Runner(self, targets.make(variant), suite)
        figures = compared(runners, self.turns)
        settings = {
            key: placeless(value) if key in ("target", "draft") else value
            for key, value in dataclasses.asdict(self).items()
            if key not in ("prompts", "variants", "name", "root")
        }
        words = [f"--prompts {suite.name}.jsonl --variants {' '.join(self.variants)} --name {self.name}"]
        words += [f"--{key.replace('_', '-')} {value}" for key, value in settings.items()]
        record.record(
            "quantization",
            self.name,
            command=" ".join(["python -m experiments.quantization.speed", *words]),
            config=settings | {"prompts": suite.name, "prompts_digest": suite.digest},
            seed=None,
            figures=figures,
            root=self.root,
        )
        show.write_text(table(figures))
        return 0


class Runner:
    """One variant, compiled: its target and how both methods decode."""

    def __init__(self, settings: Speed, target: Target, suite: Any) -> None:
        self.target = target
        tree = DynamicTree(settings.tree_depth, settings.tree_branching, settings.tree_nodes)
        bound = load_draft(settings.draft, target, align=target.basis is not None, tree=tree)
        self._prompts = [encode_prompt(target, row.request([], chat=True)) for row in suite.rows]
        self._options: dict[str, dict[str, Any]] = {
            method: {
                "proposer": proposer,
                "max_new_tokens": settings.max_new_tokens,
                "ignore_eos": True,
                "rounds_a_chunk": ROUNDS_A_CHUNK,
                "speculation": "fixed",
            }
            for method, proposer in zip(METHODS, (None, bound), strict=True)
        }
        for method in METHODS:
            for prompt in self._prompts:
                timing.timed(target, prompt, **self._options[method])

    def decode(self, method: str) -> metrics.Stats:
        """All prompts once. Raises EaglejaxError where something had to be compiled for it."""
        before = timing.compilations()
        found = [timing.decode(self.target, prompt, **self._options[method]) for prompt in self._prompts]
        if timing.compilations() != before:
            raise EaglejaxError("a timed run compiled something; run the same command again")
        return metrics.total(answer.stats for answer in found)

    @property
    def bytes_read(self) -> int:
        """Bytes of the weights that a token multiplies: all but an embedding that is looked up alone."""
        tied = self.target.config.tie_embeddings
        return self.target.nbytes - (0 if tied else self.target.params["embed"].nbytes)


def compared(runners: dict[str, Runner], turns: int) -> dict[str, dict[str, Any]]:
    """The ``figures`` of each variant; the first is what the others are held against.

    ``plain``, ``eagle``: decoding speed over the first variant's with the same method; ``eagle_over_plain``:
    over its own plain decoding; each with ``median``, ``least`` and ``greatest`` over the turns. ``tau``: of
    the draft. ``bytes``: of all weights; ``bytes_read``: see :class:`Runner`; ``bandwidth_ratio``: what
    plain decoding would gain if reading weights took all the time.
    """
    speeds: dict[tuple[str, str], list[float]] = {(name, m): [] for name in runners for m in METHODS}
    taus: dict[str, float] = {}
    with show.progress("turns", turns) as advance:
        for _ in range(turns):
            for name, runner in runners.items():
                for method in METHODS:
                    stats = runner.decode(method)
                    speeds[name, method].append(1e3 / stats.tpot_ms)
                    if method == "eagle":
                        taus[name] = stats.mean_acceptance_length
            advance()
    first = next(iter(runners))

    def ratio(above: tuple[str, str], below: tuple[str, str]) -> dict[str, float]:
        each = [a / b for a, b in zip(speeds[above], speeds[below], strict=True)]
        return {"median": statistics.median(each), "least": min(each), "greatest": max(each)}

    return {
        name: {
            **{method: ratio((name, method), (first, method)) for method in METHODS},
            "eagle_over_plain": ratio((name, "eagle"), (name, "plain")),
            "tau": taus[name],
            "bytes": runner.target.nbytes,
            "bytes_read": runner.bytes_read,
            "bandwidth_ratio": runners[first].bytes_read / runner.bytes_read,
        }
        for name, runner in runners.items()
    }


def table(figures: dict[str, dict[str, Any]]) -> str:
    """The figures as a Markdown table."""

    def spread(found: dict[str, float]) -> str:
        return f"{found['median']:.2f} ({found['least']:.2f} to {found['greatest']:.2f})"

    lines = [
        "| variant | MB | MB read a token | bandwidth allows | plain | EAGLE-3 | over its plain | tau |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in figures.items():
        cells = [f"`{name}`", f"{found['bytes'] / 1e6:.0f}", f"{found['bytes_read'] / 1e6:.0f}"]
        cells += [f"{found['bandwidth_ratio']:.2f}", spread(found["plain"]), spread(found["eagle"])]
        cells += [spread(found["eagle_over_plain"]), f"{found['tau']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    return run_command(Speed, argv)


if __name__ == "__main__":
    sys.exit(main())
