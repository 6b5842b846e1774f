"""``eaglejax parity``: the JAX run against a torch run on another device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import eaglejax as ej
from eaglejax.checkpoint.sources import resolve
from eaglejax.cli import methods, show
from eaglejax.config import AuxConvention, BadRow, SpeculativeConfig, read_prompts
from eaglejax.errors import ConfigError

Backend = Literal["torch-cpu", "torch-cuda", "ascend", "musa"]


@dataclasses.dataclass(frozen=True)
class Parity:
    """Compare logits, features, draft trees, accepted paths and tokens of the JAX run with a torch run of the
    same weights, and find the first operation that differs."""

    backend: Backend | None = None
    """Where torch runs. With --record alone it can be left out: nothing is compared then."""
    device: str | None = None
    """The torch device, such as npu:1. Default: the backend's first."""
    target: str | None = None
    """The model: `demo`, a folder, a .gguf file or a Hub id."""
    draft: str | None = None
    """An EAGLE draft: a folder, a Hub id or `demo`."""
    prompts: str | None = None
    """A JSON Lines file, see `eaglejax generate`; of a conversation, its first turn."""
    limit: int | None = None
    """Compare this many prompts at most."""
    chat: bool = False
    """Wrap plain prompts in the model's chat template; messages and turns always are."""
    max_new_tokens: int = 32
    """Most tokens of an answer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights, activations and caches, on both sides."""
    temperature: float = 0.0
    """0, greedy: what is drawn depends on each side's own random numbers, so nothing else is compared."""
    speculative_config: str | None = None
    """Settings of the draft's tree, as for `eaglejax generate`."""
    aux_convention: AuxConvention | None = None
    """What layer ids in an EAGLE-3 draft's config count; see `eaglejax generate`."""
    record: str | None = None
    """Write the JAX run to this new folder or .zip, to be compared on a machine without JAX."""
    record_rounds: int = 2
    """First rounds of each prompt that are recorded with every intermediate tensor."""
    record_mib: int = 256
    """About as many MiB of tensors are recorded at most; what does not fit is recorded in less detail."""
    weights: str | None = None
    """With --record: write the weights to this file and only their hash into the recording. With --replay:
    that file."""
    replay: str | None = None
    """Compare with this recording instead of running JAX."""
    json: bool = False
    """Print the report as one JSON object on stdout, and nothing else there."""

    def run(self) -> int:
        """The command. Exit status 0: both agree, near ties apart; 1: they differ, or a row was bad."""
        self._check()
        if self.replay is not None:
            return self._replay(Path(self.replay))
        return self._compare()

    def _check(self) -> None:
        if self.temperature != 0:
            raise ConfigError(
                f"--temperature is {self.temperature:g}; parity compares greedy runs, because what is drawn "
                "depends on each side's own random numbers. The distribution that is drawn from is a "
                "function of the logits, which a greedy run compares at every node: leave --temperature out"
            )
        if self.replay is not None:
            given = [
                f.name
                for f in dataclasses.fields(self)
                if f.name not in ("backend", "device", "limit", "weights", "replay", "json")
                and getattr(self, f.name) != f.default
            ]
            if given:
                name = given[0].replace("_", "-")
                raise ConfigError(f"--{name} cannot be with --replay: the recording says what was run")
            if self.backend is None:
                raise ConfigError("name the --backend that the recording is to be compared with")
            return
        missing = [name for name in ("target", "draft", "prompts") if getattr(self, name) is None]
        if missing:
            raise ConfigError(f"--{missing[0]} is missing; parity needs it, or a recording to --replay")
        if self.backend is None and self.record is None:
            raise ConfigError("name a --backend to compare with, or a --record to write, or both")
        if self.weights is not None and self.record is None:
            raise ConfigError("--weights goes with --record or --replay")
        methods.check_count("--max-new-tokens", self.max_new_tokens)

    def _replay(self, path: Path) -> int:
        from eaglejax.interop.backends.adapter import get_adapter
        from eaglejax.interop.parity.replay import open_bundle, replay

        assert self.backend is not None
        adapter = get_adapter(self.backend, self.device)
        with (
            open_bundle(path, weights=None if self.weights is None else Path(self.weights)) as bundle,
            show.status(f"comparing {self.backend} with {path}"),
        ):
            report = replay(bundle, adapter, limit=self.limit)
        return self._print(report, failed=False)

    def _compare(self) -> int:
        rows = read_prompts(self.prompts or "", limit=self.limit)
        resolve(self.target or "")
        config = self._config()
        from eaglejax.api import encode_prompt
        from eaglejax.interop.backends.adapter import get_adapter
        from eaglejax.interop.convert.export import export_draft, export_target
        from eaglejax.interop.parity.check import Checker, Prompt
        from eaglejax.interop.parity.replay import compare
        from eaglejax.interop.parity.trace import Tracer

        # A backend that cannot run is refused before a model is loaded.
        adapter = None if self.backend is None else get_adapter(self.backend, self.device)
        if adapter is not None:
            adapter.require()
        target = methods.load_target(self.target or "", dtype=self.dtype)
        with show.status("reading the draft"):
            bound = methods.proposer_from(target, config)
            tracer = Tracer(target, bound)
            sides = export_target(target), export_draft(bound)
        prompts, failed = [], False
        for row in rows:
            try:
                if isinstance(row, BadRow):
                    raise ConfigError(row.error)
                tokens = encode_prompt(target, row.request([], chat=self.chat))
                budget = min(self.max_new_tokens, target.context - len(tokens))
                prompts.append(Prompt(row.id, tokens, budget))
            except ej.EaglejaxError as error:
                failed = True
                show.print_error(f"prompt {row.id}: {error}")
        if not prompts:
            raise ConfigError(f"{self.prompts} has no prompt that can be served")
        with self._recorder(target, sides) as tee, show.progress("comparing", len(prompts)) as advance:
            pairs = ((p, tee(p, tracer.stages(p.tokens, p.budget))) for p in prompts)
            if adapter is None:
                for _, stages in pairs:
                    for _ in stages:
                        pass
                    advance()
                return int(failed)
            checker = Checker(*sides, adapter, dtype=self.dtype, eos_ids=target.eos_ids)
            report = compare(
                checker,
                pairs if self.record is None else _to_the_end(pairs),
                adapter,
                about=self._about(target, bound),
                reproduce=self._reproduce(),
                progress=advance,
            )
        return self._print(report, failed=failed)

    def _config(self) -> SpeculativeConfig:
        config = methods.speculation(
            self.speculative_config,
            draft=self.draft,
            default="eagle",
            aux_convention=self.aux_convention,
        )
        methods.check_plain_decoding(config, "parity")
        return config

    @contextlib.contextmanager
    def _recorder(self, target: ej.Target, sides: tuple[Any, Any]) -> Iterator[Any]:
        """What stages pass through on their way: into the bundle, or nothing."""
        if self.record is None:
            yield lambda prompt, stages: stages
            return
        from eaglejax.interop.parity.recording import MIB, Options, recording

        options = Options(
            self.record_rounds,
            self.record_mib * MIB,
            None if self.weights is None else Path(self.weights),
        )
        with recording(
            Path(self.record),
            *sides,
            names=(self.target or "", self.draft or ""),
            dtype=self.dtype,
            eos_ids=target.eos_ids,
            options=options,
        ) as recorder:
            yield recorder.tee

    def _about(self, target: ej.Target, bound: Any) -> dict[str, Any]:
        import importlib.metadata

        from eaglejax.devices import machine

        return {
            "jax_side": {"eaglejax": importlib.metadata.version("eaglejax"), **machine.describe()},
            "models": {
                "target": self.target,
                "draft": self.draft,
                "dtype": self.dtype,
                "tree": repr(bound.proposer.tree),
            },
        }

    def _reproduce(self) -> str:
        where = self.record or "OUT"
        first = "" if self.record else "record the run with --record OUT, then: "
        return f"{first}python {where}/replay.py --backend {self.backend} --prompt {{prompt}} --only {{name}}"

    def _print(self, report: dict[str, Any], *, failed: bool) -> int:
        if self.json:
            show.print_json(report)
        else:
            from eaglejax.interop.parity.report import text

            show.write_text(text(report) + "\n")
        return 0 if report["agrees"] and not failed else 1


def _to_the_end(pairs: Iterable[tuple[Any, Iterable[Any]]]) -> Iterator[tuple[Any, Iterator[Any]]]:
    """The same pairs; stages that nobody wanted any more are computed all the same, for a recording."""
    for prompt, stages in pairs:
        rest = iter(stages)
        yield prompt, rest
        for _ in rest:
            pass
