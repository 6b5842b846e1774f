"""Run a notebook's code cells in order: ``python -m experiments.notebooks.run FILE``.

What a notebook kernel does, without one: all cells share one namespace, and a cell that fails is named.
Notebooks read ``EAGLEJAX_NOTEBOOK_TARGET``, ``EAGLEJAX_NOTEBOOK_DRAFT`` and ``EAGLEJAX_NOTEBOOK_QUICK`` (any
text: small constants), so that tests can run every cell on a small model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def code_cells(path: Path) -> list[str]:
    """Sources of the code cells. Raises ValueError for a file that is no notebook of format 4."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    if notebook.get("nbformat") != 4:
        raise ValueError(f"{path} is no notebook of format 4")
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(path: Path) -> dict[str, Any]:
    """Execute the notebook; its namespace afterwards. Raises RuntimeError that names the failing cell."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(code_cells(path), start=1):
        try:
            exec(compile(source, f"{path.name}, code cell {number}", "exec"), namespace)
        except Exception as error:
            raise RuntimeError(f"{path.name}, code cell {number}: {error}") from error
    return namespace


if __name__ == "__main__":
    run(Path(sys.argv[1]))
