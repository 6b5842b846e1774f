"""``eaglejax demo``: a real model writes the same text twice, plainly and with drafts, side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import rich.columns
import rich.console
import rich.live
import rich.panel
import rich.text

import eaglejax as ej
from eaglejax.cli import methods, show
from eaglejax.cli.answers import answer_json
from eaglejax.config import PromptRow, SpeculativeConfig
from eaglejax.conversation import Conversation

if TYPE_CHECKING:
    from eaglejax.cli.session import Session

TARGET = "demo"
DRAFTS = {
    "eagle3": SpeculativeConfig("eagle3", model=TARGET, tree_depth=4, tree_branching=4, tree_nodes=8),
    "ngram": SpeculativeConfig("ngram"),
    "prediction": SpeculativeConfig("prediction"),
}
"""How each method of a scene drafts. The tree is small: on a few cores a node of it is not free."""
STREAMED_ROUNDS = 4
"""Rounds between two looks at the host: few enough to watch the text grow."""

ACCOUNT_CODE = """\
class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
"""


@dataclasses.dataclass(frozen=True)
class Scene:
    """One thing to watch: a request, the method that drafts, and the length of the answer in tokens."""

    title: str
    method: str
    row: PromptRow
    max_new_tokens: int


def _scene(
    name: str, title: str, method: str, ask: str, max_new_tokens: int, prediction: str | None = None
) -> Scene:
    asked = Conversation(({"role": "user", "content": ask},))
    row = PromptRow(name, conversation=asked, predictions=(prediction,))
    return Scene(title, method, row, max_new_tokens)


def scenes(quick: bool) -> list[Scene]:
    """The requests of the demo, short ones alone when ``quick``."""
    write = _scene(
        "write",
        "Write code; drafts come from the EAGLE-3 draft that is shipped with the package",
        "eagle3",
        "Write a Python class Vec3 with fields x, y, z and the methods __add__, __sub__, __mul__ and "
        "__neg__. Code only, no comments.",
        96 if quick else 160,
    )
    edit = _scene(
        "edit",
        "Edit code; drafts come from the code to be edited (predicted output)",
        "prediction",
        f"```python\n{ACCOUNT_CODE}```\n\n"
        "Make `deposit` and `withdraw` return the new balance. Answer with the whole code only.",
        112,
        f"```python\n{ACCOUNT_CODE}```",
    )
    if quick:
        return [write, edit]
    count = _scene(
        "count",
        "Write code and explain it (EAGLE-3)",
        "eagle3",
        "Write a Python function that counts how often each word occurs in a text file, and explain it.",
        160,
    )
    chinese = _scene("chinese", "Answer in Chinese (EAGLE-3)", "eagle3", "请介绍一下二分查找算法。", 128)
    table = _scene(
        "table",
        "Turn a list into JSON (n-gram lookup)",
        "ngram",
        "Turn this list into a JSON array of objects with the keys city, country and river:\n"
        "Paris, France, Seine; Vienna, Austria, Danube; Cairo, Egypt, Nile; London, England, Thames; "
        "Rome, Italy, Tiber. JSON only.",
        160,
    )
    return [write, count, chinese, edit, table]


@dataclasses.dataclass(frozen=True)
class Demo:
    """Watch a small real model write with speculative decoding, token for token what it writes without."""

    quick: bool = False
    """Two short texts: about three minutes on two cores the first time, compilation included."""
    json: bool = False
    """Print one JSON object on stdout, and nothing else there."""

    def run(self) -> int:
        """The command. Exit status 1 when a text with drafts is not the plain one."""
        dtype, quant, why = fastest_form()
        target = methods.load_target(TARGET, dtype=dtype, quant=quant)
        from eaglejax.cli import session as sessions

        if not self.json:
            size = f"{target.nbytes / 2**30:.2f} GiB"
            form = dtype if quant is None else f"the file's own blocks ({quant})"
            show.print_note(f"{target.config.family}, {size} of weights in {form}: {why}")
            show.print_note("compiling, and measuring what rounds cost here, take a while the first time")
        played = [(scene, self._play(target, scene)) for scene in scenes(self.quick)]
        # After the rest, not beside it: the demo is to fit a machine with little memory.
        if quant is None and dtype != "float32" and sessions.plain_in_float32_too():
            target = sessions.reload_in_float32(target)
            for _, session in played:
                session.run_plain(sessions.FLOAT32_AR, target)
        reports = [_report(scene, session) for scene, session in played]
        sound = all(session.sound for _, session in played)
        if self.json:
            show.print_json(
                {"identical": sound, "scenes": reports, "machine": sessions.machine_report(dtype)}
            )
        else:
            for report in reports:
                show.stderr().print(show.stats_table(report["title"], report["methods"].items()))
                show.print_widths(report["methods"].items())
        for report in reports:
            for error in report["errors"]:
                show.print_error(f"{error['id']}: {error['error']}")
        return 0 if sound else 1

    def _play(self, target: ej.Target, scene: Scene) -> Session:
        from eaglejax.cli.session import Session

        proposers = {
            "ar": None,
            scene.method: methods.proposer_from(target, DRAFTS[scene.method]),
        }
        with _stage(scene, quiet=self.json) as view:
            session = Session(scene.max_new_tokens, rounds_a_chunk=STREAMED_ROUNDS, view=view)
            session.run(target, proposers, [scene.row])
        return session


def fastest_form() -> tuple[str, str | None, str]:
    """(dtype, what the weights are kept as, why): the fastest form here, by a measurement of seconds where it
    is not known."""
    from eaglejax import devices
    from eaglejax.devices import cpu

    adapter = devices.current()
    if adapter.platform != "cpu":
        return adapter.weight_dtype, None, dict(adapter.reasons)["weight_dtype"]
    choice, blocks = cpu.choose_dtype(), cpu.block_products()
    floats = choice.milliseconds[choice.dtype]
    if blocks.level is None or any(blocks.milliseconds[rows] >= ms for rows, ms in floats.items()):
        return choice.dtype, None, choice.reason
    took = ", ".join(f"{blocks.milliseconds[rows]:.2f} ms, not {ms:.2f}" for rows, ms in floats.items())
    rows = " and ".join(str(rows) for rows in floats)
    return choice.dtype, "keep-a8", f"products of {rows} rows took {took} in {choice.dtype}"


def _report(scene: Scene, session: Session) -> dict[str, Any]:
    results = [
        {"method": method, **answer_json(row, [answer])}
        for method, answers in session.answers.items()
        for row, answer in answers
    ]
    return {"id": scene.row.id, "title": scene.title, **session.report(), "results": results}


View = Callable[[str], Callable[[str], None]]


@contextlib.contextmanager
def _stage(scene: Scene, *, quiet: bool) -> Iterator[View]:
    """Where a scene is watched: two panels side by side on a terminal, one text after the other elsewhere."""
    if quiet:
        yield lambda method: lambda text: None
        return
    console = rich.console.Console(highlight=False)
    console.print(f"\n{scene.title}", style="bold", markup=False)
    if not sys.stdout.isatty():
        yield _write_after_each_other
        print()
        return
    panels = _Panels(console, ("ar", scene.method))
    with rich.live.Live(panels, console=console, refresh_per_second=12) as live:
        yield panels.open
        panels.whole = True
        live.refresh()


def _write_after_each_other(method: str) -> Callable[[str], None]:
    show.write_text(f"\n--- {method} ---\n")
    return show.write_text


class _Panels:
    """The texts of several methods in columns; while they grow, the end of each is shown."""

    def __init__(self, console: rich.console.Console, names: tuple[str, ...]) -> None:
        self._console = console
        self._texts = dict.fromkeys(names, "")
        self.whole = False

    def open(self, method: str) -> Callable[[str], None]:
        """Start the text of a method anew; what is returned adds to it."""
        self._texts[method] = ""

        def add(text: str) -> None:
            self._texts[method] += show.for_stdout(text)

        return add

    def __rich__(self) -> rich.columns.Columns:
        width = (self._console.width - len(self._texts)) // len(self._texts)
        height = max(self._console.height - 6, 4)
        columns = []
        for name, text in self._texts.items():
            body = rich.text.Text(text)
            lines = body.wrap(self._console, max(width - 4, 10))
            shown = lines if self.whole else lines[-height:]
            columns.append(rich.panel.Panel(rich.text.Text("\n").join(shown), title=name, width=width))
        return rich.columns.Columns(columns)
