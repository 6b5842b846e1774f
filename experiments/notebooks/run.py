"""Run a notebook's code cells in order: ``python -m experiments.notebooks.run FILE [--store]``.

What a notebook kernel does, without one: all cells share one namespace, and a cell that fails is named.
Notebooks read ``EAGLEJAX_NOTEBOOK_TARGET``, ``EAGLEJAX_NOTEBOOK_DRAFT`` and ``EAGLEJAX_NOTEBOOK_QUICK`` (any
text: small constants), so that tests can run every cell on a small model. ``--store`` keeps what the cells
printed in the file, so that readers see the outputs of a real run, and a digest of the cells that printed it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from eaglejax.checkpoint.files import write_text


def read(path: Path) -> dict[str, Any]:
    """The notebook. Raises ValueError for a file that is no notebook of format 4."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    if notebook.get("nbformat") != 4:
        raise ValueError(f"{path} is no notebook of format 4")
    return notebook


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The code cells, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def digest(notebook: dict[str, Any]) -> str:
    """SHA-256 of the code cells' texts, hexadecimal: outputs are of these cells and of no others."""
    return hashlib.sha256(
        json.dumps(["".join(cell["source"]) for cell in code_cells(notebook)]).encode()
    ).hexdigest()


class _Copy(io.StringIO):
    """Keeps what is printed, and passes it on."""

    def __init__(self, out: Any) -> None:
        super().__init__()
        self._out = out

    def write(self, text: str) -> int:
        self._out.write(text)
        self._out.flush()
        return super().write(text)


def run(path: Path, *, store: bool = False) -> dict[str, Any]:
    """Execute the notebook; its namespace afterwards. ``store``: write what each cell printed into the file,
    once all of them have run. Raises RuntimeError that names the failing cell."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    notebook = read(path)
    for number, cell in enumerate(code_cells(notebook), start=1):
        printed = _Copy(sys.stdout)
        code = compile("".join(cell["source"]), f"{path.name}, code cell {number}", "exec")
        try:
            with contextlib.redirect_stdout(printed):
                exec(code, namespace)
        except Exception as error:
            raise RuntimeError(f"{path.name}, code cell {number}: {error}") from error
        lines = printed.getvalue().splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    if store:
        notebook["metadata"] = notebook.get("metadata", {}) | {"outputs_of": digest(notebook)}
        write_text(path, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    return namespace


if __name__ == "__main__":
    run(Path(sys.argv[1]), store="--store" in sys.argv[2:])
