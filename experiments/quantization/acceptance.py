"""What quantising and rotating a target cost its draft: acceptance, the text, perplexity and bytes.

    python -m experiments.quantization.acceptance --answers answers.jsonl \\
        --suites humaneval.jsonl mt_bench.jsonl

Each variant of the target (see ``experiments.quantization.variants``) is scored on answers as
``experiments.quantization.perplexity`` does it, and decodes the first questions of the suites with the draft
that was made for the float target, aligned where the target is rotated. What is measured is written at once;
the same command goes on with what is missing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

import eaglejax as ej
from eaglejax.api import encode_prompt
from eaglejax.cli import show
from eaglejax.cli.run import run_command
from eaglejax.drafts.base import Bound
from eaglejax.drafts.registry import load_draft
from eaglejax.drafts.tree import DynamicTree
from eaglejax.measure import near_ties
from eaglejax.models.target import Target
from eaglejax.train.features import fingerprint
from eaglejax.train.samples import Sample
from eaglejax.train.sweep import draft_digest
from experiments import record
from experiments.evaluate import Suite, read_suite, summary
from experiments.quantization import perplexity
from experiments.quantization.growing import GrowingResult
from experiments.quantization.variants import Targets, Variant

SCHEMES = ("float", "w8a16", "w8a8", "w4a16-g32", "w4a8-g32")
VARIANTS = (
    *SCHEMES,
    *(f"{name}+r1" for name in SCHEMES),
    *(f"{name}+r1+r2+r4" for name in SCHEMES),
    "float+kv-int8",
    "w8a8+kv-int8",
    "float+kv-int8+r3",
    "w8a8+kv-int8+r3",
)
"""Ordered so that rotations that are shared are made once."""

Measure = Literal["perplexity", "acceptance"]

CALIBRATION = 16
"""Answers at the head of the file that other studies calibrate on; they are passed over, so that all score
the same texts."""

REPEATED = ("target", "draft", "dtype", "tokens", "width", "limit", "max_new_tokens")
REPEATED += ("tree_nodes", "tree_depth", "tree_branching")
"""Settings that a result depends on and that its command repeats."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Measure variants of a target, with the draft of the float one."""

    answers: Path
    """JSON Lines of texts, as for training."""
    suites: tuple[str, ...]
    """Prompt files; of a conversation the first question is asked."""
    target: str = "demo"
    """The float target."""
    draft: str = "demo"
    """An EAGLE draft that was made for it."""
    dtype: str = "bfloat16"
    """Of float weights and of activations."""
    measure: tuple[Measure, ...] = ("perplexity", "acceptance")
    """What is measured of each variant."""
    tokens: int = 300
    """Answer tokens that are scored."""
    width: int = 128
    """Longest text that is scored, prompt included."""
    limit: int = 3
    """Questions of each suite."""
    max_new_tokens: int = 64
    """Of each answer."""
    tree_nodes: int = 16
    """Tokens that the target verifies a round."""
    tree_depth: int = 5
    """Most drafts that a round accepts."""
    tree_branching: int = 10
    """Nodes expanded at a level, and children of each."""
    root: Path = record.ROOT
    """Where the studies' results lie."""


@dataclasses.dataclass(frozen=True)
class Acceptance(Settings):
    """Measure what quantising and rotating a target cost."""

    variants: tuple[str, ...] = VARIANTS
    """Targets to measure, see `experiments/quantization/variants.py`."""
    name: str = "acceptance"
    """Of the result."""

    def run(self) -> int:
        """The command. Exit status 1 where a text is not plain decoding's."""
        variants = [Variant.parse(name) for name in self.variants]
        bench = Bench.prepare(self)
        result = bench.result(self.name, "acceptance")
        targets = Targets(bench.target)
        for variant in variants:
            missing = [part for part in self.measure if not result.has(variant.name, part)]
            if not missing:
                continue
            with show.status(f"making {variant.name}"):
                target = targets.make(variant)
            for part in missing:
                found = bench.measure(part, target)
                result.put(found, variant.name, part)
                show.print_note(f"{variant.name}: {told(found)}")
        parts = [found.get("acceptance", {}) for found in result.figures.values()]
        return 0 if all(part.get("identical_to_ar", True) for part in parts) else 1


def placeless(spec: str) -> str:
    """What names a model, without the place of a local one."""
    path = Path(spec)
    return path.name if path.exists() else spec


