"""The floors of docs/architecture.md hold: nothing imports what stands above it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def floors() -> dict[str, int]:
    """Height of every name in the document's list, from the ground (0) up."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    block = text.split("## Floors", 1)[1].split("```", 2)[1].strip().splitlines()
    names = [re.match(r"(?:\w+(?:/|\.py)\s+)+", line + " ") for line in block]
    assert all(names), "every line of the list begins with names"
    return {
        name.rstrip("/").removesuffix(".py"): height
        for height, match in enumerate(reversed(names))
        for name in match.group().split()  # type: ignore[union-attr]
    }


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import that runs; those for type checkers alone are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name


def floor_of(parts: tuple[str, ...], heights: dict[str, int]) -> int | None:
    """Floor of a module of ours by its dotted name's parts; None for other packages."""
    if parts[0] in ("kernels_pallas", "experiments", "paper_figs"):
        return heights[parts[0]]
    if parts[0] != "eaglejax":
        return None
    # The package itself stands for all that a notebook uses.
    own = parts[1] if len(parts) > 1 else "__init__"
    known = own != "__init__" and (
        (ROOT / "eaglejax" / own).is_dir() or (ROOT / f"eaglejax/{own}.py").exists()
    )
    return heights[own] if known else heights["cli"]


def test_nothing_imports_what_stands_above_it() -> None:
    heights, seen, wrong = floors(), set(), []
    for package in ("eaglejax", "kernels_pallas", "experiments", "paper_figs"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            own = floor_of(parts, heights)
            assert own is not None
            seen.add(parts[1] if parts[0] == "eaglejax" else parts[0])
            for line, module in imports(path):
                other = floor_of(tuple(module.split(".")), heights)
                if other is not None and other > own:
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong
    assert {"models", "checkpoint", "drafts", "speculate", "nn", "kernels_pallas"} <= seen


def test_the_kernels_stand_alone() -> None:
    found = {
        module.split(".")[0]
        for path in (ROOT / "kernels_pallas").rglob("*.py")
        for _, module in imports(path)
    }
    assert "jax" in found
    assert "eaglejax" not in found


def test_importing_the_package_loads_nothing_that_few_need() -> None:
    """Pallas takes a third of a second; torch and matplotlib are not even dependencies."""
    heavy = ("jax.experimental.pallas", "torch", "matplotlib")
    code = f"import sys, eaglejax; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
