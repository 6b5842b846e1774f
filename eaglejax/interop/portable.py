"""What a device's host needs to replay a recording: the modules that import neither jax nor the rest of
eaglejax.

They import each other by their full names, so a copy has the package's own layout: a folder with
``eaglejax/__init__.py`` (empty), the modules of the ground floor that they use, and ``eaglejax/interop/``.
Put that folder first on ``sys.path`` and ``import eaglejax.interop.models.runner`` works with torch alone.
"""

from __future__ import annotations

import shutil
from pathlib import Path

NEEDS_JAX = ("convert", "parity/recording.py", "parity/trace.py")
"""What of ``eaglejax.interop`` stands on the JAX side; all else runs without it."""

GROUND = ("errors.py", "tap.py")
"""Modules of eaglejax that the others use; they import none themselves."""


def portable_modules() -> list[Path]:
    """The files of ``eaglejax.interop`` that run without jax, relative to its folder."""
    here = Path(__file__).parent
    files = sorted(path.relative_to(here) for path in here.rglob("*.py"))
    return [file for file in files if not {file.parts[0], file.as_posix()} & set(NEEDS_JAX)]


def write_sources(folder: Path) -> list[Path]:
    """Copy the portable modules below ``folder``, which may exist; files of the same name are replaced.

    Returns the files written.
    """
    here = Path(__file__).parent
    package = folder / "eaglejax"
    sources = [here.parent / name for name in GROUND] + [here / module for module in portable_modules()]
    targets = [package / source.relative_to(here.parent) for source in sources]
    for source, target in zip(sources, targets, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    empty = package / "__init__.py"
    empty.write_text(
        '"""The part of eaglejax that replays a recording with torch alone."""\n', encoding="utf-8"
    )
    return [empty, *targets]
