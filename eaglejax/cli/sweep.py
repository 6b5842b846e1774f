"""``eaglejax sweep``: a grid of training runs, and a table of what each draft accepts and costs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.console
import rich.table
import tyro

from eaglejax.cli import methods, show
from eaglejax.errors import EaglejaxError

if TYPE_CHECKING:
    from eaglejax.models.target import Target
    from eaglejax.train.grid import Point
    from eaglejax.train.prepare import Data
    from eaglejax.train.samples import Sample
    from eaglejax.train.settings import DataSettings, TrainSettings


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Train a draft for every combination of some settings' values, and compare what they accept and cost."""

    config: str
    """A run's TOML file, or one with [base] and [grid], see `docs/training.md`."""
    overrides: tyro.conf.Positional[tuple[str, ...]] = ()
    """Settings of all runs that replace those of the file, as `section.key=value`."""
    grid: tuple[str, ...] = ()
    """Settings to combine, as `section.key=[value, ...]`, beside those of the file."""
    plan: bool = False
    """Say what would run, and stop."""
    profile: bool = False
    """Measure too how long a round's draft takes."""
    json: bool = False
    """Print one JSON object on stdout at the end, and nothing else there."""

    def run(self) -> int:
        """The command. Exit status 1 when a run failed or was interrupted; the same command goes on."""
        from eaglejax.train.grid import read_sweep

        points = read_sweep(self.config, self.overrides, self.grid)
        base = points[0].settings
        _check_some_can_run(points)
        target = methods.load_target(base.target, dtype=base.target_dtype, quant=base.target_quant)
        from eaglejax.checkpoint.files import only_writer
        from eaglejax.train.features import fingerprint
        from eaglejax.train.sweep import run_key

        session = _Session(target, Path(base.out), [point.settings for point in points])
        mark = fingerprint(target)
        keys = [run_key(point.settings, mark) for point in points]
        if self.plan:
            plans = [session.plan(point, key) for point, key in zip(points, keys, strict=True)]
            self._show({"runs": plans}, plan_table(plans))
            return 1 if any("error" in entry for entry in plans) else 0
        with only_writer(session.out):
            return self._train(session, points, keys)

    def _train(self, session: _Session, points: Sequence[Point], keys: Sequence[str]) -> int:
        """Every point's result, and the table of them; the exit status."""
        from eaglejax.checkpoint.files import write_text
        from eaglejax.devices import machine
        from eaglejax.train.sweep import write_json

        runs: list[dict[str, Any]] = []
        errors: list[dict[str, Any]] = []
        interrupted = False
        for number, (point, key) in enumerate(zip(points, keys, strict=True), start=1):
            show.print_note(f"run {number} of {len(points)}: {point.label()}")
            try:
                result = session.result(point, key, timed=self.profile)
            except EaglejaxError as error:
                show.print_error(f"{point.label()}: {error}")
                errors.append({"values": point.values, "error": str(error)})
                continue
            if result is None:
                interrupted = True
                show.print_note("interrupted; the same command goes on")
                break
            runs.append(result)
        target = points[0].settings.target
        report = {"target": target, "runs": runs, "errors": errors, "machine": machine.describe()}
        if runs:
            table = result_table(runs)
            write_json(session.out / "sweep.json", report)
            write_text(session.out / "sweep.txt", as_text(table))
            self._show(report, table)
        elif self.json:
            show.print_json(report)
        return 1 if errors or interrupted else 0

    def _show(self, report: Mapping[str, Any], table: rich.table.Table) -> None:
        if self.json:
            show.print_json(report)
        else:
            show.write_text(as_text(table))


def _check_some_can_run(points: Sequence[Point]) -> None:
    """Files that are not there are the error of the runs that read them; if no run is left, the sweep's."""
    errors = []
    for point in points:
        try:
            methods.check_files(point.settings)
        except EaglejaxError as error:
            errors.append(error)
    if len(errors) == len(points):
        raise errors[0]


