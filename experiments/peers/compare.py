"""eaglejax beside llama.cpp and transformers: the same prompts, lengths and file, on this machine.

    python -m experiments.peers.compare --config experiments/peers/demo.toml --suites humaneval.jsonl \\
        --python llama=/path/to/its/bin/python

Every mode is a process of its own that keeps its model and waits; they take turns prompt by prompt, so that
a change in the machine's load meets all of them. Speeds are those of the tokens after the first; a ratio is
taken within a prompt and turn, and the median over them counts. See README.md beside this file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import eaglejax as ej
from eaglejax.api import encode_prompt
from eaglejax.cli import show
from eaglejax.cli.run import run_command
from eaglejax.errors import ConfigError, EaglejaxError
from eaglejax.train.settings import parse, read_toml
from experiments import record
from experiments.evaluate import read_suite

WORKER = Path(__file__).with_name("worker.py")
ENGINES = ("eaglejax", "llama", "transformers")


@dataclasses.dataclass(frozen=True)
class Mode:
    """One engine in one mode; what it has no use for stays unset. ``file``: ``target``'s, or another."""

    name: str
    engine: Literal["eaglejax", "llama", "transformers"]
    dtype: str | None = None
    quant: str | None = None
    method: str | None = None
    draft: str | None = None
    speculation: str | None = None
    lookup: int | None = None
    ngram: int | None = None
    assistant: str | None = None

    def options(self, threads: int) -> dict[str, Any]:
        """What its worker is told."""
        told = {k: v for k, v in dataclasses.asdict(self).items() if k not in ("name", "engine")}
        return {k: v for k, v in told.items() if v is not None} | {"threads": threads}


@dataclasses.dataclass(frozen=True)
class Settings:
    """``target``: a GGUF file or a demonstration model; ``modes``: the first is what all are held
    against. ``limit``: prompts of a suite; ``max_new_tokens``: of each answer, whether it ends before or not;
    ``turns``: runs of each prompt after one that does not count; ``threads``: of each engine."""

    modes: tuple[Mode, ...]
    target: str = "demo"
    limit: int = 2
    max_new_tokens: int = 64
    turns: int = 2
    threads: int = 2

    def check(self) -> None:
        """Raise ConfigError for what cannot be compared."""
        names = [mode.name for mode in self.modes]
        if len(names) < 2 or len(set(names)) < len(names):
            raise ConfigError(f"modes are {', '.join(names) or 'none'}; give two or more, each its own name")
        if min(self.limit, self.turns, self.threads) < 1 or self.max_new_tokens < 2:
            raise ConfigError("limit, turns and threads must be 1 or more, max_new_tokens 2 or more")


@dataclasses.dataclass(frozen=True)
class Compare:
    """Measure engines beside each other."""

    config: Path
    """A file such as `experiments/peers/demo.toml`."""
    suites: tuple[str, ...]
    """Prompt files in the format of `eaglejax generate`; of a conversation the first question is asked."""
    python: tuple[str, ...] = ()
    """ENGINE=PATH: the interpreter of an engine that lives in an environment of its own."""
    only: tuple[str, ...] = ()
    """Names of modes to run, the first of the file besides; all of them by default."""
    name: str = "peers"
    """Of the result."""
    root: Path = record.ROOT
    """Where the studies' results lie."""

    def run(self) -> int:
        """The command; a Markdown table goes to stdout."""
        settings = parse(Settings, read_toml(self.config))
        settings.check()
        modes = self._modes(settings)
        pythons = interpreters(self.python)
        suites = [read_suite(path, settings.limit) for path in self.suites]
        with show.status(f"loading {settings.target}"):
            target = ej.load_target(settings.target)
            prompts = {
                suite.name: [encode_prompt(target, row.request([], chat=True)) for row in suite.rows]
                for suite in suites
            }
            file = model_file(settings.target)
            del target
        with contextlib.ExitStack() as stack:
            workers = {}
            for mode in modes:
                with show.status(f"starting {mode.name}"):
                    workers[mode.name] = stack.enter_context(worker(mode, file, settings, pythons))
            figures = measured(workers, prompts, settings)
        versions = {name: made.version for name, made in workers.items()}
        words = [f"--suites {shlex.join(Path(path).name for path in self.suites)} --name {self.name}"]
        record.record(
            "peers",
            self.name,
            command=f"python -m experiments.peers.compare --config experiments/peers/{self.config.name} "
            + " ".join(words),
            config=dataclasses.asdict(settings) | {"versions": versions},
            seed=None,
            figures=figures,
            root=self.root,
        )
        show.write_text(table(figures))
        return 0

    def _modes(self, settings: Settings) -> list[Mode]:
        unknown = sorted(set(self.only) - {mode.name for mode in settings.modes})
        if unknown:
            raise ConfigError(f"--only names {unknown[0]!r}, which is no mode of {self.config}")
        first, *others = settings.modes
        return [first, *(mode for mode in others if not self.only or mode.name in self.only)]


