"""docs/bug_cases.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def names_in(path: Path) -> set[str]:
    """Functions and classes of a test file, and ``Class::method``."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
    return found


def test_every_case_has_one_line() -> None:
    text = (ROOT / "docs/bug_cases.md").read_text(encoding="utf-8")
    found = [c for line in re.findall(r"^\| (A[^|]*) \|", text, re.MULTILINE) for c in line.split(", ")]
    assert sorted(found) == [f"A{n:02}" for n in range(1, 87)]


def test_every_test_that_the_document_names_exists() -> None:
    text = (ROOT / "docs/bug_cases.md").read_text(encoding="utf-8")
    count = 0
    for line in text.splitlines():
        file = None
        for path, name in re.findall(r"`([\w/]+\.py)?(?:::([\w:]+))?(?:\[[^`]*\])?`", line):
            if not path and not name:
                continue
            file = ROOT / "tests" / path if path else file
            assert file is not None, line
            assert file.is_file(), path
            assert not name or name in names_in(file), f"{file.name} has no {name}"
            count += 1
    assert count > 60