class _Session:
    """The runs of one sweep: the target is loaded once, data of the same settings are read once, and all
    drafts are compared on the same prompts."""

    def __init__(self, target: Target, out: Path, runs: Sequence[TrainSettings]) -> None:
        self.target, self.out, self._runs = target, out, runs
        self._data: dict[DataSettings, Data] = {}
        self._shared: tuple[Any, Any] | None = None

    def folder(self, key: str) -> Path:
        """Where a run lies."""
        return self.out / "runs" / key

    def data(self, settings: DataSettings) -> Data:
        """Samples of these settings."""
        from eaglejax.train.prepare import prepare_data

        if settings not in self._data:
            with show.status("reading the data"):
                self._data[settings] = prepare_data(settings, self.target)
        return self._data[settings]

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """The last answer under the same key, which neighbours on the grid mostly share, or a new one."""
        if self._shared is None or self._shared[0] != key:
            self._shared = key, make()
        return self._shared[1]

    @functools.cached_property
    def prompts(self) -> list[Sample]:
        """The prompts that drafts are compared on; data that cannot be read are their own run's error."""
        from eaglejax.train.sweep import common_prompts

        held, shares = [], []
        for settings in self._runs:
            with contextlib.suppress(EaglejaxError):
                held.append(self.data(settings.data).prompts)
                shares.append(settings.data.validation)
        return common_prompts(held, shares, self._runs[0].run.decode_prompts)

    def plan(self, point: Point, key: str) -> dict[str, Any]:
        """What a run would be: its ``plan``, or the ``error`` for which there would be none."""
        from eaglejax.train.plan import make_plan
        from eaglejax.train.sweep import read_result

        entry = {"key": key, "values": point.values, "finished": read_result(self.folder(key)) is not None}
        try:
            plan = make_plan(point.settings, self.target, self.data(point.settings.data))
            plan.check_room(self.target, dataclasses.replace(point.settings, out=str(self.folder(key))))
        except EaglejaxError as error:
            show.print_error(f"{point.label()}: {error}")
            return {**entry, "error": str(error)}
        return {**entry, "plan": plan.to_json()}

    def result(self, point: Point, key: str, *, timed: bool) -> dict[str, Any] | None:
        """Train and measure one point, or read what an earlier call found; None when it was interrupted.

        A draft that was compared on other prompts, before the grid had other data, is decoded again."""
        from eaglejax.cli.train import progress
        from eaglejax.drafts.registry import load_draft, read_draft
        from eaglejax.drafts.tree import chain
        from eaglejax.train import evaluate
        from eaglejax.train.plan import make_plan
        from eaglejax.train.prepare import prepare_draft
        from eaglejax.train.registry import training_of
        from eaglejax.train.sweep import prompts_digest, read_result, write_result
        from eaglejax.train.trainer import Trainer

        folder = self.folder(key)
        # First, since data that cannot be read hold no prompts either.
        data = self.data(point.settings.data)
        found, asked = read_result(folder), prompts_digest(self.prompts)
        if found is not None:
            # Another grid may have trained it, elsewhere: its values are those of this one.
            found |= {"values": point.values, "folder": str(folder)}
        compared = found is not None and found.get("prompts") == asked
        if found is not None and compared and (not timed or found["propose_ms"] is not None):
            show.print_note(f"finished before, in {folder}")
            return found
        settings = dataclasses.replace(point.settings, out=str(folder))
        run = settings.run
        if found is None:
            make_plan(settings, self.target, data).check_room(self.target, settings)
            with show.status("setting up the draft"):
                draft = prepare_draft(settings, self.target, data, remember=self.remember)
            with progress(settings) as notify:
                outcome = Trainer(settings, self.target, data, draft, notify).run()
            if outcome.interrupted:
                return None
        shape = read_draft(folder / "draft")[1].config
        bound = load_draft(folder / "draft", self.target, tree=chain(run.decode_depth))
        if found is None or not compared:
            stats = evaluate.decode_with(self.target, bound, self.prompts, tokens=run.decode_tokens)
            found = {
                "key": key,
                "values": point.values,
                "folder": str(folder),
                "prompts": asked,
                "tau": stats.mean_acceptance_length,
                "per_position_acceptance_rate": stats.per_position_acceptance_rate,
                "n_alpha": stats.n_alpha,
                "tokens": stats.num_tokens,
                "updates": run.updates,
                **dataclasses.asdict(training_of(shape).cost(shape, self.target.dtype)),
            }
        found |= {
            "propose_ms": self._propose_ms(bound, self.prompts[0].prompt, run.decode_tokens)
            if timed
            else found.get("propose_ms")
        }
        write_result(folder, found)
        return found

    def _propose_ms(self, bound: Any, prompt: Any, tokens: int) -> float | None:
        """Milliseconds that a round's draft takes, its reading of the accepted tokens included."""
        from eaglejax.measure import profile

        times = profile.profile(self.target, bound, prompt.tolist(), max_new_tokens=tokens, rounds_a_chunk=16)
        return None if times is None else times.propose_ms + times.observe_ms


def plan_table(plans: Sequence[Mapping[str, Any]]) -> rich.table.Table:
    """What would run, one row a run."""
    table = _table("plan", plans, ("trained", "draft MB", "updates", "epochs", "memory GB", ""))
    for entry in plans:
        if "error" in entry:
            table.add_row(*_values(entry), *["-"] * 5, "cannot be trained")
            continue
        plan = entry["plan"]
        table.add_row(
            *_values(entry),
            f"{plan['trained_parameters'] / 1e6:.2f} M",
            f"{plan['draft_bytes'] / 1e6:.1f}",
            str(plan["updates"]),
            f"{plan['epochs']:.2f}",
            f"{plan['device_bytes'] / 1e9:.1f}",
            "finished" if entry["finished"] else "",
        )
    return table


def result_table(runs: Sequence[Mapping[str, Any]]) -> rich.table.Table:
    """Tau against what a draft costs, one row a run."""
    table = _table(
        "tau against draft cost",
        runs,
        ("tau", "accepted at 1, 2, ...", "parameters", "MB", "MFLOP a step", "ms"),
    )
    for run in runs:
        table.add_row(
            *_values(run),
            f"{run['tau']:.3f}",
            show.acceptance(run["per_position_acceptance_rate"]),
            f"{run['parameters'] / 1e6:.2f} M",
            f"{run['bytes'] / 1e6:.1f}",
            f"{run['step_flops'] / 1e6:.1f}",
            "-" if run["propose_ms"] is None else f"{run['propose_ms']:.2f}",
        )
    return table


def _table(title: str, rows: Sequence[Mapping[str, Any]], headings: Sequence[str]) -> rich.table.Table:
    table = rich.table.Table(title=title, title_justify="left")
    for name in rows[0]["values"]:
        table.add_column(name)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _values(row: Mapping[str, Any]) -> list[str]:
    from eaglejax.train.grid import short

    return [short(value) for value in row["values"].values()]


def as_text(table: rich.table.Table) -> str:
    """A table as plain text."""
    console = rich.console.Console(
        file=io.StringIO(), width=160, color_system=None, markup=False, emoji=False
    )
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]
