"""What a person sees: text or JSON on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console
import rich.table
import rich.text

from eaglejax import json_text
from eaglejax.checkpoint.files import cache_dir
from eaglejax.checkpoint.files import progress as progress

MOST_NOTES = 10_000
"""Marks of notes that are kept; the file is begun anew beyond."""


def stderr() -> rich.console.Console:
    """A console on this moment's stderr. What is printed is shown as it is: names of rows and folders may
    hold what rich would take for its markup."""
    console = rich.console.Console(stderr=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        # A log has no width of its own, and a table cut to 80 columns is hard to read.
        console.width = 120
    return console


def print_error(text: str) -> None:
    """One red paragraph on stderr."""
    stderr().print(f"error: {text}", style="bold red", markup=False, soft_wrap=True)


def print_note(text: str) -> None:
    """One dim paragraph on stderr."""
    stderr().print(text, style="dim", markup=False, soft_wrap=True)


def print_notes_once(name: str, path: Path, notes: Sequence[str]) -> None:
    """Notes on what was understood of the files in ``path``, which the user calls ``name``: each is said
    once, and again when it or the place changes. What was said is kept in the cache folder; where that cannot
    be written, notes are said every time."""
    record = cache_dir() / "notes.txt"
    try:
        said = set(record.read_text(encoding="utf-8").split())
    except OSError:
        said = set()
    marks = {hashlib.sha256(ascii((str(path.resolve()), note)).encode()).hexdigest(): note for note in notes}
    for mark, note in marks.items():
        if mark in said:
            continue
        print_note(f"{name}: {note} (said once; `eaglejax inspect {name}` repeats it)")
        with contextlib.suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            if len(said) > MOST_NOTES:
                record.unlink(missing_ok=True)
            # One short write: what another process appends meanwhile stays.
            with record.open("a", encoding="utf-8") as file:
                file.write(mark + "\n")


def print_json(value: Any) -> None:
    """One JSON value on one line of stdout, at once; characters that stdout cannot hold are escaped as JSON
    does it."""
    sys.stdout.write(json_text.dump(value, encoding=sys.stdout.encoding or "utf-8") + "\n")
    sys.stdout.flush()


def write_text(text: str) -> None:
    """Model text on stdout as it comes; characters that stdout cannot hold are shown by their numbers."""
    sys.stdout.write(for_stdout(text))
    sys.stdout.flush()


def for_stdout(text: str) -> str:
    """``text`` with what stdout's encoding cannot hold (on an ASCII terminal, or half a surrogate pair)
    escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


@contextlib.contextmanager
def no_progress() -> Iterator[Callable[..., None]]:
    """In place of :func:`progress` where the text itself shows how far things are."""
    yield lambda: None


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """A spinner on stderr while the body runs; a plain line where stderr is no terminal."""
    console = stderr()
    if not console.is_terminal:
        print_note(text)
        yield
        return
    with console.status(rich.text.Text(text)):
        yield


Rows = Iterable[tuple[str, Mapping[str, Any]]]
"""Names, which need not differ, each with an object as the commands print them."""


def stats_table(title: str, rows: Rows) -> rich.table.Table:
    """Acceptance and speed, one row a name; ``rows`` hold statistics."""
    rows = list(rows)
    table = rich.table.Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("tokens/s", "tau", "accepted at 1, 2, ...", "tokens", "ttft ms", "tpot ms"):
        table.add_column(heading, justify="right")
    judged = any("speedup_vs_best_ar" in row for _, row in rows)
    foretold = any(row.get("predicted_speedup") is not None for _, row in rows)
    if foretold:
        table.add_column("predicted", justify="right")
    if judged:
        table.add_column("vs fastest AR", justify="right")
        table.add_column("same text as AR", justify="right")
    for name, row in rows:
        cells = [
            f"{row['tokens_per_second']:.1f}",
            f"{row['mean_acceptance_length']:.2f}",
            acceptance(row["per_position_acceptance_rate"]),
            str(row["num_tokens"]),
            f"{row['ttft_ms']:.0f}",
            f"{row['tpot_ms']:.1f}",
        ]
        if foretold:
            speedup = row.get("predicted_speedup")
            cells.append("-" if speedup is None else f"{speedup:.2f}x")
        if judged:
            cells += [f"{row['speedup_vs_best_ar']:.2f}x", verdict(row)]
        table.add_row(name, *cells)
    return table


def print_widths(rows: Rows) -> None:
    """One line a name whose rounds chose widths: how many of them judged how many nodes."""
    for name, row in rows:
        counts = {int(width): count for width, count in row.get("widths", {}).items()}
        rests = row.get("rests", 0)
        if rests or len(counts) > 1:
            # A round without a draft judges one node, as may one whose draft is not worth more.
            counts[1] = counts.get(1, 0) - rests
            parts = [f"no draft {rests}"] if rests else []
            parts += [f"width {width} {count}" for width, count in sorted(counts.items()) if count]
            print_note(f"rounds of {name}: {', '.join(parts)}")


def print_vllm(rows: Rows) -> None:
    """The line that vLLM logs, one a name that drafted; tools that read its logs find it here too."""
    for name, row in rows:
        found = row.get("vllm")
        if found is None:
            continue
        rates = ", ".join(f"{rate:.3f}" for rate in found["per_position_acceptance_rate"])
        print_note(
            f"{name}: SpecDecoding metrics: "
            f"Mean acceptance length: {found['mean_acceptance_length']:.2f}, "
            f"Accepted throughput: {found['accepted_throughput']:.2f} tokens/s, "
            f"Drafted throughput: {found['drafted_throughput']:.2f} tokens/s, "
            f"Accepted: {found['vllm:spec_decode_num_accepted_tokens']} tokens, "
            f"Drafted: {found['vllm:spec_decode_num_draft_tokens']} tokens, "
            f"Per-position acceptance rate: {rates}, "
            f"Avg Draft acceptance rate: {found['draft_acceptance_rate']:.1%}"
        )


def profile_table(title: str, rows: Rows) -> rich.table.Table:
    """Shares of a round, one row a method that has a ``profile``."""
    table = rich.table.Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("round ms", "draft", "verification", "host", "draft ms", "verification ms"):
        table.add_column(heading, justify="right")
    for name, row in rows:
        found = row.get("profile")
        if found:
            table.add_row(
                name,
                f"{found['round_ms']:.2f}",
                *(f"{found[part]:.1%}" for part in ("draft_share", "verify_share", "host_share")),
                f"{found['propose_ms'] + found['observe_ms']:.2f}",
                f"{found['verify_ms']:.2f}",
            )
    return table


def acceptance(rates: list[float], most: int = 4) -> str:
    """The first rates of a list, two decimals each."""
    shown = " ".join(f"{rate:.2f}".removeprefix("0") for rate in rates[:most])
    return shown + (" ..." if len(rates) > most else "") if rates else "-"


def verdict(row: Mapping[str, Any]) -> str:
    """Whether a method's text is AR's, in words."""
    if row["identical_to_ar"] is None:
        return "-"
    if not row["identical_to_ar"]:
        return f"NO: a flip of {row['largest_flip_gap']:.3g} exceeds {row['tie_tolerance']:g}"
    if not row["flips"]:
        return "yes"
    return f"yes but {row['flips']} near ties (<= {row['largest_flip_gap']:.3g})"
