"""``eaglejax train``: one run from a TOML file."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.progress
import tyro

from eaglejax.cli import methods, show

if TYPE_CHECKING:
    from eaglejax.train.settings import TrainSettings


@dataclasses.dataclass(frozen=True)
class Train:
    """Train a draft for a target, or go on where an interrupted run stopped."""

    config: str
    """The run as a TOML file, see `docs/training.md`."""
    overrides: tyro.conf.Positional[tuple[str, ...]] = ()
    """Settings that replace those of the file, as `section.key=value`."""
    plan: bool = False
    """Say what would run, with its memory, disk and length, and stop; refused where it would not fit."""
    json: bool = False
    """Print one JSON object on stdout at the end, and nothing else there."""

    def run(self) -> int:
        """The command. Exit status 1 when the run was interrupted; the same command goes on."""
        from eaglejax.train.settings import load_settings

        settings = load_settings(self.config, self.overrides)
        target = methods.load_target_of(settings)
        from eaglejax.train.plan import make_plan
        from eaglejax.train.plots import plot_run
        from eaglejax.train.prepare import prepare_data, prepare_draft
        from eaglejax.train.samples import preview
        from eaglejax.train.trainer import Trainer

        console = show.stderr()
        with show.status("reading the data"):
            data = prepare_data(settings.data, target)
        for line in data.report.lines():
            show.print_note(line)
        plan = make_plan(settings, target, data)
        console.print(plan.table())
        console.print(preview(data.train[0], target.need_tokenizer(), 1200))
        plan.check_room(target, settings)
        if self.plan:
            if self.json:
                show.print_json(plan.to_json())
            return 0
        with show.status("setting up the draft"):
            draft = prepare_draft(settings, target, data)
        if draft.vocab is not None:
            show.print_note(
                f"the draft knows {len(draft.vocab.ids)} of {target.config.vocab_size} tokens, which are "
                f"{100 * draft.vocab.coverage:.2f} % of the supervised ones"
            )
        with progress(settings) as notify:
            result = Trainer(settings, target, data, draft, notify).run()
        plot_run(Path(settings.out))
        if self.json:
            values = dataclasses.asdict(result)
            show.print_json({**values, "draft": None if result.draft is None else str(result.draft)})
        else:
            end = (
                "interrupted; the same command goes on" if result.interrupted else f"draft in {result.draft}"
            )
            show.print_note(f"{result.updates} updates, best tau {result.score}; {end}")
        return 1 if result.interrupted else 0


@contextlib.contextmanager
def progress(settings: TrainSettings) -> Iterator[Callable[[int, dict[str, Any]], None]]:
    """A bar of updates with the latest loss and tau; yields the trainer's ``notify``."""
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=show.stderr()) as bar:
        task = bar.add_task("training", total=settings.run.updates)

        def notify(update: int, values: dict[str, Any]) -> None:
            if "train/objective" in values:
                text = f"loss {values['train/objective']:.3f}, tau {values['train/tau_simulated']:.2f}"
                bar.update(task, completed=update, description=text)
            elif "skipped_updates" in values:
                text = f"{values['skipped_updates']} updates skipped"
                bar.update(task, completed=update, description=text)
            else:
                tau = values.get("decoded/tau", values["validation/tau_simulated"])
                bar.console.print(f"update {update}: held-out tau {tau:.3f}", highlight=False)

        yield notify