def interpreters(named: Sequence[str]) -> dict[str, str]:
    """Interpreter by engine, this one where none is ``named`` as ENGINE=PATH."""
    found = dict.fromkeys(ENGINES, sys.executable)
    for text in named:
        engine, _, path = text.partition("=")
        if engine not in found or not path:
            raise ConfigError(f"--python is {text!r}; it is ENGINE=PATH with one of {', '.join(ENGINES)}")
        found[engine] = path
    return found


def model_file(target: str) -> str:
    """The GGUF file of ``target``. Raises ConfigError where it has none."""
    from eaglejax.checkpoint.demo import DEMOS, demo_path

    path = demo_path(target) if target in DEMOS else Path(target)
    if path.suffix != ".gguf":
        raise ConfigError(f"{target} is no GGUF file, which is what all engines here read")
    return str(path)


class Worker:
    """A process that answers."""

    def __init__(self, mode: str, process: subprocess.Popen[str]) -> None:
        self._mode, self._process = mode, process
        self.version = self._read()["version"]

    def ask(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        """An answer of so many tokens. Raises EaglejaxError where it does not come whole."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": list(prompt), "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        found = self._read()
        if len(found["tokens"]) != tokens:
            raise EaglejaxError(f"{self._mode} gave {len(found['tokens'])} of {tokens} tokens")
        return found

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EaglejaxError(f"{self._mode} ended before it answered; see what it printed above")
        return dict(json.loads(line))


@contextlib.contextmanager
def worker(mode: Mode, file: str, settings: Settings, pythons: Mapping[str, str]) -> Iterator[Worker]:
    """``mode``'s process, which ends with the block."""
    told = json.dumps(mode.options(settings.threads))
    name = settings.target if mode.engine == "eaglejax" else file
    command = [pythons[mode.engine], str(WORKER), mode.engine, name, told]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Worker(mode.name, process)
        finally:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()


def measured(
    workers: Mapping[str, Any], prompts: Mapping[str, Sequence[Sequence[int]]], settings: Settings
) -> dict[str, dict[str, Any]]:
    """By suite and mode: ``ratio`` to the first mode and ``tokens_per_second``, each with ``median``,
    ``least`` and ``greatest`` over prompts and turns, and ``same``, the share of tokens in order that are the
    first mode's."""
    first = next(iter(workers))
    count = settings.max_new_tokens
    figures: dict[str, dict[str, Any]] = {}
    with show.progress("measuring", sum(map(len, prompts.values()))) as advance:
        for suite, asked in prompts.items():
            speeds: dict[str, list[float]] = {name: [] for name in workers}
            same: dict[str, list[float]] = {name: [] for name in workers}
            for prompt in asked:
                for turn in range(settings.turns + 1):
                    found = {name: made.ask(prompt, count) for name, made in workers.items()}
                    if turn == 0:
                        continue  # compiles, and brings the file into memory
                    for name, answer in found.items():
                        speeds[name].append((count - 1) / (answer["seconds"] - answer["first"]))
                        same[name].append(agreement(found[first]["tokens"], answer["tokens"]))
                advance()
            figures[suite] = {
                name: {
                    "ratio": spread([a / b for a, b in zip(mine, speeds[first], strict=True)]),
                    "tokens_per_second": spread(mine),
                    "same": statistics.mean(same[name]),
                }
                for name, mine in speeds.items()
            }
    return figures


def agreement(one: Sequence[int], other: Sequence[int]) -> float:
    """Share of tokens before the first that differs."""
    pairs = list(zip(one, other, strict=True))
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs)) / len(pairs)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and ends."""
    return {"median": statistics.median(values), "least": min(values), "greatest": max(values)}


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures as a Markdown table."""
    lines = ["| suite | mode | ratio to the first | tokens/s | same text |", "|---|---|---|---|---|"]
    for suite, modes in figures.items():
        for name, found in modes.items():
            ratio, speed = found["ratio"], found["tokens_per_second"]
            cells = (
                suite,
                name,
                f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['greatest']:.2f})",
                f"{speed['median']:.1f}",
                f"{found['same']:.0%}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    return run_command(Compare, argv)


if __name__ == "__main__":
    sys.exit(main())
