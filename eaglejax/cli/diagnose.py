"""``eaglejax diagnose``: why a draft is accepted so rarely."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import rich.table
import rich.text
import tyro

import eaglejax as ej
from eaglejax.checkpoint.sources import resolve
from eaglejax.cli import methods, show
from eaglejax.cli.methods import draft_reading
from eaglejax.config import AuxConvention, BadRow, read_prompts
from eaglejax.drafts.places import draft_path
from eaglejax.drafts.registry import family_reading, read_draft
from eaglejax.errors import ConfigError
from eaglejax.measure.findings import STEPS

if TYPE_CHECKING:
    from eaglejax.measure.diagnose import Report
    from eaglejax.measure.quality import Texts
    from eaglejax.speculate.metrics import Stats

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in three sentences why the sky is blue.",
    "What is 17 * 23? Show the steps.",
    "List five animals that live in the sea.",
)
"""Prompts where the user gives none."""


@dataclasses.dataclass(frozen=True)
class Diagnose:
    """Find out why acceptance is low: tokenizer, feature layers, basis, positions, vocabulary map, chat
    template, norms and dtype, each with a verdict."""

    target: Annotated[str, tyro.conf.arg(aliases=["--target-model-path"])]
    """The model: `demo`, a folder, a .gguf file or a Hub id."""
    draft: Annotated[str, tyro.conf.arg(aliases=["--draft-model-path"])]
    """The draft: a folder or a Hub id."""
    prompts: str | None = None
    """A prompt file; its texts should be like those that the draft is used on. Default: four of our own."""
    original_target: str | None = None
    """The model that the draft was made for, where the target may be another: rotated since by a tool that
    says nothing, or not that model at all. The draft is then measured beside both."""
    limit: int = 8
    """Most prompts that are used of it."""
    max_new_tokens: int = 64
    """Tokens that the target writes behind each prompt."""
    dtype: str | None = None
    """bfloat16, float32 or float16. Default: bfloat16."""
    aux_convention: AuxConvention = "auto"
    """What layer ids in the draft's config count: hidden-state boundaries, or blocks (their output is
    meant)."""
    aux: tuple[int, ...] | None = None
    """Hidden-state boundaries to read instead of what the draft's config says (0 = embedding)."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else there."""

    def run(self) -> int:
        """The command. Exit status 1 when a fault is found."""
        if self.max_new_tokens < STEPS + 2:
            raise ConfigError(f"--max-new-tokens is {self.max_new_tokens}; at least {STEPS + 2} are needed")
        prompts = PROMPTS if self.prompts is None else _texts_of(self.prompts, self.limit)
        draft_path(self.draft)
        for spec in (self.target, self.original_target):
            if spec is not None:
                resolve(spec)
        family, file = read_draft(self.draft, **draft_reading(self.aux_convention, self.aux))
        if family.probe is None:
            raise ConfigError(
                f"{self.draft} holds a {family.name}, and such drafts are not diagnosed: `eaglejax bench` "
                "says how often it is right, and with another tokenizer than the target's it is refused"
            )
        target = methods.load_target(self.target, dtype=self.dtype)
        from eaglejax.measure.diagnose import diagnose

        with show.status("the target writes"):
            texts = written_texts(target, prompts, max_new_tokens=self.max_new_tokens)
            usual = None
            if self.prompts is not None:
                usual = next(
                    iter(written_texts(target, PROMPTS, max_new_tokens=self.max_new_tokens).values())
                )
        original, theirs = None, None
        if self.original_target is not None:
            original = methods.load_target(self.original_target, dtype=self.dtype)
            with show.status("the original target writes"):
                found = written_texts(original, prompts, max_new_tokens=self.max_new_tokens)
                theirs = found.get(next(iter(texts)), next(iter(found.values())))
        with show.status("trying what may be wrong"):
            report = diagnose(target, file, texts, original=original, original_texts=theirs, usual=usual)
            decoded = decode_pair(target, file, prompts, self.max_new_tokens)
        if self.json:
            show.print_json(_json(report, decoded))
        else:
            _print(report, decoded, f"{self.draft} on {self.target}")
        return 1 if report.faults else 0


