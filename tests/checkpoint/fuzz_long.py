"""The fuzzer at length, in pieces that can be interrupted: ``python fuzz_long.py FOLDER [FORMAT ...]``.

Each piece of ``--piece`` cases is a file of FOLDER once it has ended; a further call does those that are not
there yet, for ``--seconds``, and every call ends with the table of all that ran. Status 1: a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "models")]


def table(folder: Path, names: list[str]) -> tuple[list[str], int]:
    """Rows of Markdown (a format's cases: loaded, refused, failed), and how many failed in all."""
    rows, failures = ["| format | cases | loaded | refused | failed |", "|---|---|---|---|---|"], 0
    for name in names:
        found: Counter[str] = Counter()
        for path in sorted(folder.glob(f"{name.replace(' ', '_')}-[0-9]*.json")):
            found.update(json.loads(path.read_text(encoding="utf-8")))
        if found:
            failed = found.total() - found["loaded"] - found["refused"]
            failures += failed
            rows.append(
                f"| {name} | {found.total():,} | {found['loaded']:,} | {found['refused']:,} | {failed} |"
            )
    return rows, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("formats", nargs="*")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--piece", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    asked = parser.parse_args()
    begin = time.monotonic()
    asked.folder.mkdir(parents=True, exist_ok=True)
    os.environ["EAGLEJAX_CACHE"] = str(asked.folder / "cache")
    import test_fuzz
    from fuzz_formats import FORMATS

    names = asked.formats or list(FORMATS)
    for first in range(0, asked.cases, asked.piece):
        for name in names:
            done = asked.folder / f"{name.replace(' ', '_')}-{first}.json"
            if done.exists() or time.monotonic() - begin > asked.seconds:
                continue
            found = test_fuzz.fuzz(name, range(first, min(first + asked.piece, asked.cases)))
            part = done.with_suffix(".part")
            part.write_text(json.dumps(found), encoding="utf-8")
            part.rename(done)
            for text in sorted(found.keys() - {"loaded", "refused"}):
                print(f"{name}, {text}", flush=True)
    rows, failures = table(asked.folder, list(FORMATS))
    print("\n".join(rows))
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