def told(found: dict[str, Any]) -> str:
    """A measurement in one line."""
    if "all" not in found:
        return ", ".join(f"{name} {value:.5g}" for name, value in found.items())
    text = "as" if found["identical_to_ar"] else "NOT as"
    return (
        f"tau {found['all']['mean_acceptance_length']:.3f}, text {text} plain decoding's "
        f"({found['flips']} flips, the widest {found['largest_flip_gap']:.3g})"
    )


@dataclasses.dataclass
class Bench:
    """Everything that variants of one target are measured with."""

    settings: Settings
    target: Target
    texts: list[Sample]
    suites: list[Suite]

    @classmethod
    def prepare(cls, settings: Settings) -> Bench:
        """Load the float target and read texts and questions."""
        with show.status(f"loading {settings.target}"):
            target = ej.load_target(settings.target, dtype=settings.dtype)
        _, texts = perplexity.texts_of(
            target, settings.answers, settings.width, settings.tokens, skip=CALIBRATION
        )
        return cls(settings, target, texts, [read_suite(path, settings.limit) for path in settings.suites])

    def result(self, name: str, module: str, **more: Any) -> GrowingResult:
        """The study's result of that name; ``more``: further settings that it depends on."""
        given = {k: getattr(self.settings, k) for k in REPEATED}
        given |= {k: placeless(given[k]) for k in ("target", "draft")} | more
        words = ["--answers", self.settings.answers.name]
        words += ["--suites", *(f"{suite.name}.jsonl" for suite in self.suites)]
        for key, value in (given | {"name": name}).items():
            words += [f"--{key.replace('_', '-')}", str(value)]
        about = {
            "target_fingerprint": fingerprint(self.target),
            "draft_digest": draft_digest(self.settings.draft),
            "answers_digest": hashlib.sha256(self.settings.answers.read_bytes()).hexdigest()[:32],
            "texts": len(self.texts),
            "suites": {suite.name: suite.digest for suite in self.suites},
        }
        return GrowingResult(
            name,
            command=f"python -m experiments.quantization.{module} {shlex.join(words)}",
            config=given | about,
            seed=None,
            root=self.settings.root,
        )

    @functools.cached_property
    def base(self) -> np.ndarray:
        """log p [T, V] of the float target on the texts."""
        return perplexity.score(self.target, self.texts, self.settings.width)[1]

    def measure(self, part: Measure, target: Target) -> dict[str, Any]:
        """One part of what is recorded of a variant."""
        if part == "perplexity":
            return perplexity.measure(target, self.texts, self.settings.width, self.base)["figures"]
        tree = DynamicTree(self.settings.tree_depth, self.settings.tree_branching, self.settings.tree_nodes)
        with show.status("binding the draft"):
            bound = load_draft(self.settings.draft, target, align=target.basis is not None, tree=tree)
        return accepted(target, bound, self.suites, self.settings.max_new_tokens)


def accepted(target: Target, bound: Bound, suites: Sequence[Suite], max_new_tokens: int) -> dict[str, Any]:
    """What a draft accepts over the suites' first questions, greedily, all of them in one batch: counts and
    rates as ``experiments.evaluate`` has them, the comparison with the same target's plain decoding, and a
    hash of all token ids."""
    asked = [(suite.name, row) for suite in suites for row in suite.rows]
    prompts = [encode_prompt(target, row.request([], chat=True)) for _, row in asked]
    run = functools.partial(
        ej.generate, target, prompts, max_new_tokens=max_new_tokens, batch_size=len(prompts)
    )
    plain, drafted = run(), run(proposer=bound)
    comparison = near_ties.Comparison(near_ties.tolerance(target))
    ids = hashlib.sha256()
    for prompt, one, other in zip(prompts, plain, drafted, strict=True):
        comparison = near_ties.compare(comparison, target, prompt, one.token_ids, other.token_ids)
        ids.update(np.asarray(other.token_ids, "<i4").tobytes() + b"|")
    by_suite = {suite.name: [] for suite in suites}
    for (name, _), answer in zip(asked, drafted, strict=True):
        by_suite[name].append(answer.stats)
    return {
        "all": summary([answer.stats for answer in drafted]),
        "suites": {name: summary(stats) for name, stats in by_suite.items()},
        **comparison.to_json(),
        "token_hash": ids.hexdigest(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    return run_command(Acceptance, argv)


if __name__ == "__main__":
    sys.exit(main())