def _texts_of(path: str, limit: int) -> tuple[str, ...]:
    """The prompts of a file: conversations by their last text, turns by their first."""
    found = []
    for row in read_prompts(path, limit=limit):
        if isinstance(row, BadRow):
            raise ConfigError(f"{path}, row {row.id}: {row.error}")
        asked = row.request([], chat=False)
        found.append(asked if isinstance(asked, str) else asked.messages[-1]["content"])
    return tuple(found)


def encoded(target: ej.Target, prompts: Sequence[str], *, chat: bool) -> list[tuple[int, ...]]:
    """Token ids of prompts, plain or as a user's messages."""
    from eaglejax.api import encode_prompt

    return [encode_prompt(target, [{"role": "user", "content": p}] if chat else p) for p in prompts]


def written_texts(target: ej.Target, prompts: Sequence[str], *, max_new_tokens: int) -> dict[str, Texts]:
    """What the target writes greedily behind the prompts: ``chat`` where it has a chat template, and
    ``plain``."""
    from eaglejax.measure.quality import Texts

    tokenizer = target.need_tokenizer()
    kinds = (["chat"] if tokenizer.chat_template else []) + ["plain"]
    out = {}
    for kind in kinds:
        ids = encoded(target, prompts, chat=kind == "chat")
        answers = ej.generate(target, ids, max_new_tokens=max_new_tokens, ignore_eos=True)
        out[kind] = Texts.of([(p, a.token_ids) for p, a in zip(ids, answers, strict=True)])
    return out


def decode_pair(target: ej.Target, file: Any, prompts: Sequence[str], max_new_tokens: int) -> Stats:
    """A short decode with the pair as it is, by a chain of ``STEPS`` drafts: what really was accepted.

    Straight through the decoder: ``generate`` would refuse a draft in another basis, which is what is looked
    for.
    """
    from eaglejax.speculate.generate import BatchDecoder, Request
    from eaglejax.speculate.metrics import total

    family = family_reading(file)
    config, params = family.bind(file, target, target.dtype)
    chat = target.need_tokenizer().chat_template is not None
    requests = [Request(ids, ej.Sampling(), max_new_tokens) for ids in encoded(target, prompts, chat=chat)]
    options = ej.DecodeOptions(speculation="fixed")
    proposer = family.make(config, {"tree": ej.chain(family.reach(config, STEPS))})
    run = BatchDecoder(target, proposer, params, requests, options=options)
    for _ in run:
        pass
    return total(r.stats for r in run.results())


def _json(report: Report, decoded: Stats) -> dict[str, Any]:
    return {
        "verdict": report.verdict,
        "faults": [f.test for f in report.faults],
        "tests": [dataclasses.asdict(f) for f in report.findings],
        "measured": {
            name: {"rates": list(a.rates), "places": a.count} for name, a in report.measured.items()
        },
        "decoded": decoded.to_json(),
    }


_COLOURS = {"pass": "green", "fail": "bold red", "unknown": "yellow"}


def _print(report: Report, decoded: Stats, title: str) -> None:
    console = show.stderr()
    table = rich.table.Table(title=title, title_justify="left")
    for heading in ("test", "verdict", "evidence"):
        table.add_column(heading, no_wrap=heading != "evidence")
    for f in report.findings:
        text = f.evidence if f.remedy is None else f"{f.evidence}. Remedy: {f.remedy}"
        table.add_row(f.test, rich.text.Text(f.verdict, _COLOURS[f.verdict]), text)
    console.print(table)
    console.print(f"verdict: {report.verdict}")
    rates = show.acceptance(decoded.per_position_acceptance_rate)
    console.print(
        f"decoded with a chain of {STEPS}: tau {decoded.mean_acceptance_length:.2f}, accepted at 1, 2, ...: "
        + rates
    )
    for name, found in report.measured.items():
        console.print(f"measured on {name} prompts, {found.count} places: {found}")
