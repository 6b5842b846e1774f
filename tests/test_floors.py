"""The floors of docs/architecture.md hold: nothing imports what stands above it, and nothing imports in a
circle."""

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
    """(line, dotted module) of every import that runs, in functions too; those for type checkers alone are
    left out."""
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


def module_names(root: Path) -> dict[str, Path]:
    """Every module of our two packages by its dotted name; a package's is its ``__init__``'s."""
    found = {}
    for package in ("eaglejax", "kernels_pallas"):
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def siblings(importer: str, imported: str, packages: set[str]) -> tuple[str, str, str]:
    """(folder, child, child): the innermost folder that holds both modules, and which of its modules or
    folders each of them is or is in. A folder's ``__init__`` is a child of its own."""
    a, b = (f"{m}.__init__" if m in packages else m for m in (importer, imported))
    left, right = a.split("."), b.split(".")
    shared = 0
    while left[shared] == right[shared]:
        shared += 1
    return ".".join(left[:shared]), left[shared], right[shared]


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Sets of nodes that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for node in edges.get(todo.pop(), ()):
                if node not in seen:
                    seen.add(node)
                    todo.append(node)
        return seen

    reach = {node: reached(node) for node in edges}
    found = {frozenset(other for other in reach[node] if node in reach.get(other, ())) for node in edges}
    return sorted(sorted(circle) for circle in found if circle)


def import_circles(root: Path) -> dict[str, list[list[str]]]:
    """Of each folder the circles among what it holds, modules and folders alike."""
    modules = module_names(root)
    packages = {name for name, path in modules.items() if path.name == "__init__.py"}
    edges: dict[str, dict[str, set[str]]] = {}
    for importer, path in modules.items():
        for _, name in imports(path):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if not name or name == importer or name.split(".")[0] != importer.split(".")[0]:
                continue
            folder, one, other = siblings(importer, name, packages)
            edges.setdefault(folder, {}).setdefault(one, set()).add(other)
    found = {folder: circles(within) for folder, within in edges.items()}
    return {folder: within for folder, within in sorted(found.items()) if within}


STANDING: dict[str, list[list[str]]] = {}
"""Circles that are still there; whoever opens one takes it out, and none is added."""


def test_nothing_imports_in_a_circle() -> None:
    """Neither folders nor the modules of one folder, whether at once or inside a function."""
    assert import_circles(ROOT) == STANDING


def test_a_circle_is_found_wherever_it_is_closed(tmp_path: Path) -> None:
    files = {
        "eaglejax/__init__.py": "from eaglejax.low import one\n",
        "eaglejax/low/one.py": "from eaglejax.low.two import x\n",
        "eaglejax/low/two.py": "def f():\n    from eaglejax.low import one\n",
        "eaglejax/high/three.py": "from eaglejax.low.deep import four\n",
        "eaglejax/low/deep/four.py": "def f():\n    import eaglejax.high.three\n",
        "eaglejax/high/types.py": "if TYPE_CHECKING:\n    import eaglejax.alone\n",
        "eaglejax/alone.py": "import eaglejax.high.types\n",
        "kernels_pallas/__init__.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for folder in ("low", "low/deep", "high"):
        (tmp_path / "eaglejax" / folder / "__init__.py").touch()
    assert import_circles(tmp_path) == {"eaglejax": [["high", "low"]], "eaglejax.low": [["one", "two"]]}


FAMILIES = ("dflash", "eagle", "medusa", "mtp")
"""Folders of the families of drafts that have a configuration of their own."""

RECORDS = {
    (f"eaglejax.{floor}.registry", f"eaglejax.{floor}.{family}.{module}")
    for floor, modules in (("drafts", ("family", "methods")), ("train", ("family",)))
    for module in modules
    for family in FAMILIES
}
"""The registries, and of a family's folder the modules that they list."""


def own(family: str) -> tuple[str, ...]:
    """Where a family's drafts are themselves the subject."""
    return (f"eaglejax.drafts.{family}", f"eaglejax.train.{family}", f"eaglejax.interop.convert.{family}")


def within(module: str, folder: str) -> bool:
    return module == folder or module.startswith(f"{folder}.")


def test_a_family_of_drafts_is_known_by_its_records_alone() -> None:
    """Nobody else names its configuration, so that nobody can ask for its version."""
    modules, listed, wrong = module_names(ROOT), set(), []
    for importer, path in modules.items():
        for line, name in imports(path):
            found = name if name in modules else name.rpartition(".")[0]
            if (importer, found) in RECORDS:
                listed.add((importer, found))
                continue
            for family in FAMILIES:
                if any(within(importer, folder) for folder in own(family)):
                    continue
                if any(within(name, folder) for folder in own(family)[:2]):
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong
    assert listed == RECORDS


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
