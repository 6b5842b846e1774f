"""A fuzzer of what is read: a damaged file loads as the format's own library loads it, or is refused in
one line of at most 500 characters. Nothing else may happen.

``make test`` tries 60 cases of each format, ``make test-all`` two thousand (``FUZZ_CASES``: another
number; ``FUZZ_FIRST``: the first of them). A failing case names its seed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fuzz_files import Judge, Load
from fuzz_formats import FORMATS

from eaglejax.errors import EaglejaxError


class Hang(BaseException):
    """A load that does not end."""


def verdict(folder: Path, load: Load, judge: Judge, want: Any) -> str:
    """ "loaded" or "refused"; anything else that happens is told in a text of its own."""
    try:
        got = load(folder)
    except EaglejaxError as error:
        text = str(error)
        return (
            "refused" if "\n" not in text and len(text) <= 500 else f"a message of {len(text)}: {text:.300}"
        )
    except Hang:
        return "hangs"
    except BaseException as error:
        return f"{type(error).__name__}: {error!s:.200}"
    try:
        judge(folder, got, want)
    except AssertionError as error:
        return f"loaded otherwise: {error!s:.300}"
    except Exception as error:
        return f"loaded, and the reference refuses: {type(error).__name__}: {error!s:.200}"
    return "loaded"


def fuzz(name: str, seeds: range) -> Counter[str]:
    """Verdicts of these cases; what failed is under the text of its failure, with the seeds."""
    of = FORMATS[name]
    found: Counter[str] = Counter()

    def alarm(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, alarm)
    with tempfile.TemporaryDirectory(prefix="f") as top, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, folder = Path(top) / "whole", Path(top) / "m"
        whole.mkdir()
        of.make(whole)
        want = of.load(whole)
        try:
            for seed in seeds:
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(whole, folder)
                of.damage(random.Random(f"{name} {seed}"), folder)
                signal.alarm(60)
                result = verdict(folder, of.load, of.judge, want)
                signal.alarm(0)
                found[result if result in ("loaded", "refused") else f"seed {seed}: {result}"] += 1
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
    return found


def check(name: str, seeds: range) -> None:
    found, cases = fuzz(name, seeds), len(seeds)
    loaded, refused = found.pop("loaded", 0), found.pop("refused", 0)
    assert not found, f"{name}: {len(found)} of {cases} fail: " + "; ".join(sorted(found)[:5])
    assert loaded, f"{name}: nothing loads, so that nothing is tested"
    assert refused > FORMATS[name].refused * cases, (
        f"{name}: {refused} of {cases} are refused; the damage is not found"
    )


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_load_as_elsewhere_or_are_refused(name):
    check(name, range(60))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_many_damaged_files(name):
    first = int(os.environ.get("FUZZ_FIRST", "0"))
    check(name, range(first, first + int(os.environ.get("FUZZ_CASES", "2000"))))
